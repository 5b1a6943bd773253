"""`pagemill batch`: a batch from the command line, from its opening to its end."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pagemill.client import Client
from tests.support.servers import MakeConsumer

Run = Callable[..., tuple[int, str, str]]


pytestmark = pytest.mark.usefixtures("settings")


def words(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_a_batch_is_opened_filled_sealed_and_waited_for(run: Run, consumer: MakeConsumer, tmp_path: Path) -> None:
    """
    What `batch create` prints is what `submit --batch` and the others take; a wait tells of the way.
    """
    path = tmp_path / "jobs.jsonl"
    path.write_text('{"prompt": "one"}\n{"prompt": "two"}\n{"prompt": "three", "batch": "none"}\n')
    batch_id = run("batch", "create", "--metadata", "night=7", "--webhook", "https://example.org/")[1].strip()

    code, ids, errors = run("submit", "--jsonl", str(path), "--batch", batch_id)
    sealed = run("batch", "seal", batch_id)
    worker = consumer()
    worker.finish(*worker.pull())
    waited = run("batch", "wait", batch_id)

    assert (1, 2) == (code, len(ids.splitlines()))
    assert errors.startswith("line 3: queue")
    assert (0, f"{batch_id} sealed: 0 of 2 ended (0%), done 0\n", "") == sealed
    assert (0, f"{batch_id} ended: 2 of 2 ended (100%), done 2\n", "") == waited
    status = words(run("batch", "status", batch_id)[1])
    assert ["state", "ended"] == status[0]
    assert ["jobs", "2:", "done", "2,", "open", "0"] == status[2]
    assert ["tokens", "6", "of", "prompts,", "4", "of", "answers"] == status[3]
    assert ["webhook", "https://example.org/,", "pending", "after", "0", "tries"] in status
    assert ["metadata", '{"night":', '"7"}'] == status[-1]
    job = words(run("status", ids.split()[0])[1])
    assert ["batch", batch_id] in job
    assert ["took", "3", "of", "the", "prompt,", "2", "of", "the", "answer,", "0.0", "s", "of", "the", "engine"] in job


def test_a_wait_tells_of_jobs_without_an_answer(run: Run, client: Client, consumer: MakeConsumer) -> None:
    """
    The exit code is 1 where a job failed, and where the time is over.
    """
    run("batch", "create", "b")
    run("submit", "x", "--batch", "b")

    over = run("batch", "wait", "b", "--wait-s", "0.05")
    run("batch", "seal", "b")
    worker = consumer()
    worker.finish(*worker.pull(), status="failed")
    failed = run("batch", "wait", "b", "--json")

    assert (1, "pagemill: batch b has not ended after 0.05 s; it goes on\n") == (over[0], over[2])
    assert (1, 1) == (failed[0], json.loads(failed[1].splitlines()[-1])["failed"])
    assert client.batch_status("b").ended


def test_a_batch_is_cancelled(run: Run) -> None:
    """
    Its jobs end, and one that comes later is refused in words.
    """
    run("batch", "create", "b")
    run("submit", "x", "--batch", "b")

    told = run("batch", "cancel", "b")
    late = run("submit", "y", "--batch", "b")

    assert (0, "b ended: 1 of 1 ended (100%), done 0, cancelled 1\n", "") == told
    assert (1, "pagemill: batch b takes no more jobs: it was sealed or cancelled; create another one\n") == (
        late[0],
        late[2],
    )
    assert ["state", "ended,", "cancelled"] == words(run("batch", "status", "b")[1])[0]


def test_batches_are_listed(run: Run) -> None:
    """
    One a line, newest first, as a table or as JSON.
    """
    assert (0, "no batches\n", "") == run("batch", "list")
    for name in ("first", "second"):
        run("batch", "create", name)
    run("batch", "seal", "first")

    code, shown, _ = run("batch", "list")
    as_json = [json.loads(line) for line in run("batch", "list", "--limit", "1", "--json")[1].splitlines()]

    head, *lines = words(shown)
    assert (0, ["batch", "state", "jobs"]) == (code, head[:3])
    assert [["second", "open", "0"], ["first", "ended", "0"]] == [line[:3] for line in lines]
    assert ["second"] == [one["batch_id"] for one in as_json]


def test_an_unknown_batch_is_told_in_words(run: Run) -> None:
    """
    Every command that takes a batch says what is wrong with it, and exits with 1.
    """
    for command in ("seal", "status", "wait", "cancel"):
        code, shown, told = run("batch", command, "none")
        assert (1, "") == (code, shown)
        assert "no batch none, or it has expired" in told
