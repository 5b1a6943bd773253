"""Jobs that leave this worker without a result: handed back, put off, or buried."""

import asyncio
import heapq
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any

import structlog

from pagemill.consumer import Consumer
from pagemill.messages import DeathCause, Outcome
from worker.leases import Held
from worker.retries import POLICIES, Fault, Policy, next_pause_s, num_faults_with
from worker.sinks import keep_trying

log = structlog.get_logger(__name__)

# time for the last words to the queue once nothing runs any more
FLUSH_S = 5.0


class Returns:
    """
    Gives jobs back to the queue.

    Args:
        policies: How often jobs are tried again, by kind of fault.
        take: Takes a job out of this worker's hands; False where it is in them no more.
        on_settled: Called for each job that has been buried, or belongs to another.
        start: Runs a coroutine beside all else.
        on_left: Called for each job that leaves without an end: how, and the kind of fault where there was one.
        rng: Draws the pauses.
    """

    def __init__(
        self,
        consumer: Consumer,
        *,
        policies: Mapping[Fault, Policy] = POLICIES,
        take: Callable[[Held], bool],
        on_settled: Callable[[Held, Outcome], None],
        start: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"],
        on_left: Callable[[Held, str, str], None] = lambda *_: None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._consumer = consumer
        self._policies = policies
        self._take = take
        self._on_settled = on_settled
        self._start = start
        self._on_left = on_left
        self._rng = rng or random.Random()
        self._clock = clock

        # all the mutable state there is; times at which jobs are due that were put off here, a heap
        self._pending: set[asyncio.Task[None]] = set()
        self._due: list[float] = []

    def __len__(self) -> int:
        """Jobs on their way back or to the dead letters, and those put off that are not due yet."""
        while self._due and self._due[0] <= self._clock():
            heapq.heappop(self._due)
        return len(self._pending) + len(self._due)

    def put_off(self, held: Held, fault: Fault, why: str) -> bool:
        """
        Have a job tried again later, by whoever takes it then; False where it was tried often enough.
        """
        num_faults = num_faults_with(fault, held.delivery.fault, held.delivery.num_faults)
        pause_s = next_pause_s(self._policies[fault], num_faults, self._rng)
        if pause_s is None:
            return False
        if self._take(held):
            heapq.heappush(self._due, self._clock() + pause_s)
            self._start_pending(self._retry(held, fault, why, num_faults, pause_s))
        return True

    def bury(self, held: Held, why: DeathCause, message: str) -> None:
        """Give up a job: it goes to the dead letters."""
        self._start_pending(self._bury(held, why, message))

    async def retry(self, held: Held, fault: Fault, why: str) -> None:
        """As `put_off`, of a job that is in no table any more, and however often it was tried."""
        num_faults = num_faults_with(fault, held.delivery.fault, held.delivery.num_faults)
        await self._retry(held, fault, why, num_faults, self._policies[fault].pause_s(num_faults, self._rng))

    async def release(self, jobs: Iterable[Held], which: str) -> None:
        """Hand jobs back at once, at no cost to them."""
        released = list(jobs)
        deliveries = [held.delivery for held in released]
        if not deliveries:
            return
        try:
            async with asyncio.timeout(FLUSH_S):
                num_released = await keep_trying("jobs.release", lambda: self._consumer.release(deliveries))
            log.info("drain.handed_back", which=which, jobs=len(deliveries), released=num_released)
        except TimeoutError:
            log.error("drain.not_handed_back", which=which, jobs=len(deliveries), why="their leases will run out")
        for held in released:
            self._on_left(held, "released", "")

    def suspect(self, jobs: Iterable[Held]) -> None:
        """Leave jobs to the supervisor, of which one may have ended the engine."""
        for held in jobs:
            self._on_left(held, "suspected", "engine")

    async def settle(self) -> None:
        """Wait for those on their way: one that stays would wait for the end of its lease."""
        if self._pending:
            await asyncio.wait(self._pending, timeout=FLUSH_S)

    async def _retry(self, held: Held, fault: Fault, why: str, num_faults: int, pause_s: float) -> None:
        delivery = held.delivery
        log.warning("job.put_off", **held.ids, fault=fault, times=num_faults, why=why, retry_s=round(pause_s, 2))
        self._on_left(held, "put_off", fault)
        retry = partial(
            self._consumer.retry,
            delivery,
            delay_ms=round(pause_s * 1000),
            why=why,
            fault=fault,
            counts=self._policies[fault].counts,
        )
        await keep_trying("job.put_off", retry)

    async def _bury(self, held: Held, why: DeathCause, message: str) -> None:
        while True:
            delivery = held.delivery
            bury = partial(self._consumer.bury, delivery, why=why, message=message)
            outcome = await keep_trying("job.bury", bury)
            # lost, and pulled again meanwhile: the new entry is ours to bury
            if outcome not in ("fenced", "gone") or held.delivery is delivery:
                break
        self._on_settled(held, outcome)

    def _start_pending(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._start(coroutine)
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)
