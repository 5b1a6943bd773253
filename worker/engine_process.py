"""
An engine in a process of its own: its steps and our event loop do not share an interpreter lock.

Messages go over a socket pair, a batch of requests or a whole turn in each (engine_wire.py).
"""

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self, TypeVar

from engine.capacity import Capacity
from engine.errors import DeviceLost, EngineError, StartupError
from engine.request import Request, RequestOutput
from worker import exits
from worker.engine_port import Engine, EngineFacts, EngineGone, EngineStats, Turn
from worker.engine_wire import Abort, Add, Answer, Assignment, Call, Failed, Ready, Report, Stop, Unpacker, pack
from worker.futures import settle
from worker.timings import NO_TIMINGS, Timings

T = TypeVar("T")

# an engine that was told to end is killed when it has not
STOP_S = 30.0
# one that was killed may be a while about it, as its device lets go of its memory
KILL_S = 10.0
# more than the system grants, and so all of that
_BUFFER_BYTES = 1 << 22


class EngineFailed(EngineError):
    """Raised for an exception that ended the engine."""


class StepHung(EngineError):
    """Raised when a step of the engine did not end."""


class EngineEnded(EngineError):
    """
    Raised when the engine's process has ended and did not say why.

    Args:
        code: Its exit code, or the signal's number below 0, as `subprocess` has it.
    """

    def __init__(self, code: int) -> None:
        super().__init__(f"the engine's process ended with {f'exit code {code}' if code >= 0 else f'signal {-code}'}")
        self.code = code


class EngineProcess(asyncio.Protocol):
    """
    Starts the engine's process and speaks with it; a door as `EngineDoor` says.

    The process ends with the thread that makes this, as Linux has it: not one of a pool.

    Args:
        inherited: File descriptors that the process holds until it ends.
    """

    # said by the process: first when it is ready
    facts: EngineFacts
    capacity: Capacity
    stats: EngineStats
    timings: Timings = NO_TIMINGS

    def __init__(self, assignment: Assignment, *, inherited: Sequence[int] = ()) -> None:
        self._assignment = assignment
        self._connection, theirs = socket.socketpair()
        for end in (self._connection, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        flags = ["-P"] if sys.flags.safe_path else []
        self._process = subprocess.Popen(
            [sys.executable, *flags, "-m", "worker.engine_child", str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno(), *inherited],
        )
        theirs.close()
        self._loop = asyncio.get_running_loop()
        self._unpacker = Unpacker()
        self._transport: asyncio.Transport | None = None
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._ending: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._on_turns: Callable[[list[Turn]], None] | None = None
        self._on_crash: Callable[[BaseException], None] | None = None
        self._failure: Exception | None = None
        self._stopped = False
        self._num_sent = 0
        # since when it has had something to do and said nothing; None while it idles
        self._silent_since: float | None = None

    @classmethod
    async def launch(cls, assignment: Assignment, *, inherited: Sequence[int] = ()) -> Self:
        """
        Start an engine's process and wait until the engine is ready.

        Raises:
            StartupError: the operator has to change something.
            EngineEnded, EngineFailed, StepHung, DeviceLost: as the start ended.
        """
        engine = cls(assignment, inherited=inherited)
        try:
            await engine._loop.create_connection(lambda: engine, sock=engine._connection)
            engine._write(assignment)
            await engine._ready
        except BaseException:
            await engine.kill()
            raise
        return engine

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._failure is None and not self._stopped

    @property
    def step_age_s(self) -> float:
        since = self._silent_since
        return 0.0 if since is None else time.monotonic() - since

    def start(self, *, on_turns: Callable[[list[Turn]], None], on_crash: Callable[[BaseException], None]) -> None:
        self._on_turns, self._on_crash = on_turns, on_crash
        # it may have died since it was ready
        if self._failure is not None:
            self._loop.call_soon(on_crash, self._failure)

    def add(self, requests: Iterable[Request]) -> None:
        self._send(Add(list(requests)))

    async def abort(self, request_ids: Iterable[str], *, unstarted_only: bool = False) -> dict[str, RequestOutput]:
        number = next(self._numbers)
        outputs: dict[str, RequestOutput] = await self._ask(number, Abort(number, list(request_ids), unstarted_only))
        return outputs

    async def call(self, command: Callable[[Engine], T]) -> T:
        number = next(self._numbers)
        result: T = await self._ask(number, Call(number, command))
        return result

    async def stop(self) -> None:
        self._send(Stop())
        self._stopped = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, STOP_S)
        await self.kill()

    async def kill(self) -> None:
        self._stopped = True
        self._process.kill()
        # one that does not die is in the hands of its device's driver, and nobody can help that
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, KILL_S)
        self._connection.close() if self._transport is None else self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        news: list[Turn] = []
        for message in self._unpacker.feed(data):
            match message:
                case Report():
                    self._take_report(message, news)
                case Answer(number, result, error):
                    if (future := self._answers.get(number)) is not None:
                        settle(future, result, error)
                case Ready(facts, capacity, stats):
                    self.facts, self.capacity, self.stats = facts, capacity, stats
                    settle(self._ready)
                case Failed():
                    self._fail(_error_of(message))
        if news and self._on_turns is not None:
            self._on_turns(news)

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        if self.alive:
            self._ending = self._loop.create_task(self._explain_end())
        else:
            self._leave_unanswered()

    def _take_report(self, report: Report, news: list[Turn]) -> None:
        self.capacity, self.stats = report.capacity, report.stats
        self.timings = report.timings or self.timings
        is_idle = report.idle and report.num_heard == self._num_sent
        self._silent_since = None if is_idle else time.monotonic()
        if report.news:
            news.append(report.turn)

    async def _explain_end(self) -> None:
        """Find out how the process ended that said nothing of it."""
        try:
            code = await asyncio.to_thread(self._process.wait, KILL_S)
        except subprocess.TimeoutExpired:
            # it closed its end and goes on
            await self.kill()
            code = self._process.returncode
        if code is None:
            self._fail(EngineFailed("the engine's process has let go of its connection, and cannot be killed"))
        else:
            self._fail(StepHung("a step of the engine did not end") if code == exits.HUNG else EngineEnded(code))

    def _fail(self, error: Exception) -> None:
        if self._failure is not None:
            return
        self._failure = error
        self._leave_unanswered()
        if not self._ready.done():
            self._ready.set_exception(error)
        elif self._on_crash is not None:
            self._on_crash(error)

    def _leave_unanswered(self) -> None:
        for future in self._answers.values():
            settle(future, error=EngineGone("the engine has ended"))

    async def _ask(self, number: int, question: Abort | Call) -> Any:
        if not self.alive:
            raise EngineGone("the engine has ended")
        future = self._answers[number] = self._loop.create_future()
        try:
            self._send(question)
            return await future
        finally:
            del self._answers[number]

    def _send(self, message: object) -> None:
        if self.alive:
            self._write(message)
            self._num_sent += 1
            self._silent_since = self._silent_since or time.monotonic()

    def _write(self, message: object) -> None:
        assert self._transport is not None
        self._transport.write(pack(message))


def _error_of(failed: Failed) -> Exception:
    if failed.startup:
        return StartupError(failed.message)
    if failed.device_lost:
        return DeviceLost(failed.message)
    return EngineFailed(f"{failed.error}: {failed.message}")
