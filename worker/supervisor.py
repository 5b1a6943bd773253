"""
Starts the worker process, sees how it ends, tells the queue, and starts it again.

A process that one of its jobs has killed cannot say so itself, and a lease that runs out says
nothing of the reason. This process does little, so that nothing kills it: one thread, no model.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import structlog

from pagemill.connection import connect_briefly
from pagemill.keys import QueueKeys
from worker import exits
from worker.lifeline import HURRY_SIGNAL, STOP_SIGNALS, Lifeline, new_worker_id
from worker.obituaries import Death, Obituaries
from worker.settings import WorkerSettings
from worker.verdicts import End, judge, num_oom_kills

log = structlog.get_logger(__name__)

# how long the queue is tried before the worker is started again, or we end
REPORT_S = 5.0
# how long the rest of a worker that died is waited for: it may still hold the device
REMAINS_S = 15.0
REMAINS_POLL_S = 0.02
# a worker that lived for so long came up well: its next end is the first again
GOOD_LIFE_S = 300.0


def supervise(settings: WorkerSettings) -> int:
    """
    Run this program again as a worker, and again whenever it ends and was not told to.

    Returns:
        The exit code of a worker that drained or could not start.
    """
    command = [sys.executable, *sys.orig_argv[1:]]
    with connect_briefly(settings.redis_url, key=QueueKeys(settings.queue).base) as redis, Wakeups() as wakeups:
        supervisor = Supervisor(
            lambda: Child(command),
            Obituaries(redis, settings.queue),
            wakeups,
            restart_s=settings.restart_s,
            max_restart_s=settings.max_restart_s,
        )
        return supervisor.run()


class Wakeups:
    """Signals of interest as they come, and no sooner and no later: those that come between two waits are kept."""

    def __enter__(self) -> Self:
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in (*STOP_SIGNALS, signal.SIGCHLD):
            # its number is in the pipe already
            signal.signal(number, lambda *_: None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(-1)
        # a signal that comes late must not kill us on the way out, where the interpreter takes its handlers away
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        os.close(self._reader)
        os.close(self._writer)

    def wait(self, timeout_s: float | None) -> list[int]:
        """The numbers of those that have come; none when the time is over."""
        select.select([self._reader], [], [], timeout_s)
        with contextlib.suppress(BlockingIOError):
            return list(os.read(self._reader, 4096))
        return []


class Child:
    """
    One worker process, running from now on.

    It has a session of its own: Ctrl-C at the terminal reaches the supervisor alone, which stops it in order.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.worker_id = new_worker_id()
        self._oom_kills = num_oom_kills()
        self._notes, writer = os.pipe()
        os.set_blocking(self._notes, False)
        line = Lifeline(os.getpid(), writer, self.worker_id)
        self._process = subprocess.Popen(
            [*command, "--supervised", str(line)], pass_fds=[writer], start_new_session=True
        )
        os.close(writer)
        log.info("supervisor.started", pid=self._process.pid, worker=self.worker_id)

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> tuple[int, End] | None:
        """Its exit code and what that means; None while it runs. Not to be asked again after that."""
        code = self._process.poll()
        if code is None:
            return None
        text = b""
        with contextlib.suppress(BlockingIOError):
            text = os.read(self._notes, 65536)
        notes = text.decode(errors="replace").splitlines()
        return code, judge(code, notes, oom_killed=num_oom_kills() > self._oom_kills)

    @property
    def all_gone(self) -> bool:
        """Whether its engine's process has ended too, which may take a while longer."""
        try:
            return not os.read(self._notes, 65536)
        except BlockingIOError:
            return False

    def close(self) -> None:
        """Ask nothing of it any more."""
        os.close(self._notes)


class Supervisor:
    """
    Keeps one worker running.

    Args:
        start: Starts one.
        restart_s: Pause before a worker that died is started again; doubled with each that dies soon, and
            took no job along that is now suspected: what that job does to others is found out without delay.
        max_restart_s: Longest such pause.
    """

    def __init__(
        self,
        start: Callable[[], Child],
        obituaries: Obituaries,
        wakeups: Wakeups,
        *,
        restart_s: float,
        max_restart_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start = start
        self._obituaries = obituaries
        self._wakeups = wakeups
        self._restart_s = restart_s
        self._max_restart_s = max_restart_s
        self._clock = clock

        # all the mutable state there is
        self._num_stops = 0
        self._has_served = False
        self._pause_s = restart_s

    def run(self) -> int:
        """Start workers until one drains, or none could ever start, or we are told to stop."""
        while True:
            started, num_blamed = self._clock(), self._obituaries.num_blamed
            child = self._start()
            code, end = self._watch(child)
            self._has_served |= end.served
            if end.kind == "drained":
                return self._leave(exits.DRAINED)
            if end.kind in ("refused", "away") and not self._has_served:
                return self._leave(exits.STARTUP if code == exits.AWAY else code)
            self._report(child, end, code)
            if self._num_stops:
                return self._leave(exits.FAILED if end.served else exits.DRAINED)
            if self._clock() - started >= GOOD_LIFE_S or self._obituaries.num_blamed > num_blamed:
                self._pause_s = self._restart_s
            if not self._pause(child):
                return self._leave(exits.DRAINED)

    def _watch(self, child: Child) -> tuple[int, End]:
        """Wait for the end of a worker; pass on what we are told meanwhile."""
        while (end := child.end()) is None:
            for number in self._wait(None):
                if number in STOP_SIGNALS:
                    child.send(HURRY_SIGNAL if self._num_stops else signal.SIGTERM)
                    self._num_stops += 1
            self._obituaries.tell()
        return end

    def _report(self, child: Child, end: End, code: int) -> None:
        """Tell the queue of a death, for a while; what could not be told then is tried beside all else."""
        log.error("supervisor.worker_died", worker=child.worker_id, code=code, cause=end.kind, why=end.why)
        if not end.served or end.kind not in ("lapse", "crash"):
            return
        self._obituaries.add(Death(child.worker_id, end.kind, end.why))
        self._tell_for(REPORT_S)

    def _tell_for(self, seconds: float) -> None:
        until = self._clock() + seconds
        while not self._obituaries.tell() and (left := until - self._clock()) > 0:
            self._count_stops(self._wait(left))

    def _pause(self, child: Child) -> bool:
        """Let some time pass before the next start, and all of a child be gone; False when told to stop."""
        log.info("supervisor.restart", pause_s=self._pause_s)
        until = self._clock() + self._pause_s
        self._pause_s = min(self._max_restart_s, 2 * self._pause_s)
        while not self._num_stops and (left := until - self._clock()) > 0:
            self._count_stops(self._wait(left))
            self._obituaries.tell()
        given_up_at = self._clock() + REMAINS_S
        while not self._num_stops and not child.all_gone and self._clock() < given_up_at:
            self._count_stops(self._wait(REMAINS_POLL_S))
        child.close()
        return not self._num_stops

    def _leave(self, code: int) -> int:
        self._tell_for(REPORT_S)
        self._obituaries.give_up()
        return code

    def _wait(self, timeout_s: float | None) -> list[int]:
        waits = [wait_s for wait_s in (timeout_s, self._obituaries.wait_s) if wait_s is not None]
        return self._wakeups.wait(min(waits, default=None))

    def _count_stops(self, numbers: Sequence[int]) -> None:
        self._num_stops += sum(number in STOP_SIGNALS for number in numbers)
