"""
Logging of all programs: events with fields, as text for people or as JSON lines for machines.

A log is never worth a job: what happens a thousand times is told a few times and counted, and a
disk that takes no more loses lines. What libraries log takes the same way. Clients do not log.
"""

import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import structlog

from pagemill.settings import LogSettings
from pagemill.trace_context import trace_id_of

# of one event, so many lines in so many seconds; the number is the usual value of the setting log_limit
MAX_LINES = 20
WINDOW_S = 10.0

# of a prompt or an answer, where they are asked for
CONTENT_CHARS = 200

# names of events that libraries make up are kept for no longer than this many are there
_MAX_NAMES = 1000

# what our own events are limited by is their name, what libraries log by its text without the values
_LIMITED_BY = "_limited_by"

_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)

_PASSWORD = re.compile(r"(://[^\s/?#:@\"']*):[^\s/?#\"']*@")
_QUERY = re.compile(r"([?&][\w.-]*(?:password|secret|token|signature|credential)[\w.-]*=)[^&\s\"']+", re.IGNORECASE)

# of this process: its worker's id, its queue
_process: dict[str, Any] = {}
_prompts = False


def configure_logging(
    settings: LogSettings, *, libraries: int = logging.WARNING, target: int | None = None, **fields: Any
) -> None:
    """
    Write events to standard error, those of libraries too; "auto" is text on a terminal and JSON elsewhere.

    Args:
        libraries: The level of what these log; what they tell of each call is for whoever looks for their faults.
        target: Another file descriptor to write to.
        fields: Stand in each line that does not say them itself.
    """
    global _prompts
    _prompts = settings.log_prompts
    _process.clear()
    bind(**fields)
    descriptor = _standard_error() if target is None else target
    as_text = writes_text(settings)
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    shared: list[Any] = [
        FewLines(settings.log_limit),
        structlog.contextvars.merge_contextvars,
        _with_process_fields,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, *_rendering(as_text), mask],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(Lossy(descriptor)),  # type: ignore[arg-type]
    )
    _take_over_libraries(level if level <= logging.DEBUG else libraries)
    sys.excepthook = _log_crash
    threading.excepthook = _log_thread_crash


def _standard_error() -> int:
    try:
        return sys.stderr.fileno()
    except OSError:
        # something stands in its place that is no file
        return 2


def writes_text(settings: LogSettings) -> bool:
    """Whether people read the log."""
    return settings.log_format == "text" or (settings.log_format == "auto" and sys.stderr.isatty())


def bind(**fields: Any) -> None:
    """Have these in each further line of this process that does not say them itself."""
    _process.update(fields)


def of_job(job_id: str, traceparent: str | None = None) -> dict[str, str]:
    """What a line about a job says of it."""
    trace_id = trace_id_of(traceparent)
    return {"job_id": job_id, "trace_id": trace_id} if trace_id else {"job_id": job_id}


def content(**texts: str) -> dict[str, str]:
    """Prompts and answers as fields, the beginning of each; none unless the operator asks for them."""
    if not _prompts:
        return {}
    return {name: text if len(text) <= CONTENT_CHARS else f"{text[:CONTENT_CHARS]}..." for name, text in texts.items()}


def logs_prompts() -> bool:
    """Whether the operator asks for prompts and answers."""
    return _prompts


class FewLines:
    """
    Drops an event that was logged too often of late; the next one that is not says how many were dropped.

    Args:
        most: Lines of one event in WINDOW_S; 0 for no limit.
    """

    def __init__(self, most: int = MAX_LINES, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        # since when, lines and drops, by the event's name
        self._seen: dict[str, tuple[float, int, int]] = {}

    def __call__(self, logger: Any, method: str, fields: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        name, now = str(fields.pop(_LIMITED_BY, fields["event"])), self._clock()
        if not self._most:
            return fields
        since, lines, drops = self._seen.get(name, (now, 0, 0))
        if now - since >= WINDOW_S:
            if drops:
                fields["dropped"] = drops
            since, lines, drops = now, 0, 0
        if lines >= self._most:
            self._seen[name] = since, lines, drops + 1
            raise structlog.DropEvent
        if len(self._seen) >= _MAX_NAMES:
            self._seen.clear()
        self._seen[name] = since, lines + 1, drops
        return fields


class Lossy:
    """
    A file to write to that never fails: lines that a full disk or a closed pipe refuses are lost.

    Args:
        descriptor: Written to without a buffer, which would be left over, and fail, when we end.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, text: str) -> None:
        left = memoryview(text.encode(errors="backslashreplace"))
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError:
            # where else could that be said?
            return

    def flush(self) -> None:
        """Nothing is kept back."""


class FromLibraries(logging.Handler):
    """Has what libraries log look like our own events; `extra={"fields": {...}}` are fields of it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            fields = {"logger": record.name, **getattr(record, "fields", {})}
            fields[_LIMITED_BY] = f"{record.name} {record.msg}"
            if record.exc_info and record.exc_info[0] is not None:
                fields["exc_info"] = record.exc_info
            structlog.get_logger().log(_known(record.levelno), record.getMessage(), **fields)
        except Exception:
            self.handleError(record)


def _known(level: int) -> int:
    """The level with a name that one is at least: libraries make up others, as 25."""
    return max((known for known in _LEVELS if known <= level), default=logging.DEBUG)


def mask(logger: Any, method: str, line: Any) -> str:  # noqa: ARG001  structlog passes all three
    """A rendered line without the passwords and tokens of the URLs in it."""
    if "://" in line:
        line = _QUERY.sub(r"\1***", _PASSWORD.sub(r"\1:***@", line))
    return str(line)


def _rendering(as_text: bool) -> list[Any]:
    if as_text:
        plain = structlog.dev.plain_traceback
        return [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
    # tracebacks without local variables: these hold prompts and answers
    tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    return [structlog.processors.ExceptionRenderer(tracebacks), structlog.processors.JSONRenderer()]


def _with_process_fields(logger: Any, method: str, fields: dict[str, Any]) -> Mapping[str, Any]:  # noqa: ARG001
    for name, value in _process.items():
        fields.setdefault(name, value)
    return fields


def _take_over_libraries(level: int) -> None:
    root = logging.getLogger()
    for handler in root.handlers[:]:
        root.removeHandler(handler)
    root.addHandler(FromLibraries())
    root.setLevel(level)
    logging.captureWarnings(True)


def _log_crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    else:
        structlog.get_logger().critical("process.crashed", error=f"{kind.__name__}", exc_info=(kind, error, trace))


def _log_thread_crash(crash: threading.ExceptHookArgs) -> None:
    if crash.exc_value is not None and not issubclass(crash.exc_type, SystemExit):
        name = crash.thread.name if crash.thread else ""
        exc_info = (crash.exc_type, crash.exc_value, crash.exc_traceback)
        structlog.get_logger().critical("thread.crashed", thread=name, error=crash.exc_type.__name__, exc_info=exc_info)
