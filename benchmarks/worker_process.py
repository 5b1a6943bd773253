"""A worker in a process of its own, at a server that lasts as long: what the queue's figures are taken from."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from pagemill.client import Client
from producers.child import Child

_START_S = 300.0
_POLL_S = 0.02


class WorkerFailed(Exception):
    """Raised when the worker does not start or does not live; carries its last lines."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Processor seconds of a worker since its start, in all and by thread."""

    process: float
    threads: Mapping[str, float]

    def since(self, before: "Usage") -> "Usage":
        """What was used between two looks."""
        threads = {name: used - before.threads.get(name, 0.0) for name, used in self.threads.items()}
        return Usage(self.process - before.process, threads)


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker that has started."""

    child: Child
    report: Path

    def usage(self) -> Usage:
        """Ask the worker what it has used."""
        self.report.unlink(missing_ok=True)
        os.kill(self.child.pid, signal.SIGUSR1)
        deadline = time.monotonic() + _START_S
        while not self.report.exists():
            _still_there(self.child, deadline)
        found = json.loads(self.report.read_text())
        return Usage(found["process"], found["threads"])


@contextmanager
def running_worker(
    url: str, flags: Sequence[str], *, queue: str, environment: Mapping[str, str] | None = None
) -> Iterator[Worker]:
    """
    Start a worker and wait until it serves the queue; stop it at the end.

    Raises:
        WorkerFailed: it ended, or did not start in time.
    """
    with TemporaryDirectory(prefix="pagemill-bench-") as folder:
        report = Path(folder) / "usage.json"
        command = [
            *(sys.executable, "-m", "benchmarks.worker_threads", str(report)),
            *("--redis-url", url, "--queue", queue, *flags),
        ]
        env = {**(os.environ if environment is None else environment)}
        child = Child(command, log=Path(folder) / "worker.log", environ=env)
        with child, Client(url, queue=queue) as client:
            deadline = time.monotonic() + _START_S
            while not client.workers():
                _still_there(child, deadline)
            yield Worker(child, report)


def _still_there(child: Child, deadline: float) -> None:
    if child.exit_code() is not None or time.monotonic() > deadline:
        raise WorkerFailed(f"the worker ended with {child.exit_code()} or is stuck:\n{child.last_lines()}")
    time.sleep(_POLL_S)
