"""
The loop that steps an engine: commands are run between steps, and what came out is published after each.

One thread runs it, and alone touches the engine. It waits for a command while it has nothing to do.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import structlog

from engine.capacity import Capacity
from engine.errors import RequestError
from engine.request import Request, RequestOutput
from worker.engine_port import Engine, EngineStats, Turn
from worker.metering import Meter
from worker.timings import Stopwatch, Timings

log = structlog.get_logger(__name__)

# what the loop is told to do; None tells it to end
Command = Callable[["StepLoop"], None]


class Mailbox(Protocol):
    """Where commands come from and turns go to; both are called by the loop's thread."""

    def take(self, *, wait: bool) -> Iterable[Command | None]:
        """The commands that have come; waits for one where told to."""
        ...

    def publish(
        self, turn: Turn, capacity: Capacity, stats: EngineStats, timings: Timings, *, news: bool, idle: bool
    ) -> None:
        """
        Pass on how things are.

        Args:
            turn: Nobody changes it any more.
            timings: Often those of the call before, the same object.
            news: Something came out, or there is room for more; else this may be left out.
            idle: Nothing follows until the next command.
        """
        ...


class StepLoop:
    """Runs an engine with the commands of a mailbox."""

    def __init__(self, engine: Engine, mailbox: Mailbox, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine = engine
        self._mailbox = mailbox
        self._clock = clock
        self._turn = Turn()
        self._meter = Meter()
        self._stopwatch = Stopwatch(clock)
        self._capacity: Capacity = engine.capacity()
        self._num_sheds = engine.stats().num_sheds
        # when it was given something to do that has not ended; None while it idles. Others may read it
        self.busy_since: float | None = None

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """While the engine is used beside the loop."""
        self.busy_since = self._clock()
        yield
        self.busy_since = None

    def run(self) -> None:
        """
        Work until told to stop.

        Raises:
            What a step raised: the engine's state is not to be trusted then.
        """
        while self._run_commands():
            if self.engine.has_work:
                self.busy_since = began = self._clock()
                outputs = self.engine.step()
                ended = self._clock()
                self._meter.spend(ended - began)
                self._stopwatch.stepped(began, ended, outputs.started, outputs.answered)
                self._turn.finished += map(self._metered, outputs.finished)
                self._turn.deltas += outputs.deltas
                self._refuse(outputs.rejected)
            self._publish()

    def add(self, requests: Sequence[Request]) -> None:
        """Give requests to the engine; the next turn says which it has taken."""
        for request in requests:
            try:
                self.engine.add(request)
            except RequestError as error:
                self._turn.rejected.append((request.request_id, error))
            else:
                self._turn.added.append(request.request_id)
                self._meter.enter(request.request_id)
                self._stopwatch.enter(request)

    def _refuse(self, rejected: Iterable[tuple[str, RequestError]]) -> None:
        """Pass on which requests turned out to be none after they were taken, as those with a wrong grammar do."""
        for name, error in rejected:
            self._meter.leave(name)
            self._stopwatch.leave(name)
            self._turn.rejected.append((name, error))

    def abort(self, request_ids: Sequence[str], *, unstarted_only: bool) -> dict[str, RequestOutput]:
        """Take requests out of the engine, those that are in it; see `EngineDoor.abort`."""
        taken = [name for name in request_ids if not unstarted_only or not self.engine.num_started(name)]
        outputs = [self.engine.abort(name) for name in taken]
        return {output.request_id: self._metered(output) for output in outputs if output is not None}

    def _run_commands(self) -> bool:
        """Run what has come, waiting for it while the engine is idle; False when told to stop."""
        for command in self._mailbox.take(wait=not self.engine.has_work):
            if command is None:
                return False
            self.busy_since = self._clock()
            command(self)
        return True

    def _metered(self, output: RequestOutput) -> RequestOutput:
        times = self._stopwatch.leave(output.request_id)
        return replace(output, gpu_ms=self._meter.leave(output.request_id), times=times)

    def _publish(self) -> None:
        before = self._capacity
        self._capacity, stats = self.engine.capacity(), self.engine.stats()
        if stats.num_sheds > self._num_sheds:
            self._num_sheds = stats.num_sheds
            log.warning("engine.shed", why="the device is out of memory", free_seqs=self._capacity.free_seqs)
        # an admission or an abort gives nothing out here, yet it makes room for the next pull
        has_room = self._capacity.waiting_seqs < before.waiting_seqs or self._capacity.free_seqs > before.free_seqs
        news = bool(self._turn) or has_room
        turn, self._turn = self._turn, Turn()
        # before it is passed on: whoever takes it may be slow, which is no fault of the engine
        self.busy_since = None
        idle = not self.engine.has_work
        self._mailbox.publish(turn, self._capacity, stats, self._stopwatch.timings(fresh=idle), news=news, idle=idle)
