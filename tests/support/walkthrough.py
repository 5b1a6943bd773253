"""
Does what a page tells its reader to do: one shell, terminals beside it, and outputs that are compared.

What a test has to know stands in an HTML comment before a block, which readers do not see:

    installs                      run where everything is installed anew
    terminal, ready at: PATTERN   in a terminal of its own, until Ctrl-C; ready when its output has the pattern,
                                  or where that is `port NUMBER`, when something listens there
    file: NAME                    saved under that name
    an answer of the model        an output that is compared where the real model answers
    not run: REASON               for the reader alone
"""

import fcntl
import os
import pty
import re
import select
import signal
import socket
import subprocess
import termios
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from tests.support.pages import Block
from tests.support.servers import wait_for

_MARK = "-- the block has ended --"


class Shell:
    """A shell that keeps its variables from block to block; a command that fails ends it."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self._errors = folder / "shell.err"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                ["bash", "-eu", "-o", "pipefail"],
                cwd=folder,
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )

    def run(self, code: str, timeout_s: float) -> str:
        """What it printed. Its commands find nothing to read on standard input."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{{\n{code}\n}} < /dev/null\necho '{_MARK}'\n".encode())
        self._process.stdin.flush()
        patience = time.monotonic() + timeout_s
        said = b""
        while not said.endswith(f"{_MARK}\n".encode()):
            left_s = patience - time.monotonic()
            assert left_s > 0, f"still running after {timeout_s:g} s:\n{code}\n{said.decode()}{self._told()}"
            if select.select([self._process.stdout], [], [], left_s)[0]:
                chunk = os.read(self._process.stdout.fileno(), 65536)
                assert chunk, f"failed:\n{code}\n{said.decode()}{self._told()}"
                said += chunk
        return said.decode().removesuffix(f"{_MARK}\n")

    def close(self) -> None:
        _kill(self._process)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _told(self) -> str:
        return self._errors.read_text(errors="replace")


class Terminal:
    """
    A command in a terminal of its own: entered once its output has a pattern, and left by Ctrl-C.

    It is a real one, so that programs show what they show to people, and Ctrl-C reaches all of them.
    """

    def __init__(self, code: str, ready: str, folder: Path, environ: Mapping[str, str]) -> None:
        self._code, self._ready, self._folder, self._environ = code.strip(), ready, folder, environ
        self._said: list[bytes] = []

    @property
    def output(self) -> str:
        return b"".join(self._said).decode(errors="replace")

    def __enter__(self) -> Self:
        self._keyboard, screen = pty.openpty()

        def take_the_terminal() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            # a job in the background of a shell inherits that it is ignored
            signal.signal(signal.SIGINT, signal.default_int_handler)

        self._process = subprocess.Popen(
            ["bash", "-euc", f"exec {self._code}"],
            cwd=self._folder,
            env=self._environ,
            stdin=screen,
            stdout=screen,
            stderr=screen,
            start_new_session=True,
            preexec_fn=take_the_terminal,
        )
        os.close(screen)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            wait_for(self._is_ready, 90)
        except BaseException:
            self._leave(b"")
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        assert self._leave(b"\x03"), f"Ctrl-C did not end `{self._code}`: {self.output}"
        assert "Traceback" not in self.output, self.output

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, self.output
        kind, _, port = self._ready.partition("port ")
        if port and not kind:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", int(port))) == 0
        return re.search(self._ready, self.output) is not None

    def _leave(self, key: bytes) -> bool:
        """Press a key, and end by force what it has not ended; whether it was enough."""
        enough = False
        try:
            os.write(self._keyboard, key)
            self._process.wait(30 if key else 0)
            enough = True
        except (OSError, subprocess.TimeoutExpired):
            _kill(self._process)
        self._reader.join(10)
        os.close(self._keyboard)
        return enough

    def _read(self) -> None:
        # at the end of the last program that has the terminal, Linux says EIO
        with suppress(OSError):
            while chunk := os.read(self._keyboard, 65536):
                self._said.append(chunk)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """End a program and all that it started, which have a session of their own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Walkthrough:
    """
    Follows blocks of a page in order, in a folder.

    Args:
        environ: Of all commands; ports are the caller's to replace.
        ports: Texts of the page that stand for what is free here, as "6379".
        installs: Whether blocks are run that install.
        answers: Whether answers of the model are compared.
    """

    def __init__(
        self, folder: Path, environ: Mapping[str, str], *, ports: Mapping[str, str], installs: bool, answers: bool
    ) -> None:
        self._folder, self._environ, self._ports = folder, environ, ports
        self._installs, self._answers = installs, answers
        self._said = ""
        self.compared = 0

    def follow(self, steps: list[Block]) -> None:
        with ExitStack() as stack:
            shell = Shell(self._folder, self._environ)
            stack.callback(shell.close)
            for step in steps:
                self._do(step, shell, stack)

    def _here(self, text: str) -> str:
        for theirs, ours in self._ports.items():
            text = text.replace(theirs, ours)
        return text

    def _do(self, step: Block, shell: Shell, stack: ExitStack) -> None:
        code = self._here(step.code)
        kind, _, detail = step.remark.partition(": ")
        if kind == "not run" or (step.remark == "installs" and not self._installs):
            return
        if step.language == "text":
            if kind != "an answer of the model" or self._answers:
                assert matches(step.code, self._said), f"{step}: {self._said}"
                self.compared += 1
            else:
                assert self._said.strip(), step
        elif kind == "file":
            (self._folder / detail).write_text(code)
        elif kind == "terminal, ready at":
            stack.enter_context(Terminal(code, self._here(detail), self._folder, self._environ))
        elif step.language == "python":
            self._said = shell.run(f"python - <<'THE-END-OF-IT'\n{code}THE-END-OF-IT", timeout_s=100)
        else:
            assert step.language == "sh", f"{step}: a test cannot do this; say how in a comment before it"
            self._said = shell.run(code, timeout_s=800 if step.remark == "installs" else 100)


def matches(expected: str, said: str) -> bool:
    """Whether an output is as the page shows it: ... stands for anything within a line, spaces for spaces."""
    wanted = [re.sub(r" +", " ", line.strip()) for line in expected.strip().splitlines()]
    lines = [re.sub(r" +", " ", line.strip()) for line in said.strip().splitlines()]
    return len(wanted) == len(lines) and all(
        re.fullmatch(re.escape(one).replace(r"\.\.\.", ".*"), line) for one, line in zip(wanted, lines, strict=True)
    )
