"""
Since when payloads could not be read: a store that is away for a while fails no job.

The notes are this process's own. A job that goes to a peer meanwhile is judged there anew.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

# jobs that went elsewhere are never struck off: the oldest notes make room
MAX_NOTES = 4096


@dataclass(frozen=True, slots=True)
class _Span:
    first: float
    last: float


@dataclass(slots=True)
class Deferrals:
    """
    Tells for how long a job's payload has been unreadable.

    Args:
        forget_s: A job that was not tried for so long begins anew: others had it meanwhile.
    """

    forget_s: float
    clock: Callable[[], float] = time.monotonic
    _spans: dict[str, _Span] = field(default_factory=dict)

    def note(self, job_id: str) -> float:
        """Note that a payload cannot be read, and return for how many seconds that has been so."""
        now = self.clock()
        span = self._spans.pop(job_id, None)
        first = span.first if span and now - span.last <= self.forget_s else now
        self._spans[job_id] = _Span(first, now)
        while len(self._spans) > MAX_NOTES:
            del self._spans[next(iter(self._spans))]
        return now - first

    def clear(self, job_id: str) -> None:
        """Forget a job: its payload was read."""
        self._spans.pop(job_id, None)
