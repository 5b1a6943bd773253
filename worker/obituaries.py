"""Deaths of workers that the queue has to be told of, for as long as that takes."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import structlog
from redis import Redis

from pagemill.errors import QueueUnavailable
from pagemill.obituary import report_death

log = structlog.get_logger(__name__)

# between two tries while the server is away
RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class Death:
    """A worker that ended with jobs in its hands."""

    worker_id: str
    cause: Literal["lapse", "crash"]
    why: str


class Obituaries:
    """
    Tells the queue, oldest death first; what cannot be told now is kept.

    Args:
        redis: With time-outs that the caller can wait for.
    """

    def __init__(self, redis: Redis, queue: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._redis = redis
        self._queue = queue
        self._clock = clock
        # jobs that became suspects or dead letters by these deaths
        self.num_blamed = 0
        self._untold: deque[Death] = deque()
        self._next_try = 0.0

    def add(self, death: Death) -> None:
        self._untold.append(death)
        self._next_try = 0.0

    @property
    def wait_s(self) -> float | None:
        """Until the next try; None where nothing is to be told."""
        return max(0.0, self._next_try - self._clock()) if self._untold else None

    def tell(self) -> bool:
        """Try, where it is time to; whether nothing is left to be told."""
        while self._untold and self._next_try <= self._clock():
            death = self._untold[0]
            try:
                report = report_death(self._redis, self._queue, death.worker_id, cause=death.cause, why=death.why)
            except QueueUnavailable as error:
                log.warning("supervisor.report_failed", worker=death.worker_id, error=str(error), retry_s=RETRY_S)
                self._next_try = self._clock() + RETRY_S
                return False
            self._untold.popleft()
            self.num_blamed += report.suspects + report.dead
            log.info(
                "supervisor.reported",
                worker=death.worker_id,
                cause=death.cause,
                returned=report.returned,
                suspects=report.suspects,
                dead=report.dead,
            )
        return not self._untold

    def give_up(self) -> None:
        """Note what was never told: peers take those jobs when their leases have run out."""
        for death in self._untold:
            log.error("supervisor.not_reported", worker=death.worker_id, cause=death.cause, why=death.why)
