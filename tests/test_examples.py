import subprocess
import sys
from pathlib import Path

from pagemill.client import Client

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run_example(name: str, *arguments: str, url: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        env={"PAGEMILL_REDIS_URL": url},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_one_job_is_answered(served_url: str) -> None:
    """
    The smallest program prints one answer.
    """
    assert 1 == len(run_example("submit_one.py", "Why?", url=served_url))


def test_many_jobs_are_answered_once(served_url: str) -> None:
    """
    Each document gets its answer; the second run finds all of them answered and adds no job.
    """
    with Client(served_url) as client:
        first = run_example("submit_many.py", url=served_url)
        num_accepted = client.stats().totals["accepted"]
        again = run_example("submit_many.py", url=served_url)

        assert num_accepted == client.stats().totals["accepted"]
    names = sorted(path.name for path in (EXAMPLES / "documents").glob("*.txt"))
    assert names == sorted(line.partition(": ")[0] for line in first)
    assert sorted(first) == sorted(again)


def test_answers_are_streamed(served_url: str) -> None:
    """
    Pieces of both answers arrive, marked by their question.
    """
    lines = run_example("stream_async.py", "one", "two", url=served_url)

    assert {"[0]", "[1]"} == {line.split()[0] for line in lines}
