"""
A worker that says, on SIGUSR1, how much processor time each of its threads has used, and its engine's process.

    python -m benchmarks.worker_threads REPORT FLAGS...

REPORT is the file that is written, whole: {"process": seconds, "threads": {name: seconds}}. The process
that the worker has started for its engine counts as one of the threads, by the name of "engine".
The flags are those of `python -m worker`; nothing else differs from it.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from pagemill.logs import configure_logging
from worker.process import run
from worker.settings import WorkerSettings


def thread_seconds() -> dict[str, float]:
    """Processor seconds of each living thread, numbered ones of a pool added up."""
    seconds: dict[str, float] = {}
    for thread in threading.enumerate():
        if thread.ident is not None:
            name = thread.name.rstrip("0123456789").rstrip("_-")
            used = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            seconds[name] = seconds.get(name, 0.0) + used
    return seconds


def engine_seconds() -> float:
    """Processor seconds of the processes that this one has started and that live."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return sum(time.clock_gettime(_clock_of(int(child))) for child in children)


def _clock_of(pid: int) -> int:
    # as clock_getcpuclockid(3) makes it, which Python does not have
    return ~pid << 3 | 2


def write_report(path: Path) -> None:
    """Write what has been used so far; readers never see half of it."""
    half = path.with_suffix(".half")
    engine = engine_seconds()
    report = {"process": time.process_time() + engine, "threads": {**thread_seconds(), "engine": engine}}
    half.write_text(json.dumps(report))
    os.replace(half, path)


def main(argv: list[str] | None = None) -> int:
    report, *flags = sys.argv[1:] if argv is None else argv
    signal.signal(signal.SIGUSR1, lambda *_: write_report(Path(report)))
    # one process: what starts it is no part of the figures
    settings = WorkerSettings.read([*flags, "--no-supervisor"])
    configure_logging(settings)
    return run(settings)


if __name__ == "__main__":
    raise SystemExit(main())
