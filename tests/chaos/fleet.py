"""Worker processes that are meant to be disturbed."""

import random
import signal
import time
from pathlib import Path

from tests.chaos.report import Report
from tests.chaos.resumes import Resumes
from tests.support.servers import wait_for
from tests.support.services import WorkerProcess

# a host that goes down, a worker that is killed beside its supervisor, one that is told to stop, one that freezes
FAULTS = {"kill": 4, "worker_kill": 2, "drain": 3, "pause": 3}


class Fleet:
    """
    Workers under faults, started again whenever they end.

    Args:
        flags: Of every worker.
    """

    def __init__(
        self, flags: tuple[str, ...], folder: Path, report: Report, resumes: Resumes, draw: random.Random
    ) -> None:
        self._flags = (*flags, "--lease-s", str(report.lease_s), "--drain-s", "0")
        self._folder = folder
        self._report = report
        self._resumes = resumes
        self._draw = draw
        self._paused: dict[int, float] = {}
        self._due = list(FAULTS)
        self.workers = [self._start() for _ in range(report.workers)]

    @property
    def has_faults_due(self) -> bool:
        """Whether a kind of fault has not happened yet to a worker that held jobs."""
        return bool(self._due)

    def anybody_serves(self) -> bool:
        """Whether a worker is up and not paused."""
        return any(worker.serves for place, worker in enumerate(self.workers) if place not in self._paused)

    def disturb(self) -> None:
        """Let a fault happen to one worker that has come up."""
        place = self._draw.randrange(len(self.workers))
        worker = self.workers[place]
        if place in self._paused or not worker.serves:
            return
        worker_id = worker.worker_id
        # stopped, it claims nothing between our look and its end
        worker.send_worker(signal.SIGSTOP)
        held = self._resumes.held_by(worker_id)
        # each kind once to one that had jobs, and then as it comes
        fault = self._due[-1] if self._due else self._draw.choices(list(FAULTS), list(FAULTS.values()))[0]
        if held and self._due:
            self._due.pop()
        if fault == "pause":
            self._report.pauses += 1
            self._paused[place] = time.monotonic() + self._report.lease_s * self._draw.uniform(1.1, 2.0)
            return
        if fault == "drain":
            self._report.drains += 1
            worker.send_worker(signal.SIGCONT)
            worker.send(signal.SIGTERM)
            self._resumes.ended("stopped", worker_id, held)
        elif fault == "worker_kill":
            self._report.worker_kills += 1
            worker.send_worker(signal.SIGKILL)
            self._resumes.ended("orphaned", worker_id, held)
        else:
            self._report.kills += 1
            worker.kill()
            self._resumes.ended("killed", worker_id, held)

    def mend(self) -> None:
        """Wake those whose pause is over and start those that have ended again."""
        for place, until in list(self._paused.items()):
            if time.monotonic() >= until:
                self.workers[place].send_worker(signal.SIGCONT)
                del self._paused[place]
        for place, worker in enumerate(self.workers):
            if not worker.running:
                self.workers[place] = self._start()

    def drain(self) -> list[int]:
        """End all in good order; returns their exit codes."""
        for place in self._paused:
            self.workers[place].send_worker(signal.SIGCONT)
        for worker in self.workers:
            wait_for(lambda worker=worker: worker.serves or not worker.running, 60)
            worker.send(signal.SIGTERM)
        return [worker.wait(30) for worker in self.workers]

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()

    def _start(self) -> WorkerProcess:
        self._report.starts += 1
        return WorkerProcess(self._folder / f"worker-{self._report.starts}.log", *self._flags)
