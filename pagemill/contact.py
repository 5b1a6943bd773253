"""Whether the server was in reach all the time: what it did not hear of is nobody's fault."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pagemill.errors import ServerAway


class Contact:
    """
    Notes when the server was last out of reach, or so slow that leases may have run out meanwhile.

    Whoever could not reach it has to suppose that nobody could: workers that fell silent then are
    not dead, and have one lease to be heard of again.

    Args:
        lease_s: What a worker's silence is measured by.
        on_call: Told of each call: its name, how long it took in seconds, and whether it failed.
    """

    def __init__(
        self,
        *,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
        on_call: Callable[[str, float, bool], None] | None = None,
    ) -> None:
        self._on_call = on_call
        # heartbeats are a third of a lease apart: with a call that took no longer than half of one
        # beside it, that is no lease. A tenth of a second is a busy machine's doing
        self._too_slow_s = max(0.1, lease_s / 2)
        self._lease_s = lease_s
        self._clock = clock
        self._lost_at: float | None = None
        # when the calls that are under way began
        self._under_way: dict[object, float] = {}

    @property
    def steady(self) -> bool:
        """It has been in reach for a whole lease, as far as is known."""
        now = self._clock()
        if any(now - began > self._too_slow_s for began in self._under_way.values()):
            return False
        return self._lost_at is None or now - self._lost_at >= self._lease_s

    @contextmanager
    def watched(self, name: str = "") -> Iterator[None]:
        """Around a call: note how it went."""
        call, began, failed = object(), self._clock(), True
        self._under_way[call] = began
        try:
            yield
            failed = False
        except ServerAway:
            self._lost_at = self._clock()
            raise
        finally:
            del self._under_way[call]
            took_s = self._clock() - began
            if took_s > self._too_slow_s:
                self._lost_at = self._clock()
            if self._on_call is not None:
                self._on_call(name, took_s, failed)
