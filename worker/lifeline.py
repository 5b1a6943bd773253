"""
What ties a worker process to its supervisor: a pipe for a few notes, and a common end.

The supervisor judges by the notes what the end of the process means: an exit code alone may be that
of any library.
"""

import contextlib
import ctypes
import os
import secrets
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Self

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# a supervisor's word for "hurry"; not SIGTERM again, which a service manager may send to both of us at once
HURRY_SIGNAL = signal.SIGUSR2

SERVING = "serving"
DRAINED = "drained"
FAILED = "failed "
# the engine's process ended, and this is how: its exit code, or a signal's number below 0
ENGINE_ENDED = "engine ended "

# what a process says of its failure; a pipe holds more than that without a reader
MAX_NOTE_BYTES = 1000

_PR_SET_PDEATHSIG = 1


def new_worker_id() -> str:
    """Of this host, and new each time: the id is what fences one incarnation off from the next."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


def end_with(parent: int, number: signal.Signals) -> None:
    """Have Linux send us a signal when our parent dies; end where it is dead already."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    # it may have died before the call
    if os.getppid() != parent:
        os._exit(1)


@dataclass(frozen=True, slots=True)
class Lifeline:
    """
    The worker's end.

    Args:
        supervisor: Its process id.
        pipe: File descriptor that takes the notes.
        worker_id: What the supervisor knows this process by, and so what the queue does.
    """

    supervisor: int
    pipe: int
    worker_id: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """From what `str` made of it."""
        supervisor, pipe, worker_id = text.split(":", 2)
        return cls(int(supervisor), int(pipe), worker_id)

    def __str__(self) -> str:
        return f"{self.supervisor}:{self.pipe}:{self.worker_id}"

    @property
    def orphaned(self) -> bool:
        """Whether the supervisor is gone."""
        return os.getppid() != self.supervisor

    def hold(self) -> None:
        """
        Keep the pipe from our own children, and have Linux send SIGTERM when the supervisor dies; elsewhere
        we would stay.
        """
        os.set_inheritable(self.pipe, False)
        end_with(self.supervisor, signal.SIGTERM)

    def tell(self, note: str) -> None:
        """Send a note; one that nobody takes any more is dropped."""
        with contextlib.suppress(OSError):
            os.write(self.pipe, note.replace("\n", " ").encode(errors="replace")[:MAX_NOTE_BYTES] + b"\n")
