"""A runner that is killed at any moment, as a process against a real server and worker."""

import random
from pathlib import Path

import pytest

from pagemill.bulk_client import BulkClient
from tests.e2e import bulk as e2e
from tests.support.bulk_runs import check_complete, run_killed, write_documents


def test_a_killed_run_loses_and_doubles_nothing(served_url: str, tmp_path: Path) -> None:
    """
    Killed three times: all rows, in order, each once, no job run twice, and the manifest last.
    """
    source = write_documents(tmp_path / "documents.jsonl", 160)
    output = (tmp_path / "out").as_uri()
    flags = ["--redis-url", served_url, "--input", str(source), "--rows-per-chunk", "8", "--max-jobs", "16"]
    flags += ["--option", "max_tokens=4"]

    done = run_killed(tmp_path, flags, output, kills=3, num_chunks=20, draw=random.Random(6))

    assert 0 == done.returncode, done.stderr
    with BulkClient(served_url) as client:
        assert {"rows": 160, "shards": 20, "jobs": 160} == check_complete(output, 160, client)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_20_000_documents_and_three_kills(tmp_path: Path) -> None:
    """
    The same at full size.
    """
    assert {"rows": 20_000, "shards": 157, "jobs": 20_000, "kills": 3} == e2e.run(tmp_path, seed=2)
