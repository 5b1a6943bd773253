"""Ends the process when a step of the engine does not end: a worker that hangs looks like one that works."""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable

from worker import exits

# what the timer outside of the interpreter waits at least beyond the time of a step
TIMER_LATE_S = 5.0


class Watchdog:
    """
    Watches how long the engine is at one thing, on a thread of its own.

    It runs in the engine's process; the worker hands the jobs back. Should the interpreter lock be what
    hangs, this thread cannot run either; a timer outside of the interpreter then does the same. Time in which
    the whole process was stopped does not count for the thread; for the timer it does.

    Args:
        busy_since: When the engine began what it does now, by any clock; None while it idles.
        leave: Ends the process; tests pass their own.
    """

    def __init__(
        self,
        busy_since: Callable[[], float | None],
        *,
        timeout_s: float,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self._busy_since = busy_since
        self._timeout_s = timeout_s
        self._leave = leave
        self._poll_s = min(1.0, timeout_s / 4)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._set_timer(self._timeout_s)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        begun: float | None = None
        watched_s, looked = 0.0, time.monotonic()
        while not self._stopped.wait(self._poll_s):
            self._set_timer(self._timeout_s)
            now, since = time.monotonic(), self._busy_since()
            # a longer pause was one of the whole process
            passed_s = min(now - looked, 2 * self._poll_s)
            watched_s = watched_s + passed_s if since is not None and since == begun else 0.0
            begun, looked = since, now
            if watched_s > self._timeout_s:
                faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
                self._leave(exits.HUNG)
                return

    def _set_timer(self, after_s: float) -> None:
        # later than this thread would do it, also where it has to wait for its turn; the exit code is 1
        faulthandler.dump_traceback_later(after_s + max(after_s, TIMER_LATE_S), exit=True)
