"""
How long requests wait inside an engine, and how long its steps last: counted where the engine is stepped.

Counts only grow and are passed on whole, a few times a second: a message that is left out loses nothing.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine.request import PRIORITIES, Request, RequestTimes

# upper limits in seconds; all above the last is counted too
STEP_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 30.0)
WAIT_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)

# a scrape sees nothing older than that
SNAPSHOT_EVERY_S = 0.25


@dataclass(frozen=True, slots=True)
class Histogram:
    """
    How many values fell between which bounds.

    Args:
        counts: One a bound, of values up to it and above the one before; the last is of all larger ones.
        total: The sum of the values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @classmethod
    def empty(cls, bounds: tuple[float, ...]) -> "Histogram":
        return cls(bounds, (0,) * (len(bounds) + 1), 0.0)

    @property
    def num_values(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class Timings:
    """
    What an engine has taken its time for, in seconds, since its start.

    Args:
        steps: Turns of the engine.
        queued: From a request's coming to the first step with it; one a priority.
        first_tokens: From a request's coming to its first token; one a priority.
    """

    steps: Histogram
    queued: tuple[Histogram, ...]
    first_tokens: tuple[Histogram, ...]


NO_TIMINGS = Timings(
    steps=Histogram.empty(STEP_BOUNDS),
    queued=(Histogram.empty(WAIT_BOUNDS),) * len(PRIORITIES),
    first_tokens=(Histogram.empty(WAIT_BOUNDS),) * len(PRIORITIES),
)


class _Tally:
    """A histogram that grows."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> Histogram:
        return Histogram(self._bounds, tuple(self._counts), self._total)


class Stopwatch:
    """Takes the times of the requests in an engine, and of its steps; one thread uses it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps = _Tally(STEP_BOUNDS)
        self._queued = [_Tally(WAIT_BOUNDS) for _ in PRIORITIES]
        self._first_tokens = [_Tally(WAIT_BOUNDS) for _ in PRIORITIES]
        # when each request came, and its priority
        self._came: dict[str, tuple[float, int]] = {}
        # of those that are to know: when they were first in a step, and when their first token came
        self._timed: dict[str, list[float | None]] = {}
        self._snapshot = NO_TIMINGS
        self._taken_at = clock()
        self._changed = False

    def __len__(self) -> int:
        """Requests in the engine."""
        return len(self._came)

    def enter(self, request: Request) -> None:
        """Note a request that the engine has taken."""
        self._came[request.request_id] = self._clock(), min(request.priority, PRIORITIES[-1])
        if request.timed:
            self._timed[request.request_id] = [None, None]

    def stepped(self, began: float, ended: float, started: Iterable[str], answered: Iterable[str]) -> None:
        """
        Note a turn of the engine.

        Args:
            began, ended: By the clock.
            started: Requests that are in a step for the first time.
            answered: Requests whose first token has come.
        """
        self._changed = True
        self._steps.add(ended - began)
        self._add(self._queued, started, began)
        self._add(self._first_tokens, answered, ended)
        if self._timed:
            self._note(started, 0, began)
            self._note(answered, 1, ended)

    def leave(self, request_id: str) -> RequestTimes | None:
        """Note that a request is not in the engine any more; its times, where it is to have them."""
        self._came.pop(request_id, None)
        times = self._timed.pop(request_id, None) if self._timed else None
        return None if times is None else RequestTimes(*times)

    def timings(self, *, fresh: bool) -> Timings:
        """
        All counts; the same object as before where nothing has changed, or they were taken just now.

        Args:
            fresh: Nothing may be left out, as nothing follows for some time.
        """
        now = self._clock()
        if self._changed and (fresh or now - self._taken_at >= SNAPSHOT_EVERY_S):
            self._taken_at, self._changed = now, False
            self._snapshot = Timings(
                steps=self._steps.snapshot(),
                queued=tuple(tally.snapshot() for tally in self._queued),
                first_tokens=tuple(tally.snapshot() for tally in self._first_tokens),
            )
        return self._snapshot

    def _add(self, tallies: list[_Tally], names: Iterable[str], at: float) -> None:
        for name in names:
            if (came := self._came.get(name)) is not None:
                tallies[came[1]].add(max(0.0, at - came[0]))

    def _note(self, names: Iterable[str], place: int, at: float) -> None:
        for name in names:
            if (times := self._timed.get(name)) is not None:
                times[place] = at
