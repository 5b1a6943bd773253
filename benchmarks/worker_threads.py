"""
A worker that says, on SIGUSR1, how much processor time each of its threads has used.

    python -m benchmarks.worker_threads REPORT FLAGS...

REPORT is the file that is written, whole: {"process": seconds, "threads": {name: seconds}}.
The flags are those of `python -m worker`; nothing else differs from it.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from worker.logs import configure_logging
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


def write_report(path: Path) -> None:
    """Write what has been used so far; readers never see half of it."""
    half = path.with_suffix(".half")
    threads = thread_seconds()
    half.write_text(json.dumps({"process": time.process_time(), "threads": threads}))
    os.replace(half, path)


def main(argv: list[str] | None = None) -> int:
    report, *flags = sys.argv[1:] if argv is None else argv
    signal.signal(signal.SIGUSR1, lambda *_: write_report(Path(report)))
    # one process: what starts it is no part of the figures
    settings = WorkerSettings.read([*flags, "--no-supervisor"])
    configure_logging(settings.log_format, settings.log_level)
    return run(settings)


if __name__ == "__main__":
    raise SystemExit(main())
