"""Start a program that does not outlive us, whatever ends us."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

_PR_SET_PDEATHSIG = 1


class Child:
    """
    A program that runs while this is entered; what it prints goes to `log`, or where None to our stderr.

    It has a session of its own, so that Ctrl-C at the terminal reaches us alone and we stop it
    in order. Should we be killed, Linux sends it SIGTERM; elsewhere it would stay.

    Args:
        grace_s: Time between SIGTERM and SIGKILL.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path | None,
        environ: Mapping[str, str] | None = None,
        grace_s: float = 10.0,
    ) -> None:
        self.command = list(command)
        self.log = log
        self._environ = dict(environ) if environ is not None else None
        self._grace_s = grace_s
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            output = stack.enter_context(self.log.open("ab")) if self.log is not None else sys.stderr
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environ,
                start_new_session=True,
                preexec_fn=_end_with_parent(os.getpid()),
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(self._grace_s)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            # a second Ctrl-C does not wait either
            process.kill()
            process.wait()

    @property
    def pid(self) -> int:
        assert self._process is not None, "not entered yet"
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs."""
        assert self._process is not None, "not entered yet"
        return self._process.poll()

    def last_lines(self, num_lines: int = 15) -> str:
        """The end of what it printed."""
        if self.log is None:
            return ""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])


def _end_with_parent(parent: int) -> Callable[[], None] | None:
    if not sys.platform.startswith("linux"):
        return None
    # loaded here: between fork and exec nothing may be imported any more
    libc = ctypes.CDLL(None)

    def ask_the_kernel() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        # the parent may have died before the call
        if os.getppid() != parent:
            os._exit(1)

    return ask_the_kernel
