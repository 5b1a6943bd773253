"""
What a worker and its engine's process say to each other: pickles, each behind its length.

Both are one program, the one started by the other, on a socket pair that nobody else has.
"""

import io
import pickle
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from engine.capacity import Capacity, Freeable
from engine.request import Completion, Progress, Request, RequestOutput, RequestTimes, TextDelta
from pagemill.settings import LogSettings
from worker.engine_build import EnginePlan
from worker.engine_port import Engine, EngineFacts, EngineStats, Turn
from worker.timings import Timings

_HEAD = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Assignment:
    """
    The first message to the engine's process: what it is.

    Args:
        step_timeout_s: It ends when a step lasts for longer.
        log_fields: Stand in each line that it logs.
    """

    plan: EnginePlan
    step_timeout_s: float
    logging: LogSettings
    log_fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Add:
    """Take these."""

    requests: list[Request]


@dataclass(frozen=True, slots=True)
class Abort:
    """Take these out, and answer with what they have."""

    number: int
    request_ids: list[str]
    unstarted_only: bool


@dataclass(frozen=True, slots=True)
class Call:
    """Run this on the engine, and answer with what it returns."""

    number: int
    command: Callable[[Engine], Any]


@dataclass(frozen=True, slots=True)
class Stop:
    """Let the step that runs end, and then end."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine can be given work."""

    facts: EngineFacts
    capacity: Capacity
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class Report:
    """
    How things are after a step, and what came out of it.

    Args:
        timings: None where they are those of the report before.
        news: Something came out, or there may be room for more.
        num_heard: Messages that the engine has taken in.
        idle: It does nothing until it hears one more.
    """

    turn: Turn
    capacity: Capacity
    stats: EngineStats
    timings: Timings | None
    news: bool
    num_heard: int
    idle: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call or an abort has brought."""

    number: int
    result: object = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """
    The last word of an engine that has failed.

    Args:
        error: The name of the exception's class: unpickled, it might bring in libraries that only the engine needs.
        startup: The operator has to change something.
        device_lost: Nothing works on the device any more, for that process.
    """

    error: str
    message: str
    startup: bool = False
    device_lost: bool = False


def _by_fields(kind: type[Any]) -> Callable[[Any], tuple[Callable[..., Any], tuple[Any, ...]]]:
    read = attrgetter(*(field.name for field in fields(kind)))
    return lambda value: (kind, read(value))


# of these there are many, and their fields take half the time of what pickle does with slots
_MANY = (RequestOutput, RequestTimes, Completion, TextDelta, Progress, Capacity, Freeable, Turn, Report, Answer)
_REDUCERS: Mapping[type[Any], Any] = {kind: _by_fields(kind) for kind in _MANY}


def pack(message: object) -> bytes:
    """A message as it is sent."""
    file = io.BytesIO()
    file.write(bytes(_HEAD.size))
    pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = _REDUCERS
    pickler.dump(message)
    data = file.getbuffer()
    _HEAD.pack_into(data, 0, len(data) - _HEAD.size)
    return bytes(data)


class Unpacker:
    """Makes messages of bytes as they come."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that are complete with these bytes; to be read to the end."""
        self._data += data
        place = 0
        while (end := self._end(place)) <= len(self._data):
            with memoryview(self._data)[place + _HEAD.size : end] as message:
                yield pickle.loads(message)
            place = end
        del self._data[:place]

    def _end(self, place: int) -> int:
        """Where the message from `place` on ends, or its head where that is not there yet."""
        end = place + _HEAD.size
        return end + _HEAD.unpack_from(self._data, place)[0] if end <= len(self._data) else end
