"""
Logging: events with fields, as text for people or as JSON lines for machines.

A log is never worth a job: what happens a thousand times is told a few times and counted, and a
disk that takes no more loses lines.
"""

import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import structlog

# of one event, so many lines in so many seconds
MAX_LINES = 20
WINDOW_S = 10.0


def configure_logging(style: Literal["auto", "text", "json"], level: str) -> None:
    """Write events to standard error; "auto" is text on a terminal and JSON elsewhere."""
    as_text = style == "text" or (style == "auto" and sys.stderr.isatty())
    shared: list[Any] = [
        FewLines(),
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    # tracebacks without local variables: these hold prompts and answers
    tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    rendering: list[Any] = (
        [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)]
        if as_text
        else [structlog.processors.ExceptionRenderer(tracebacks), structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=shared + rendering,
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(Lossy(sys.stderr.fileno())),  # type: ignore[arg-type]
        cache_logger_on_first_use=True,
    )


class FewLines:
    """
    Drops an event that was logged too often of late; the next one that is not says how many were dropped.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # since when, lines and drops, by the event's name: there are a few dozen
        self._seen: dict[str, tuple[float, int, int]] = {}

    def __call__(self, logger: Any, method: str, fields: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        name, now = str(fields["event"]), self._clock()
        since, lines, drops = self._seen.get(name, (now, 0, 0))
        if now - since >= WINDOW_S:
            if drops:
                fields["dropped"] = drops
            since, lines, drops = now, 0, 0
        if lines >= MAX_LINES:
            self._seen[name] = since, lines, drops + 1
            raise structlog.DropEvent
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
