"""The services of docker-compose.yml as processes of this machine, started, watched and stopped as compose does it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from producers.child import Child
from tests.stack.places import Places
from tests.stack.sealed import can_seal
from tests.support import dockerfile
from tests.support.compose import Check, Service
from tests.support.deploy import ROOT
from tests.support.seaweed import free_ports

# what an image starts that compose.yml gives arguments alone
ENTRYPOINTS = {"prom/prometheus": ("prometheus",)}

# a container has ports of its own for what it does not show; here all share one machine
_WEED_PORTS = ("master.port", "volume.port", "filer.port", "s3.port")

# of this machine, and nothing of the stack
_PASSED_ON = ("OPENBLAS_", "PIP_", "SSL_CERT_")


class StackError(Exception):
    """Raised when a service ends, or does not become healthy."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """
    How a service ended that was told to.

    Args:
        killed: It was given no more time.
    """

    code: int
    seconds: float
    killed: bool


class Health:
    """What a health check has found, asked as often as it says."""

    def __init__(self, check: Check, command: Sequence[str], environ: Mapping[str, str], folder: Path) -> None:
        self._check, self._command, self._environ, self._folder = check, list(command), dict(environ), folder
        self._started_at = self._looked_at = time.monotonic()
        self._probe: subprocess.Popen[bytes] | None = None
        self._num_failed = 0
        self.healthy = False

    @property
    def failed(self) -> bool:
        return self._num_failed >= self._check.retries

    def look(self) -> None:
        """Start a probe where it is time, and see how the last one went; never waits."""
        now = time.monotonic()
        starting = not self.healthy and now - self._started_at < self._check.start_period_s
        interval_s = self._check.start_interval_s if starting else self._check.interval_s
        if self._probe is None:
            if now - self._looked_at >= interval_s:
                self._looked_at = now
                quiet = subprocess.DEVNULL
                self._probe = subprocess.Popen(
                    self._command, env=self._environ, cwd=self._folder, stdin=quiet, stdout=quiet, stderr=quiet
                )
            return
        late = now - self._looked_at > self._check.timeout_s
        if late:
            self._probe.kill()
            self._probe.wait()
        if (code := self._probe.poll()) is None:
            return
        self._probe, self._looked_at = None, now
        if code == 0 and not late:
            self.healthy, self._num_failed = True, 0
        elif not starting:
            self._num_failed += 1

    def close(self) -> None:
        if self._probe is not None:
            self._probe.kill()
            self._probe.wait()


class Running:
    """A service that runs, or ran."""

    def __init__(self, service: Service, child: Child, health: Health | None) -> None:
        self.service, self.child, self.health = service, child, health
        self._told_at = 0.0

    def meets(self, condition: str) -> bool:
        """
        Whether another service may start that waits for this.

        Raises:
            StackError: it has ended otherwise, or its health has failed.
        """
        code, name = self.child.exit_code(), self.service.name
        if code is not None and (code != 0 or not self.service.runs_once):
            raise StackError(f"{name} ended with {code}:\n{self.child.last_lines(30)}")
        if self.service.runs_once:
            return code == 0
        if self.health is None or condition == "service_started":
            return True
        self.health.look()
        if self.health.failed:
            raise StackError(f"{name} is not healthy:\n{self.child.last_lines(30)}")
        return self.health.healthy

    def tell(self, number: signal.Signals | None = None) -> None:
        """Begin to end it as `docker compose stop` does; another signal is that of `docker compose kill`."""
        self._told_at = time.monotonic()
        if self.health is not None:
            self.health.close()
        if self.child.exit_code() is None:
            os.kill(self.child.pid, number or signal.Signals[self.service.stop_signal])

    def ended(self) -> Stopped | None:
        """How it has ended that was told to; killed where its time is over; None while it has some."""
        seconds = time.monotonic() - self._told_at
        killed = self.child.exit_code() is None and seconds > self.service.stop_grace_s
        if killed:
            os.kill(self.child.pid, signal.SIGKILL)
        elif self.child.exit_code() is None:
            return None
        # collects it
        self.child.__exit__(None, None, None)
        return Stopped(self.child.exit_code() or 0, seconds, killed)


class NativeStack:
    """
    Services that compose would start, entered and left as `up` and `down`.

    Args:
        folder: For all that they write; not below /tmp, where each has a folder of its own.
        services: As `tests.support.compose.load` gives them.
        environ: What services are told beside what the file says, by name.
        volumes: Folders that stand for named volumes.
        start_s: All are up by then.
        hurried: Services that are killed at the end instead of being stopped.
    """

    def __init__(
        self,
        folder: Path,
        services: Mapping[str, Service],
        *,
        environ: Mapping[str, Mapping[str, str]] | None = None,
        volumes: Mapping[str, Path] | None = None,
        start_s: float = 120.0,
        hurried: Collection[str] = (),
    ) -> None:
        self.folder, self.services = folder, services
        self.places = Places(folder, services, volumes or {})
        self.sealed = can_seal()
        self._environ = environ or {}
        self._start_s, self._hurried = start_s, hurried
        self._running: dict[str, Running] = {}
        self.ended: dict[str, Stopped] = {}

    def __enter__(self) -> Self:
        try:
            self.up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def port(self, service: str) -> int:
        """Where the only port of a service is."""
        (port,) = self.services[service].ports
        return self.places.port(service, port)

    def volume(self, service: str, target: str) -> Path:
        (mount,) = (one for one in self.services[service].mounts if one.target == target)
        return self.places.mount(self.services[service], mount)

    def log(self, service: str) -> str:
        path = self.folder / f"{service}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def up(self) -> None:
        """
        Start all, each as soon as what it depends on is so far, until all are healthy or done.

        Raises:
            StackError: one has ended, or is not healthy.
        """
        waiting = dict(self.services)
        deadline = time.monotonic() + self._start_s
        while waiting or not all(one.meets("service_healthy") for one in self._running.values()):
            if time.monotonic() > deadline:
                slow = [name for name, one in self._running.items() if not one.meets("service_healthy")]
                raise StackError(f"not up within {self._start_s:.0f} s: {', '.join(slow)}\n{self.log(slow[0])[-2000:]}")
            for name, service in list(waiting.items()):
                if all(self._is_met(other, condition) for other, condition in service.depends_on.items()):
                    self.start(name)
                    del waiting[name]
            time.sleep(0.02)

    def start(self, name: str) -> None:
        """Start one, without waiting for anything."""
        service = self.services[name]
        environ = self._environ_of(service)
        folder = ROOT if service.target is not None else self.folder
        child = Child(self._command(service), log=self.folder / f"{name}.log", environ=environ, grace_s=0)
        with contextlib.chdir(folder):
            child.__enter__()
        health = None
        if service.check is not None:
            command = [self.places.here(service, word) for word in service.check.command]
            health = Health(service.check, command, environ, folder)
        self._running[name] = Running(service, child, health)

    def await_healthy(self, name: str) -> None:
        """
        Raises:
            StackError: it has ended, or is not healthy.
        """
        while not self._running[name].meets("service_healthy"):
            time.sleep(0.02)

    def stop(self, name: str, number: signal.Signals | None = None) -> Stopped:
        """End one; `SIGKILL` for what happens where a machine is lost."""
        self._running[name].tell(number)
        while (stopped := self._running[name].ended()) is None:
            time.sleep(0.02)
        return stopped

    def down(self) -> None:
        """End all, each as soon as nothing depends on it any more; `ended` says how they did."""
        told: set[str] = set()
        while self._running:
            needed = {other for one in self._running.values() for other in one.service.depends_on}
            for name in self._running.keys() - needed - told:
                self._running[name].tell(signal.SIGKILL if name in self._hurried else None)
                told.add(name)
            for name in [name for name in told if name in self._running]:
                if (stopped := self._running[name].ended()) is not None:
                    service = self._running.pop(name).service
                    if not service.runs_once and name not in self._hurried:
                        self.ended[name] = stopped
            time.sleep(0.02)

    def _is_met(self, name: str, condition: str) -> bool:
        return name in self._running and self._running[name].meets(condition)

    def _command(self, service: Service) -> list[str]:
        image = str(service.raw.get("image", "")).partition(":")[0]
        built = service.target
        entrypoint = service.entrypoint or (
            dockerfile.words(built, "ENTRYPOINT") if built else ENTRYPOINTS.get(image, ())
        )
        command = service.command or (dockerfile.words(built, "CMD") if built else ())
        words = [self.places.here(service, word) for word in (*entrypoint, *command)]
        words += self._alone(service)
        if not self.sealed or not service.raw.get("read_only"):
            return words
        folders = [f"--tmp={self.places.temporary(service)}"] if service.tmpfs else []
        folders += map(str, self.places.writable(service))
        return [sys.executable, "-m", "tests.stack.sealed", *folders, "--", *words]

    def _alone(self, service: Service) -> list[str]:
        """What a program has to be told because it is not alone on its machine."""
        if service.name == "redis":
            return ["--bind", "127.0.0.1", "--dir", str(self.volume("redis", "/data"))]
        if service.name != "s3":
            return []
        names = [name for base in _WEED_PORTS for name in (base, f"{base}.grpc") if name != "s3.port"]
        return [f"-{name}={port}" for name, port in zip(names, free_ports(len(names)), strict=True)]

    def _environ_of(self, service: Service) -> dict[str, str]:
        host = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
        path = os.pathsep.join([str(self.places.programs), str(Path(sys.executable).parent), os.environ["PATH"]])
        base = {"PATH": path, "HOME": "/nonexistent", "HOSTNAME": socket.gethostname(), "PYTHONPATH": str(ROOT)}
        image = dockerfile.environ(service.target) if service.target is not None else {}
        said = {name: value for name, value in (image | dict(service.environ)).items() if value is not None}
        mapped = {name: self.places.here(service, value) for name, value in said.items() if name != "PATH"}
        return host | base | mapped | dict(self._environ.get(service.name, {}))
