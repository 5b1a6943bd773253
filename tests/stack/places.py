"""Where the services of docker-compose.yml are on one machine without containers: ports, folders, programs."""

import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

from producers.local_redis import find_server
from tests.support import server_box
from tests.support.compose import Mount, Service
from tests.support.deploy import ROOT
from tests.support.seaweed import free_ports

# where our images have the code
CODE = "/app"


class Places:
    """
    Turns what a service says of its container into what is so here.

    Args:
        folder: For volumes, temporary files and programs.
        services: All that will run.
        volumes: Folders that stand for named volumes, as ones that were filled earlier.
    """

    def __init__(self, folder: Path, services: Mapping[str, Service], volumes: Mapping[str, Path]) -> None:
        self._folder = folder
        self._services = services
        self._volumes = volumes
        pairs = [(name, port) for name, service in services.items() for port in service.ports]
        self._ports = dict(zip(pairs, free_ports(len(pairs)), strict=True))
        self.programs = _programs(folder / "programs")

    def port(self, service: str, port: int) -> int:
        """The port here that is one of a container's."""
        return self._ports[service, port]

    def here(self, service: Service, text: str) -> str:
        """A text of a service, with addresses and paths of this machine."""
        text = self._paths(service, self._addresses(text))
        own = "|".join(str(port) for port in service.ports)
        text = text.replace("0.0.0.0", "127.0.0.1")
        if own:
            # one look at each number: a port of this machine may be another's of the container
            text = re.sub(
                rf"(?<![\d.])(?:{own})(?!\d)", lambda found: str(self.port(service.name, int(found[0]))), text
            )
        return text

    def writable(self, service: Service) -> list[Path]:
        """Folders that a service may write into, beside its tmpfs."""
        return [self.mount(service, mount) for mount in service.mounts if not mount.read_only]

    def mount(self, service: Service, mount: Mount) -> Path:
        """The folder or file here that stands for a mount; what is bound is a copy, with addresses of this machine."""
        if mount.kind == "volume":
            path = self._volumes.get(mount.source, self._folder / "volumes" / mount.source)
            path.mkdir(parents=True, exist_ok=True)
            return path
        return self._bound(service, Path(mount.source))

    def temporary(self, service: Service) -> Path:
        """What is /tmp for a service that is sealed off."""
        path = self._folder / "tmp" / service.name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def _addresses(self, text: str) -> str:
        known = {f"{name}:{port}": native for (name, port), native in self._ports.items()}
        if not known:
            return text
        either = "|".join(map(re.escape, known))
        return re.sub(rf"(?<![\w.-])(?:{either})(?!\d)", lambda found: f"127.0.0.1:{known[found[0]]}", text)

    def _paths(self, service: Service, text: str) -> str:
        targets = {mount.target: self.mount(service, mount) for mount in service.mounts}
        if service.target is not None:
            targets[CODE] = ROOT
        for target in sorted(targets, key=len, reverse=True):
            text = re.sub(rf"(?<![\w.-]){re.escape(target)}(?![\w.-])", lambda _, to=targets[target]: str(to), text)
        return text

    def _bound(self, service: Service, source: Path) -> Path:
        copy = self._folder / "bound" / service.name / source.name
        if copy.exists():
            return copy
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy)
        else:
            shutil.copy(source, copy)
        for path in [copy] if copy.is_file() else copy.rglob("*"):
            if path.suffix == ".toml":
                path.write_text(self._addresses(path.read_text(encoding="utf-8")), encoding="utf-8")
            elif path.name == "prometheus.yml":
                path.write_text(self._scrapes(path.read_text(encoding="utf-8")), encoding="utf-8")
        return copy

    def _scrapes(self, text: str) -> str:
        """What Prometheus scrapes: names that compose's DNS would resolve become what they stand for."""
        config = yaml.safe_load(text)
        config["global"] |= {"scrape_interval": "1s", "evaluation_interval": "1s"}
        for job in config["scrape_configs"]:
            targets = [one for static in job.get("static_configs", ()) for one in static["targets"]]
            for found in job.pop("dns_sd_configs", ()):
                targets += [f"{name}:{found['port']}" for name in found["names"] if name in self._services]
            mapped = [self._addresses(target) for target in targets]
            prometheus = self._ports.get(("prometheus", 9090))
            job["static_configs"] = [
                {"targets": [one.replace("localhost:9090", f"localhost:{prometheus}") for one in mapped]}
            ]
        return yaml.safe_dump(config)


def _programs(folder: Path) -> Path:
    """A folder for the PATH, with the programs that images bring and this machine has elsewhere."""
    folder.mkdir(parents=True, exist_ok=True)
    boxed = server_box.find("redis-6.2.14")
    found = {
        # the nearest to the image's
        "redis-server": server_box.find("redis-8.2") or find_server(),
        "redis-cli": shutil.which("redis-cli") or (boxed.with_name("redis-cli") if boxed else None),
        "prometheus": server_box.find("prometheus"),
        "wget": shutil.which("wget"),
        "weed": Path(sys.executable).with_name("weed"),
    }
    for name, program in found.items():
        if program is not None and Path(program).exists():
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(program)
    return folder
