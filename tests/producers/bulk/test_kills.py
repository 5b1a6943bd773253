"""A runner that is killed at any moment, as a process against a real server and worker."""

import random
from pathlib import Path

import pytest

from pagemill.bulk_client import BulkClient
from tests.e2e import bulk as e2e
from tests.support.bulk_runs import check_complete, run_killed, write_documents
from tests.support.services import RunningService
from worker.fake_engine import FakeEngine


def test_a_killed_run_loses_and_doubles_nothing(
    server_url: str, queue: str, client: BulkClient, tmp_path: Path
) -> None:
    """
    Killed three times: all rows, in order, each once, no job run twice, and the manifest last.
    """
    source = write_documents(tmp_path / "documents.jsonl", 160)
    output = (tmp_path / "out").as_uri()
    flags = ["--redis-url", server_url, "--queue", queue, "--input", str(source), "--rows-per-chunk", "8"]
    flags += ["--max-jobs", "16", "--option", "max_tokens=4"]

    # ten chunks a second, so that no run comes to its end before it is killed
    with RunningService(server_url, queue, engine=FakeEngine(tokens_per_s=320)):
        done = run_killed(tmp_path, flags, output, kills=3, num_chunks=20, draw=random.Random(6))

    assert 0 == done.returncode, done.stderr
    assert {"rows": 160, "shards": 20, "jobs": 160} == check_complete(output, 160, client)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_20_000_documents_and_three_kills(tmp_path: Path) -> None:
    """
    The same at full size.
    """
    assert {"rows": 20_000, "shards": 157, "jobs": 20_000, "kills": 3} == e2e.run(tmp_path, seed=2)
