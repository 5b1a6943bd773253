"""How a command of bulk's runner ends: by a signal, and with its own code or that of an error, told in a line."""

import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Protocol

from pagemill.errors import PagemillError
from producers.bulk.errors import Interrupted
from producers.extras import how_to_get


class Stoppable(Protocol):
    """Work that ends in order once it is told to."""

    @property
    def stopped(self) -> bool:
        """Whether it was told."""

    def stop(self) -> None:
        """Tell it."""


def heed_signals(work: Stoppable) -> None:
    """The first SIGINT or SIGTERM stops the work in order, the second at once."""

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  a signal handler takes both
        if work.stopped:
            raise KeyboardInterrupt
        work.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def exit_code(name: str, command: Callable[[], int], usage_errors: tuple[type[Exception], ...]) -> int:
    """
    Run a command; SIGTERM is as Ctrl-C to it.

    Args:
        name: Stands before the error.
        usage_errors: Whose remedy is another command line: 2, where other errors are 1.
    """
    # until the command hears both: a display is put away, and a folder for a while is deleted
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return command()
    except Interrupted as error:
        return _told(name, error, 1)
    except usage_errors as error:
        return _told(name, error, 2)
    except ModuleNotFoundError as error:
        return _told(name, how_to_get(error.name, "bulk"), 2)
    except PagemillError as error:
        return _told(name, error, 1)
    except KeyboardInterrupt:
        return _told(name, "interrupted", 130)


def _told(name: str, what: object, code: int) -> int:
    print(f"{name}: {what}", file=sys.stderr)
    return code
