"""docker-compose.yml, as Docker Compose itself reads it: variables, anchors and defaults are filled in."""

import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support import server_box
from tests.support.deploy import ROOT

FILE = ROOT / "docker-compose.yml"

_UNITS_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


@dataclass(frozen=True, slots=True)
class Check:
    """A health check: what is run, how often, and what of it counts."""

    test: tuple[str, ...]
    interval_s: float
    timeout_s: float
    retries: int
    start_period_s: float
    start_interval_s: float

    @property
    def command(self) -> list[str]:
        """As a container runs it: a program with its arguments, or a line for the shell."""
        kind, *words = self.test
        return ["/bin/sh", "-c", *words] if kind == "CMD-SHELL" else words


@dataclass(frozen=True, slots=True)
class Mount:
    """A named volume, or a file or folder of the checkout, and where a container has it."""

    kind: str
    source: str
    target: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class Service:
    """
    One service.

    Args:
        raw: All of it, as compose prints it.
        depends_on: Conditions by service.
        environ: None for what is passed through and is not set.
    """

    name: str
    raw: Mapping[str, Any]
    command: tuple[str, ...]
    entrypoint: tuple[str, ...]
    environ: Mapping[str, str | None]
    depends_on: Mapping[str, str]
    check: Check | None
    mounts: tuple[Mount, ...]
    ports: tuple[int, ...]
    tmpfs: tuple[str, ...]
    stop_signal: str = "SIGTERM"
    stop_grace_s: float = 10.0
    profiles: frozenset[str] = field(default_factory=frozenset)

    @property
    def target(self) -> str | None:
        """The stage of the Dockerfile that it runs, where it is an image of ours."""
        return self.raw["build"]["target"] if "build" in self.raw else None

    @property
    def runs_once(self) -> bool:
        return self.raw.get("restart") == "no"


class ComposeMissing(Exception):
    """Raised where Docker Compose is not here."""


def compose_program() -> Path:
    """
    Raises:
        ComposeMissing: it cannot be found; the message says how to get it.
    """
    found = server_box.find("docker-compose")
    if found is None:
        raise ComposeMissing("there is no docker-compose here: `python -m tests.support.server_box` fetches it")
    return found


def config(
    *profiles: str,
    files: Sequence[Path] = (FILE,),
    environ: Mapping[str, str] | None = None,
    env_file: Path | None = None,
) -> "subprocess.CompletedProcess[str]":
    """
    `docker compose config`: checks the file against the Compose specification, and prints what it means.

    Args:
        profiles: That are active; "*" is all.
        environ: Variables, as a user's shell would have them.
        env_file: Instead of `.env`; by default none is read, whatever lies in the checkout.
    """
    command = [str(compose_program()), "--project-directory", str(ROOT), "--env-file", str(env_file or os.devnull)]
    command += [word for path in files for word in ("--file", str(path))]
    command += [word for profile in profiles for word in ("--profile", profile)]
    clean = {"PATH": os.environ.get("PATH", ""), "HOME": "/nonexistent"} | dict(environ or {})
    return subprocess.run(
        [*command, "config", "--format", "json"], env=clean, capture_output=True, text=True, timeout=60, check=False
    )


def load(*profiles: str, **options: Any) -> dict[str, Service]:
    """The services that would be started, by name; arguments as those of `config`."""
    done = config(*profiles, **options)
    assert done.returncode == 0, done.stderr
    found = json.loads(_unescaped(done.stdout))["services"]
    return {name: _service(name, raw) for name, raw in found.items()}


def seconds(text: str) -> float:
    """A duration such as 1m30s."""
    parts = re.findall(r"([\d.]+)(h|ms|us|ns|m|s)", text)
    assert "".join(number + unit for number, unit in parts) == text, text
    return sum(float(number) * _UNITS_S[unit] for number, unit in parts)


def _unescaped(text: str) -> str:
    # what is printed could be read as a compose file again, where a dollar sign is two
    return text.replace("$$", "$")


def _service(name: str, raw: Mapping[str, Any]) -> Service:
    published = [int(port["target"]) for port in raw.get("ports", ())]
    return Service(
        name=name,
        raw=raw,
        command=tuple(raw.get("command") or ()),
        entrypoint=tuple(raw.get("entrypoint") or ()),
        environ=raw.get("environment", {}),
        depends_on={other: depends["condition"] for other, depends in raw.get("depends_on", {}).items()},
        check=_check(raw.get("healthcheck")),
        mounts=tuple(
            Mount(one["type"], one["source"], one["target"], one.get("read_only", False))
            for one in raw.get("volumes", ())
        ),
        ports=tuple(sorted({*published, *map(int, raw.get("expose", ()))})),
        tmpfs=tuple(one.partition(":")[0] for one in raw.get("tmpfs", ())),
        stop_signal=raw.get("stop_signal", "SIGTERM"),
        stop_grace_s=seconds(raw.get("stop_grace_period", "10s")),
        profiles=frozenset(raw.get("profiles", ())),
    )


def _check(raw: Mapping[str, Any] | None) -> Check | None:
    if raw is None or raw.get("disable"):
        return None
    return Check(
        test=tuple(raw["test"]),
        interval_s=seconds(raw.get("interval", "30s")),
        timeout_s=seconds(raw.get("timeout", "30s")),
        retries=raw.get("retries", 3),
        start_period_s=seconds(raw.get("start_period", "0s")),
        start_interval_s=seconds(raw.get("start_interval", "5s")),
    )
