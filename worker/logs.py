"""Logging: events with fields, as text for people or as JSON lines for machines."""

import logging
import sys
from typing import Any, Literal

import structlog


def configure_logging(style: Literal["auto", "text", "json"], level: str) -> None:
    """Write events to standard error; "auto" is text on a terminal and JSON elsewhere."""
    as_text = style == "text" or (style == "auto" and sys.stderr.isatty())
    shared: list[Any] = [
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
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
