"""
A bulk job from its input to its manifest, through a real server and a worker with the fake engine.

    python -m benchmarks.bulk_run [--rows 1000000] [--line-bytes 200] [--workers 1]

The input is made in a temporary folder and deleted. Prints one JSON line: documents a second, the peaks of
resident memory of the process that runs the job and of the server, and what it left in the queue.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from redis import Redis

from benchmarks.bulk_memory import make
from producers.bulk.locations import open_folder
from producers.bulk.manifest import read_manifest
from producers.child import Child
from producers.local_redis import local_redis

# how often memory is looked at
LOOK_S = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--line-bytes", type=int, default=200)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bulk-run-")))
        make(folder / "documents.jsonl", "jsonl", options.rows, options.line_bytes)
        url = stack.enter_context(local_redis(append_only=False))
        worker = [sys.executable, "-m", "worker", "--engine", "fake", "--max-num-seqs", "256", "--redis-url", url]
        for number in range(options.workers):
            stack.enter_context(Child(worker, log=folder / f"worker-{number}.log"))
        line = run(folder, url)
        print(json.dumps({"bulk_run": "jsonl", "rows": options.rows, "line_bytes": options.line_bytes} | line))


def run(folder: Path, url: str) -> dict[str, object]:
    """Do the job, and say what it took."""
    output = (folder / "output").as_uri()
    command = [sys.executable, "-m", "producers.bulk", "run", "--redis-url", url]
    command += ["--input", str(folder / "documents.jsonl"), "--output", output, "--option", "max_tokens=16"]
    started, peak, server = time.monotonic(), 0.0, 0.0
    log = folder / "run.log"
    with Redis.from_url(url) as redis, log.open("wb") as file, subprocess.Popen(command, stderr=file) as job:
        while job.poll() is None:
            peak = max(peak, _peak_mib(job.pid))
            server = max(server, redis.info("memory")["used_memory"] / 2**20)
            time.sleep(LOOK_S)
        seconds = time.monotonic() - started
        if job.returncode:
            raise SystemExit(f"the job ended with {job.returncode}: {log.read_text()[-2000:]}")
        left = redis.dbsize()
    manifest = read_manifest(open_folder(output))
    assert manifest is not None
    return {
        "num_rows": manifest.num_rows,
        "num_failed": manifest.num_failed,
        "seconds": round(seconds, 1),
        "documents_s": round(manifest.num_rows / seconds),
        "peak_mib": round(peak, 1),
        "server_peak_mib": round(server, 1),
        "keys_left": left,
    }


def _peak_mib(pid: int) -> float:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return 0.0
    kib = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    # one that has just ended has no memory any more
    return int(kib[0]) / 1024 if kib else 0.0


if __name__ == "__main__":
    main()
