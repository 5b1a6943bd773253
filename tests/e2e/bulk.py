"""
A bulk job of 20,000 documents whose runner is killed three times, against a real server and worker.

    python -m tests.e2e.bulk
"""

import json
import random
import sys
import tempfile
from pathlib import Path

from pagemill.bulk_client import BulkClient
from producers.child import Child
from producers.local_redis import local_redis
from tests.support.bulk_runs import check_complete, run_killed, write_documents

ROWS_PER_CHUNK = 128


def run(workdir: Path, *, documents: int = 20_000, kills: int = 3, seed: int = 1) -> dict[str, int]:
    """
    Run it, and check what came out: all rows, in order, each once, under a manifest written last.

    Returns:
        Counts: rows, shards, jobs and kills.
    """
    source = write_documents(workdir / "documents.jsonl", documents)
    output = (workdir / "output").as_uri()
    worker = [sys.executable, "-m", "worker", "--engine", "fake", "--max-num-seqs", "256", "--redis-url"]
    with (
        local_redis(append_only=True) as url,
        Child([*worker, url], log=workdir / "worker.log"),
        BulkClient(url) as client,
    ):
        flags = ["--redis-url", url, "--input", str(source), "--rows-per-chunk", str(ROWS_PER_CHUNK)]
        flags += ["--option", "max_tokens=16", "--max-jobs", "1024"]
        num_chunks = -(-documents // ROWS_PER_CHUNK)
        done = run_killed(workdir, flags, output, kills=kills, num_chunks=num_chunks, draw=random.Random(seed))
        assert done.returncode == 0, done.stderr
        return check_complete(output, documents, client) | {"kills": kills}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="pagemill-e2e-") as folder:
        print(json.dumps(run(Path(folder))))
