"""
Which lanes may have jobs for this worker, so that it pulls no more often than something is there.

A pull tells what it left behind; the other lanes are quiet until their bells ring. A bell wakes
one worker, so each is listened at only while a job of its lane could start here at once.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from pagemill.consumer import Consumer
from pagemill.errors import QueueUnavailable
from pagemill.schema import LANES, Lane
from worker.puller import Ask

# how long a worker trusts the bells; a ring can be lost with a connection
TRUST_S = 1.0


class Doorbell:
    """
    Listens with a connection a lane: one for all would have to be closed whenever the lanes change.

    Args:
        start: Runs a coroutine as a task.
        on_change: Called when the caller should look again.
    """

    def __init__(
        self,
        consumer: Consumer,
        *,
        start: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"],
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._consumer = consumer
        self._start = start
        self._on_change = on_change
        self._clock = clock

        # all the mutable state there is; `_behind` may have jobs, `_heard` has rung since the last pull
        self._behind: Collection[Lane] = LANES
        self._heard: set[Lane] = set()
        self._pulled_at = clock()
        self._listening: dict[Lane, asyncio.Task[None]] = {}

    def calls_for(self, ask: Ask) -> bool:
        """Whether a pull may bring something, or must pass on a ring that we have no room for."""
        if self._clock() - self._pulled_at >= TRUST_S:
            self._behind = LANES
        return bool(self._heard) or any(
            room and lane in self._behind for lane, room in zip(LANES, ask.rooms, strict=True)
        )

    def pulled(self, behind: Collection[Lane]) -> None:
        """Note what a pull left."""
        self._behind = behind
        self._heard.clear()
        self._pulled_at = self._clock()

    def listen(self, lanes: Collection[Lane]) -> None:
        """Listen at the quiet ones of these lanes."""
        for lane in lanes:
            if lane not in self._behind and lane not in self._heard and lane not in self._listening:
                self._listening[lane] = self._start(self._listen(lane))

    def stop(self) -> None:
        for task in self._listening.values():
            task.cancel()
        self._listening.clear()

    async def _listen(self, lane: Lane) -> None:
        try:
            if await self._consumer.wait_for_work(TRUST_S, [lane]):
                self._heard.add(lane)
        except QueueUnavailable:
            # the next pull meets the same trouble, and pauses
            await asyncio.sleep(0.1)
            self._heard.add(lane)
        self._listening.pop(lane, None)
        self._on_change()
