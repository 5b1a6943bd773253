"""How a command of ours begins and ends: its log and its traces, and how it tells people of things."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog
from rich.console import Console

from pagemill.logs import configure_logging, writes_text
from pagemill.settings import ClientSettings, LogSettings
from pagemill.traces import exported
from producers.progress import Display, display_for

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Voice:
    """
    How a command speaks.

    Args:
        as_text: To people; else in events of the log.
    """

    as_text: bool

    def display(self) -> Display:
        return display_for(Console(stderr=True), as_events=not self.as_text)

    def warn(self, text: str) -> None:
        if self.as_text:
            print(text, file=sys.stderr, flush=True)
        else:
            log.warning("run.warning", message=text)


@contextmanager
def observed(service: str) -> Iterator[Voice]:
    """
    While a command that works for long does so.

    Raises:
        SettingsError: a setting of logs or traces is wrong.
    """
    settings = LogSettings.load(strict=False)
    as_text = writes_text(settings)
    if as_text and "log_level" not in settings.model_fields_set:
        # people have the display
        settings = settings.model_copy(update={"log_level": "warning"})
    configure_logging(settings)
    with exported(ClientSettings.load(strict=False).tracing, service):
        yield Voice(as_text)
