"""
The engine's process: loads the model, steps the engine, and ends with the worker that has started it.

    python -m worker.engine_child SOCKET WORKER

SOCKET is the descriptor of its end of the socket pair, WORKER the process id of the other side.
"""

import contextlib
import faulthandler
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn

import structlog

from engine.capacity import Capacity
from engine.errors import DeviceLost, StartupError
from pagemill.logs import configure_logging
from worker import exits
from worker.engine_build import build_engine, gpu_in_use
from worker.engine_port import Engine, EngineFacts, EngineStats, Turn
from worker.engine_wire import Abort, Add, Answer, Assignment, Call, Failed, Ready, Report, Stop, Unpacker, pack
from worker.lifeline import HURRY_SIGNAL, STOP_SIGNALS, end_with
from worker.self_test import self_test
from worker.step_loop import Command, StepLoop
from worker.timings import NO_TIMINGS, Timings
from worker.watchdog import Watchdog

log = structlog.get_logger("engine")

# the step must not wait long for the interpreter lock while the watchdog, or a library's thread, has it
SWITCH_INTERVAL_S = 0.0005
# steps of a few milliseconds of which there is nothing to tell are reported as often
REPORT_EVERY_S = 0.02

# a model that has not been loaded by then hangs
LOADING_S = 3600.0

_READ_BYTES = 1 << 20


class Port:
    """
    The engine's end of the socket pair; one thread uses it, the one that steps the engine.

    It reads between two steps: a thread that reads meanwhile would take the interpreter lock from the
    step for as long. What does not fit the socket's buffer waits with the worker.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._unpacker = Unpacker()
        self._num_heard = 0
        self._told_heard = 0
        self._told_at = 0.0
        self._told_timings = NO_TIMINGS
        self._was_idle = True

    def receive(self, *, wait: bool) -> list[Any]:
        """The messages that have come; waits for some where told to. A worker that is gone has said `Stop`."""
        messages: list[Any] = []
        while True:
            try:
                data = self._connection.recv(_READ_BYTES, 0 if wait and not messages else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return messages
            if not data:
                return [*messages, Stop()]
            messages += self._unpacker.feed(data)
            if messages or not wait:
                return messages

    def send(self, message: object) -> None:
        self._connection.sendall(pack(message))

    def take(self, *, wait: bool) -> Iterable[Command | None]:
        for message in self.receive(wait=wait):
            self._num_heard += 1
            match message:
                case Add(requests):
                    yield partial(StepLoop.add, requests=requests)
                case Abort(number, names, unstarted_only):
                    ask = partial(StepLoop.abort, request_ids=names, unstarted_only=unstarted_only)
                    yield partial(self._answer, number, ask)
                case Call(number, command):
                    yield partial(self._answer, number, partial(_on_engine, command))
                case Stop():
                    yield None

    def publish(
        self, turn: Turn, capacity: Capacity, stats: EngineStats, timings: Timings, *, news: bool, idle: bool
    ) -> None:
        now = time.monotonic()
        changed = news or idle is not self._was_idle or self._num_heard > self._told_heard
        if not changed and now - self._told_at < REPORT_EVERY_S:
            return
        self._told_at, self._told_heard, self._was_idle = now, self._num_heard, idle
        new_timings = None if timings is self._told_timings else timings
        self._told_timings = timings
        self.send(Report(turn, capacity, stats, new_timings, news, self._num_heard, idle))

    def _answer(self, number: int, question: Callable[[StepLoop], object], steps: StepLoop) -> None:
        try:
            answer = Answer(number, question(steps))
        except Exception as error:
            answer = Answer(number, error=error)
        # now: the step that follows may be a long one
        self.send(answer)


def _on_engine(command: Callable[[Engine], object], steps: StepLoop) -> object:
    return command(steps.engine)


def main(arguments: list[str]) -> NoReturn:
    descriptor, worker = map(int, arguments)
    # the worker decides when we end, whatever the terminal or a service manager sends to all of us
    for number in (*STOP_SIGNALS, HURRY_SIGNAL, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_with(worker, signal.SIGKILL)
    # what a library does to us shows on standard error
    faulthandler.enable()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    port = Port(socket.socket(fileno=descriptor))
    match port.receive(wait=True):
        case [Assignment() as assignment]:
            _run(port, assignment)
    # the worker has ended before it could say what we are
    _leave(exits.STARTUP)


def _run(port: Port, assignment: Assignment) -> NoReturn:
    configure_logging(assignment.logging, **assignment.log_fields)
    # read when torch is imported: threads that spin while they wait take the cores from all others
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # the watchdog sets the same timer anew
    faulthandler.dump_traceback_later(LOADING_S, exit=True)
    try:
        engine, tokenizer = build_engine(assignment.plan)
        steps = StepLoop(engine, port)
        watchdog = Watchdog(lambda: steps.busy_since, timeout_s=assignment.step_timeout_s)
        watchdog.start()
        with steps.busy():
            self_test(engine, tokenizer)
    except StartupError as error:
        port.send(Failed(type(error).__name__, str(error), startup=True))
        _leave(exits.STARTUP)
    except Exception as error:
        # nothing that the operator could change: a device that was lost, or memory that another process had
        _fail(port, error)
    # what is there now stays: the collector need not walk a million objects of libraries between two steps
    gc.collect()
    gc.freeze()
    port.send(Ready(EngineFacts.of(engine, gpu=gpu_in_use()), engine.capacity(), engine.stats()))
    try:
        steps.run()
    except ConnectionError:
        # the worker is gone, and we go with it
        _leave(exits.DRAINED)
    except BaseException as error:
        _fail(port, error)
    _leave(exits.DRAINED)


def _fail(port: Port, error: BaseException) -> NoReturn:
    lost = isinstance(error, DeviceLost)
    try:
        log.critical("engine.failed", error=str(error), exc_info=error)
        port.send(Failed(type(error).__name__, str(error), device_lost=lost))
    finally:
        _leave(exits.DEVICE_LOST if lost else exits.FAILED)


def _leave(code: int) -> NoReturn:
    """End at once: a device that is lost may keep an orderly end from coming."""
    # what libraries have printed; nobody may be there to read it
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
