"""Jobs that leave this worker without a result: handed back, put off, or buried."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any

import structlog

from pagemill.consumer import Consumer
from pagemill.messages import DeathCause, Outcome
from worker.leases import Held
from worker.sinks import keep_trying

log = structlog.get_logger(__name__)

RETRY_DELAY_MS = 1000
MAX_RETRY_DELAY_MS = 60_000
# time for the last words to the queue once nothing runs any more
FLUSH_S = 5.0


class Returns:
    """
    Gives jobs back to the queue.

    Args:
        defer_s: Pause before a payload is read again that could not be read.
        stopping: Set when the worker drains.
        take: Takes a job out of this worker's hands; False where it is in them no more.
        on_settled: Called for each job that has been buried, or belongs to another.
        start: Runs a coroutine beside all else.
    """

    def __init__(
        self,
        consumer: Consumer,
        *,
        defer_s: float,
        stopping: asyncio.Event,
        take: Callable[[Held], bool],
        on_settled: Callable[[Held, Outcome], None],
        start: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"],
    ) -> None:
        self._consumer = consumer
        self._defer_s = defer_s
        self._stopping = stopping
        self._take = take
        self._on_settled = on_settled
        self._start = start
        self._pending: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Jobs on their way back, or to the dead letters."""
        return len(self._pending)

    def defer(self, held: Held, why: str) -> None:
        """Put off a job whose payload cannot be read now."""
        log.warning("job.deferred", job_id=held.delivery.job_id, why=why, retry_s=self._defer_s)
        self._start_pending(self._hand_back_later(held))

    def bury(self, held: Held, why: DeathCause, message: str) -> None:
        """Give up a job: it goes to the dead letters."""
        self._start_pending(self._bury(held, why, message))

    async def retry(self, held: Held, why: str) -> None:
        """Have a job tried again later, by whoever takes it then."""
        log.warning("job.retried", job_id=held.delivery.job_id, attempt=held.delivery.attempt, why=why)
        delay_ms = min(MAX_RETRY_DELAY_MS, RETRY_DELAY_MS * 2**held.delivery.attempt)
        await keep_trying("job.retry", lambda: self._consumer.retry(held.delivery, delay_ms=delay_ms, why=why))

    async def release(self, jobs: Iterable[Held], which: str) -> None:
        """Hand jobs back at once, at no cost to them."""
        deliveries = [held.delivery for held in jobs]
        if not deliveries:
            return
        try:
            async with asyncio.timeout(FLUSH_S):
                released = await keep_trying("jobs.release", lambda: self._consumer.release(deliveries))
            log.info("drain.handed_back", which=which, jobs=len(deliveries), released=released)
        except TimeoutError:
            log.error("drain.not_handed_back", which=which, jobs=len(deliveries), why="their leases will run out")

    async def settle(self) -> None:
        """Wait for those on their way: one that stays would wait for the end of its lease."""
        if self._pending:
            await asyncio.wait(self._pending, timeout=FLUSH_S)

    async def _hand_back_later(self, held: Held) -> None:
        """
        Keep a job for a while, under lease, and give it back: a peer may reach what we cannot.

        It costs no attempt. A cancel, a deadline or a drain ends the wait as for any job.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), self._defer_s)
        # the drain takes back all that it finds here
        if not self._stopping.is_set() and self._take(held):
            await keep_trying("job.hand_back", lambda: self._consumer.release([held.delivery]))

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
