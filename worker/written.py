"""
The results of the last seconds, in case the server forgets them.

A server that is replaced by its replica, or comes back from its append-only file, may lack its last
moments: jobs that were finished then are running again, for nobody. Their results are written once
more, and until that can no more be needed their payloads stay in the store.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pagemill.messages import Finished, Outcome

# a replica is behind by milliseconds as a rule, an append-only file by up to a second
KEEP_S = 10.0
MAX_RESULTS = 1024
MAX_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Kept:
    """One result that was written, when, and what the server said to it."""

    finished: Finished
    outcome: Outcome
    at: float

    @property
    def num_bytes(self) -> int:
        return len(self.finished.payload or b"")


@dataclass(slots=True)
class Written:
    """
    Keeps what was written for `keep_s`, as far as it is not too much.
    """

    keep_s: float = KEEP_S
    clock: Callable[[], float] = time.monotonic
    _kept: deque[Kept] = field(default_factory=deque)
    _num_bytes: int = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, finished: Finished, outcome: Outcome) -> None:
        kept = Kept(_slim(finished), outcome, self.clock())
        self._kept.append(kept)
        self._num_bytes += kept.num_bytes

    def let_go(self, *, everything: bool = False) -> list[Kept]:
        """Give out, and forget, what is old enough, or too much, or everything."""
        old: list[Kept] = []
        oldest = self.clock() - self.keep_s
        while self._kept and (everything or self._is_over(oldest)):
            kept = self._kept.popleft()
            self._num_bytes -= kept.num_bytes
            old.append(kept)
        return old

    def _is_over(self, oldest: float) -> bool:
        return self._kept[0].at <= oldest or len(self._kept) > MAX_RESULTS or self._num_bytes > MAX_BYTES


def _slim(finished: Finished) -> Finished:
    """Without what is not sent: the job, and the answers, which are in the payload."""
    if finished.payload is None:
        return finished
    delivery = replace(finished.delivery, payload=None, checkpoint=b"")
    return replace(finished, delivery=delivery, result=finished.result.model_copy(update={"completions": ()}))
