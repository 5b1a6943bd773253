"""
An engine on a thread of this process: what tests run.

Commands come in through a queue; outputs go out in batches, with one wake-up of the event loop
however many steps have passed.
"""

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from engine.capacity import Capacity
from engine.request import Request, RequestOutput
from worker.engine_port import Engine, EngineFacts, EngineGone, EngineStats, Turn
from worker.futures import settle
from worker.step_loop import Command, StepLoop
from worker.timings import NO_TIMINGS, Timings

T = TypeVar("T")


class EngineThread:
    """Runs the engine and speaks with the event loop; a door as `EngineDoor` says."""

    def __init__(self, engine: Engine, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.facts = EngineFacts.of(engine)
        self._clock = clock
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._turns: deque[Turn] = deque()
        self._wake_up_pending = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._steps = StepLoop(engine, self, clock=clock)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

        # written by the thread after each step; each is replaced whole, never changed
        self.capacity: Capacity = engine.capacity()
        self.stats: EngineStats = engine.stats()
        self.timings = NO_TIMINGS

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def step_age_s(self) -> float:
        since = self._steps.busy_since
        return 0.0 if since is None else self._clock() - since

    def start(self, *, on_turns: Callable[[list[Turn]], None], on_crash: Callable[[BaseException], None]) -> None:
        self._loop, self._on_turns, self._on_crash = asyncio.get_running_loop(), on_turns, on_crash
        self._thread.start()

    def add(self, requests: Iterable[Request]) -> None:
        batch = list(requests)
        self._commands.put(lambda steps: steps.add(batch))

    async def abort(self, request_ids: Iterable[str], *, unstarted_only: bool = False) -> dict[str, RequestOutput]:
        wanted = list(request_ids)
        return await self._ask(lambda steps: steps.abort(wanted, unstarted_only=unstarted_only))

    async def call(self, command: Callable[[Engine], T]) -> T:
        return await self._ask(lambda steps: command(steps.engine))

    async def stop(self) -> None:
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    async def kill(self) -> None:
        """Nothing: a thread ends with its process."""

    def take(self, *, wait: bool) -> Iterable[Command | None]:
        """What the event loop has put into the queue; for the thread."""
        while True:
            try:
                yield self._commands.get(block=wait)
            except queue.Empty:
                return
            wait = False

    def publish(
        self,
        turn: Turn,
        capacity: Capacity,
        stats: EngineStats,
        timings: Timings,
        *,
        news: bool,
        idle: bool,  # noqa: ARG002
    ) -> None:
        """Leave a turn for the event loop; for the thread."""
        self.capacity, self.stats, self.timings = capacity, stats, timings
        if not news:
            return
        self._turns.append(turn)
        # the loop clears the flag before it empties the queue: a turn appended later wakes it again
        if not self._wake_up_pending:
            self._wake_up_pending = True
            self._post(self._deliver)

    async def _ask(self, question: Callable[[StepLoop], T]) -> T:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._commands.put(lambda steps: self._answer(future, question, steps))
        # a crash leaves commands unanswered: look at the thread now and then
        while self.alive and not future.done():
            await asyncio.wait([future], timeout=0.5)
        if not future.done():
            raise EngineGone("the engine's thread has ended")
        return future.result()

    def _run(self) -> None:
        try:
            self._steps.run()
        except BaseException as error:
            # nobody above this frame could do better: the service hands the jobs back
            self._post(partial(self._on_crash, error))

    def _answer(self, future: "asyncio.Future[T]", question: Callable[[StepLoop], T], steps: StepLoop) -> None:
        try:
            result = question(steps)
        except Exception as error:
            self._post(partial(settle, future, error=error))
        else:
            self._post(partial(settle, future, result))

    def _deliver(self) -> None:
        self._wake_up_pending = False
        turns = []
        while self._turns:
            turns.append(self._turns.popleft())
        self._on_turns(turns)

    def _post(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(callback)
