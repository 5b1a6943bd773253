"""
Suspects: jobs of which one may have killed the worker that held them.

They run with nothing beside them, so that a further death is theirs to answer for, and one worker
of the fleet runs them at a time, while the others go on.
"""

import random
import time
from collections.abc import Callable

import structlog

from pagemill.consumer import Consumer
from pagemill.messages import Delivery

log = structlog.get_logger(__name__)

# leases that suspects may wait for a worker that happens to be idle; the first figure is certain, up to the
# second is chance: one busy worker makes room for them, and not all
PATIENCE_LEASES = (2.0, 4.0)


class Isolation:
    """
    When this worker runs suspects, and when it pulls nothing for their sake.

    Args:
        draw: A number in 0 to 1; tests pass their own.
    """

    def __init__(
        self,
        consumer: Consumer,
        *,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._consumer = consumer
        self._lease_s = lease_s
        self._clock = clock
        self._draw = draw

        # all the mutable state there is: since when suspects wait while we are busy, and how long we look on
        self._waiting_since: float | None = None
        self._patience_s = self._new_patience()
        self._has_group = False

    def __repr__(self) -> str:
        state = "runs a group" if self._has_group else "makes room" if self.impatient else "open"
        return f"Isolation({state})"

    @property
    def impatient(self) -> bool:
        """Whether suspects have waited for so long that this worker takes nothing else any more."""
        return self._waiting_since is not None and self._clock() - self._waiting_since > self._patience_s

    def closed(self, num_held: int) -> bool:
        """Whether nothing may be pulled, with so many jobs in this worker's hands."""
        return num_held > 0 and (self._has_group or self.impatient)

    async def take(self) -> list[Delivery]:
        """
        Claim a group of suspects, for a worker that holds nothing; empty where there is none for us.

        Raises:
            QueueUnavailable: the server is away; nothing is changed here.
        """
        suspects = await self._consumer.take_suspects()
        # whoever runs them now: the wait is over
        self._waiting_since = None
        self._has_group = bool(suspects)
        if suspects:
            log.info("suspects.taken", jobs=len(suspects))
        return suspects

    async def look(self) -> None:
        """
        See whether suspects wait while this worker is busy with other jobs; to be called now and then.

        Raises:
            QueueUnavailable: the server is away.
        """
        if self._has_group:
            return
        if not await self._consumer.num_suspects_waiting():
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since, self._patience_s = self._clock(), self._new_patience()

    def _new_patience(self) -> float:
        least, most = PATIENCE_LEASES
        return self._lease_s * (least + (most - least) * self._draw())
