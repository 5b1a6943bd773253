"""A server of one test's own, that can be stopped, killed, paused, replaced and started again where it was."""

import os
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from producers.local_redis import find_server
from tests.support.servers import wait_for


class RedisProcess:
    """
    A server process; entered, it runs. It writes every change at once, so that nothing that was answered is lost.

    Args:
        folder: Where it keeps its files; a later start finds them there.
    """

    def __init__(self, folder: Path, *, binary: Path | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.client = Redis.from_url(self.url, protocol=2, socket_timeout=10)
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._command = [
            *(str(binary or find_server()), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder)),
            *("--save", "", "--appendonly", "yes", "--appendfsync", "always"),
            *("--maxmemory-policy", "noeviction", "--daemonize", "no", "--repl-diskless-sync-delay", "0"),
        ]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self.client.close()

    def start(self, *options: str, ready: bool = True) -> None:
        """
        Start it, with what it kept.

        Args:
            ready: Wait until it serves; else only until it says that it is loading.
        """
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen([*self._command, *options], stdout=log, stderr=log)
        wait_for(self._serves if ready else self._answers, 20)

    def stop(self) -> None:
        """End it in good order."""
        self._send(signal.SIGTERM)
        self._wait()

    def kill(self) -> None:
        """End it at once."""
        self._send(signal.SIGKILL)
        self._wait()

    def pause(self) -> None:
        """Let it do nothing, with all its connections open."""
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        self._send(signal.SIGCONT)

    def follow(self, master: "RedisProcess") -> None:
        """Become a replica, and wait until it has everything."""
        self.client.execute_command("REPLICAOF", "127.0.0.1", str(master.port))
        wait_for(lambda: self._info("replication").get("master_link_status") == "up", 20)
        wait_for(lambda: master.client.execute_command("WAIT", 1, 1000) == 1, 20)

    def lead(self) -> None:
        """Be a master, with what it has by now."""
        self.client.execute_command("REPLICAOF", "NO", "ONE")

    def _info(self, section: str) -> dict[str, Any]:
        return dict(self.client.info(section))

    def _serves(self) -> bool:
        with suppress(RedisError):
            return bool(self.client.ping())
        self._complain()
        return False

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except RedisConnectionError as error:
            self._complain()
            return "loading" in str(error)

    def _complain(self) -> None:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "server.log").read_text()[-1000:]

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, number)

    def _wait(self) -> None:
        if self._process is not None:
            self._process.wait(20)
