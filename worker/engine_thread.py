"""
The one thread that touches the engine, and the two queues that lead to it and from it.

Commands come in through a queue and are run between steps; outputs go out in batches, with one
wake-up of the event loop however many steps have passed. The thread sleeps while it has nothing
to do.
"""

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import structlog

from engine.errors import EngineError, RequestError
from engine.request import Capacity, Request, RequestOutput, TextDelta
from worker.engine_port import Engine, EngineStats
from worker.metering import Meter

log = structlog.get_logger(__name__)

T = TypeVar("T")

Command = Callable[[], None]


class EngineGone(EngineError):
    """Raised when the engine's thread has ended and cannot answer."""


@dataclass(slots=True)
class Turn:
    """What the engine took and gave since the turn before."""

    added: list[str] = field(default_factory=list)
    rejected: list[tuple[str, RequestError]] = field(default_factory=list)
    finished: list[RequestOutput] = field(default_factory=list)
    deltas: list[TextDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.added or self.rejected or self.finished or self.deltas)


class EngineThread:
    """
    Runs the engine and speaks with the event loop.

    All methods are called on the event loop, and so are the two callbacks. After `on_crash`
    the thread is over: the engine's state is not to be trusted, nothing else is delivered.

    Args:
        on_turns: Takes what came out, oldest first.
        on_crash: Takes the exception that a step raised.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        on_turns: Callable[[list[Turn]], None],
        on_crash: Callable[[BaseException], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._on_turns = on_turns
        self._on_crash = on_crash
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._turns: deque[Turn] = deque()
        self._turn = Turn()
        self._meter = Meter()
        self._wake_up_pending = False
        self._given_up = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

        # written by the thread: when the engine was given something to do that has not ended; None while it idles
        self.busy_since: float | None = None
        # written by the thread after each step; each is replaced whole, never changed
        self.capacity: Capacity = engine.capacity()
        self.stats: EngineStats = engine.stats()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._given_up

    @property
    def step_age_s(self) -> float:
        """For how long the step that runs now has been running; 0 while the engine idles."""
        since = self.busy_since
        return 0.0 if since is None else self._clock() - since

    def start(self) -> None:
        """Start the thread; outputs go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def add(self, requests: Iterable[Request]) -> None:
        """Queue requests; a later turn names each as added or rejected."""
        batch = list(requests)
        self._commands.put(lambda: self._add(batch))

    async def abort(self, request_ids: Iterable[str], *, unstarted_only: bool = False) -> dict[str, RequestOutput]:
        """
        Take requests out of the engine, between two steps; what each has, of those that were in it.

        Args:
            unstarted_only: Leave those in it of which something has been computed.

        Raises:
            EngineGone: as `call`.
        """
        wanted = list(request_ids)

        def abort(engine: Engine) -> dict[str, RequestOutput]:
            taken = [name for name in wanted if not unstarted_only or not engine.num_started(name)]
            outputs = [engine.abort(name) for name in taken]
            return {output.request_id: self._metered(output) for output in outputs if output is not None}

        return await self.call(abort)

    async def call(self, command: Callable[[Engine], T]) -> T:
        """
        Run `command` on the engine between two steps and return what it returns.

        Raises:
            EngineGone: when the thread has ended before it could answer.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._commands.put(lambda: self._answer(future, command))
        # a crash leaves commands unanswered: look at the thread now and then
        while self.alive and not future.done():
            await asyncio.wait([future], timeout=0.5)
        if not future.done():
            raise EngineGone("the engine's thread has ended, or hangs")
        return future.result()

    def give_up(self) -> None:
        """Expect nothing of the thread any more: it hangs."""
        self._given_up = True

    async def stop(self) -> None:
        """Let the step that runs end, then end the thread."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            while self._run_commands():
                if self._engine.has_work:
                    self.busy_since = self._clock()
                    outputs = self._engine.step()
                    self._meter.spend(self._clock() - self.busy_since)
                    self._turn.finished += map(self._metered, outputs.finished)
                    self._turn.deltas += outputs.deltas
                self._publish()
                self.busy_since = None
        except BaseException as error:
            # nobody above this frame could do better: the service hands the jobs back
            self._post(partial(self._on_crash, error))

    def _run_commands(self) -> bool:
        """Run what is queued, blocking for it while the engine is idle; False when told to stop."""
        idle = not self._engine.has_work
        while True:
            try:
                command = self._commands.get(block=idle)
            except queue.Empty:
                return True
            if command is None:
                return False
            self.busy_since = self._clock()
            command()
            idle = False

    def _add(self, requests: Sequence[Request]) -> None:
        for request in requests:
            try:
                self._engine.add(request)
            except RequestError as error:
                self._turn.rejected.append((request.request_id, error))
            else:
                self._turn.added.append(request.request_id)
                self._meter.enter(request.request_id)

    def _metered(self, output: RequestOutput) -> RequestOutput:
        return replace(output, gpu_ms=self._meter.leave(output.request_id))

    def _answer(self, future: "asyncio.Future[T]", command: Callable[[Engine], T]) -> None:
        try:
            result = command(self._engine)
        except Exception as error:
            self._post(partial(_settle, future, error=error))
        else:
            self._post(partial(_settle, future, result))

    def _publish(self) -> None:
        waiting_before, sheds_before = self.capacity.waiting_seqs, self.stats.num_sheds
        self.capacity = self._engine.capacity()
        self.stats = self._engine.stats()
        if self.stats.num_sheds > sheds_before:
            log.warning("engine.shed", why="the device is out of memory", free_seqs=self.capacity.free_seqs)
        # an admission gives nothing out, yet it makes room for the next pull
        if not self._turn and self.capacity.waiting_seqs >= waiting_before:
            return
        self._turns.append(self._turn)
        self._turn = Turn()
        # the loop clears the flag before it empties the queue: a turn appended later wakes it again
        if not self._wake_up_pending:
            self._wake_up_pending = True
            self._post(self._deliver)

    def _deliver(self) -> None:
        self._wake_up_pending = False
        turns = []
        while self._turns:
            turns.append(self._turns.popleft())
        if not self._given_up:
            self._on_turns(turns)

    def _post(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(callback)


def _settle(future: "asyncio.Future[Any]", result: object = None, error: Exception | None = None) -> None:
    # whoever asked may have been cancelled meanwhile
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
