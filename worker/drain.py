"""The end of a worker's work, told in order."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import structlog

from pagemill.errors import QueueUnavailable
from worker.engine_port import EngineDoor, EngineGone
from worker.jobs import Jobs
from worker.leases import Leases
from worker.returns import FLUSH_S, Returns

log = structlog.get_logger(__name__)

T = TypeVar("T")

# how long a step may take when we are in a hurry
LAST_STEP_S = 0.5


class Drain:
    """
    Stops without losing a job: what runs may finish, what waits goes back.

    Args:
        changed: Is set whenever a job or the hurry has changed.
        hurry: Once it is set running jobs go back at once.
        grace_s: How long they may go on at most.
        supervised: A supervisor tells the queue how this worker died.
    """

    def __init__(
        self,
        *,
        engine: EngineDoor,
        leases: Leases,
        jobs: Jobs,
        returns: Returns,
        changed: asyncio.Event,
        hurry: asyncio.Event,
        grace_s: float,
        supervised: bool,
    ) -> None:
        self._engine, self._leases, self._jobs, self._returns = engine, leases, jobs, returns
        self._changed, self._hurry = changed, hurry
        self._grace_s, self._supervised = grace_s, supervised

    async def run(self, crash: Callable[[], BaseException | None]) -> None:
        """
        Work until no job is ours any more.

        Dying at any line is safe: an entry that is not finished is claimed by a peer when its
        lease has run out, and a late finish of ours is fenced off. Leases go on being renewed
        to the end, else a peer would run the same jobs.

        Args:
            crash: What has ended the engine or a loop; None while all is well.
        """
        grace = asyncio.get_running_loop().call_later(self._grace_s, self._end_grace)
        # back to the queue before we wait: a peer can start these now
        with contextlib.suppress(EngineGone):
            await self._returns.release(await self._ask_engine(self._jobs.take_unstarted()), "unstarted")

        await self._until(lambda: self._hurry.is_set() or not self._unfinished())
        grace.cancel()

        if self._unfinished():
            await self._hand_back_running(crash)

        # what has ended is in the table until its result is written
        await self._until(lambda: not len(self._leases), FLUSH_S)
        await self._returns.settle()

    def _unfinished(self) -> bool:
        return any(not held.settled for held in self._leases)

    def _end_grace(self) -> None:
        self._hurry.set()
        self._changed.set()

    async def _ask_engine(self, question: Coroutine[Any, Any, T]) -> T:
        """
        Ask what is answered between two steps, unless we are in a hurry and the step does not end.

        Raises:
            EngineGone: it was ended for that.
        """
        asking = asyncio.create_task(question)
        asking.add_done_callback(lambda _: self._changed.set())
        await self._until(lambda: asking.done() or self._hurry.is_set())
        while not asking.done():
            step_age_s = self._engine.step_age_s
            if self._engine.alive and step_age_s > LAST_STEP_S:
                asking.cancel()
                log.warning("drain.engine_killed", step_age_s=round(step_age_s, 1))
                await self._engine.kill()
                raise EngineGone("the engine's step did not end")
            await asyncio.wait([asking], timeout=LAST_STEP_S / 4)
        return await asking

    async def _until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Wait for a condition that changes with the jobs, or for as long as it may take."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()

    async def _hand_back_running(self, crash: Callable[[], BaseException | None]) -> None:
        """Give the rest back, with what it has generated: whoever takes a job continues it."""
        try:
            await self._ask_engine(asyncio.wait_for(self._leases.renew(all_checkpoints=True), FLUSH_S))
        except (QueueUnavailable, EngineGone, TimeoutError) as error:
            log.warning("drain.not_checkpointed", error=str(error) or "no reply in time")
        try:
            await self._returns.release(await self._ask_engine(self._jobs.take_all()), "running")
        except EngineGone:
            await self._abandon(crash())

    async def _abandon(self, crash: BaseException | None) -> None:
        """
        Give back what a dead engine had never been given; one of the others may have killed it.

        The supervisor tells the queue of our death, and makes suspects of all that is still ours then.
        Without one it counts as an attempt, so that a poisonous job is given up in the end. Of an engine
        that we have ended ourselves nobody is a suspect.
        """
        suspects, others = self._jobs.abandon()
        await self._returns.release(others, "unstarted")
        if crash is None:
            await self._returns.release(suspects, "running")
            return
        if self._supervised:
            log.info("drain.suspected", jobs=len(suspects))
            self._returns.suspect(suspects)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                for held in suspects:
                    await self._returns.retry(held, "engine", f"the engine failed: {crash}")
