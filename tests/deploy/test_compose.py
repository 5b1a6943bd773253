"""What docker-compose.yml says: Docker Compose takes it, and each service is as one wants to run it."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from producers.bulk.spec import BulkSpec
from producers.tasks.settings import CelerySettings
from tests.support import compose, dockerfile, server_box
from tests.support.compose import Service
from tests.support.deploy import PROMETHEUS, ROOT, read_yaml
from worker.settings import WorkerSettings

pytestmark = pytest.mark.skipif(
    server_box.find("docker-compose") is None,
    reason="no docker-compose: `python -m tests.support.server_box` fetches it",
)

EXAMPLE = ROOT / ".env.example"
ALWAYS = {
    *("setup", "redis", "s3", "bucket", "model-cpu", "worker-cpu"),
    *("gateway", "ingress", "bulk", "beat"),
}
GPU = {"model-gpu", "worker-gpu"}
OBS = {"exporter", "prometheus", "grafana"}


@pytest.fixture(scope="module")
def services() -> dict[str, Service]:
    return compose.load("*")


def variables() -> set[str]:
    """All that the file takes from a user's environment, those that it passes through too."""
    text = compose.FILE.read_text()
    passed = re.findall(r"^ +([A-Z0-9_]+):$", text, re.MULTILINE)
    return {*re.findall(r"(?<!\$)\$\{(\w+)", text), *passed}


def test_compose_takes_the_file() -> None:
    """
    It fits the Compose specification, by Docker Compose's own check, and without a word of warning.
    """
    done = compose.config("*")

    assert (0, "") == (done.returncode, done.stderr)


def test_up_starts_what_a_user_of_a_laptop_wants() -> None:
    """
    GPUs and dashboards are for those who ask.
    """
    assert ALWAYS == compose.load().keys()
    assert ALWAYS | GPU == compose.load("gpu").keys()
    assert ALWAYS | OBS == compose.load("obs").keys()


def test_nobody_has_to_write_an_env_file() -> None:
    """
    The example says what is so without it, so that a copy changes nothing.
    """
    assert compose.load("*", env_file=EXAMPLE) == compose.load("*")


def test_each_variable_is_in_the_example() -> None:
    """
    Those that are passed through, and the credentials of another store, as comments.
    """
    told = set(re.findall(r"^#? *([A-Z0-9_]+)=", EXAMPLE.read_text(), re.MULTILINE))

    assert variables() == told


def test_credentials_of_a_users_shell_go_into_no_container() -> None:
    """
    Many have some for a cloud, and the stack's own store would refuse them; another store's are given by other names.
    """
    shell = {"AWS_ACCESS_KEY_ID": "AKIA", "AWS_SECRET_ACCESS_KEY": "of a cloud", "AWS_SESSION_TOKEN": "too"}
    another = {"OBJECT_STORE_KEY_ID": "id", "OBJECT_STORE_SECRET": "secret"}

    assert compose.load("*", environ=shell) == compose.load("*")
    environ = compose.load(environ=another)["worker-cpu"].environ
    assert ("id", "secret") == (environ["AWS_ACCESS_KEY_ID"], environ["AWS_SECRET_ACCESS_KEY"])


def test_no_secret_has_a_value_in_the_repository(services: dict[str, Service]) -> None:
    """
    The first start draws them; Redis goes without one where nobody else reaches it.
    """
    secret = re.compile(r"PASSWORD|SECRET|TOKEN|AUTH|ACCESS_KEY")
    given = {
        (name, variable): value
        for name, service in services.items()
        for variable, value in service.environ.items()
        if secret.search(variable) and value and not value.startswith("/secrets/")
    }

    assert {} == given
    assert not re.search(r"^[A-Z0-9_]*(?:PASSWORD|SECRET|TOKEN)[A-Z0-9_]*=.", EXAMPLE.read_text(), re.MULTILINE)


def test_ports_are_this_machines_alone(services: dict[str, Service]) -> None:
    """
    Until somebody says otherwise; workers have none, so that there may be several.
    """
    published = [port for service in services.values() for port in service.raw.get("ports", ())]

    assert {"127.0.0.1"} == {port["host_ip"] for port in published}
    assert len(published) == len({port["published"] for port in published}) == 5
    assert {"0.0.0.0"} == {
        port["host_ip"]
        for service in compose.load("*", environ={"BIND": "0.0.0.0"}).values()
        for port in service.raw.get("ports", ())
    }


def test_a_container_may_do_little(services: dict[str, Service]) -> None:
    """
    No root, no capability, a file system that is not written but for volumes and /tmp.
    """
    for name, service in services.items():
        user = service.raw.get("user") or dockerfile.last(service.target or "", "USER")
        assert user not in (None, "root", "0"), name
        assert service.raw["read_only"], name
        assert ["ALL"] == service.raw["cap_drop"], name
        assert "no-new-privileges:true" in service.raw["security_opt"], name
        assert ("/tmp",) == service.tmpfs, name


def test_a_container_does_not_fill_the_machine(services: dict[str, Service]) -> None:
    """
    Logs turn over, and what runs on has a limit of memory; a GPU's worker takes what its model needs.
    """
    for name, service in services.items():
        assert {"max-size": "10m", "max-file": "3"} == service.raw["logging"]["options"], name
        if not service.runs_once and name != "worker-gpu":
            assert int(service.raw["deploy"]["resources"]["limits"]["memory"]) > 0, name


def test_what_runs_is_watched_and_comes_back(services: dict[str, Service]) -> None:
    """
    Each has a health check and a first process that collects others; what runs once is not started again.
    """
    for name, service in services.items():
        assert service.raw["init"], name
        assert service.runs_once == (service.check is None), name
        assert service.raw["restart"] == ("no" if service.runs_once else "unless-stopped"), name


def test_health_is_asked_where_the_service_is(services: dict[str, Service]) -> None:
    """
    At a port of the same container.
    """
    for name, service in services.items():
        asked = re.findall(r"127\.0\.0\.1:(\d+)", " ".join(service.check.test)) if service.check else []
        assert set(map(int, asked)) <= set(service.ports), name


def test_services_start_when_what_they_need_is_there(services: dict[str, Service]) -> None:
    """
    Servers are healthy, and what runs once has ended; all that a service speaks to is named.
    """
    for name, service in services.items():
        for other, condition in service.depends_on.items():
            runs_once = services[other].runs_once
            assert condition == ("service_completed_successfully" if runs_once else "service_healthy"), (name, other)
        text = json.dumps([service.raw.get("command"), {**service.environ}])
        spoken_to = {other for other in services if re.search(rf"(?<![\w.-]){other}:\d", text)} - {name}
        assert spoken_to <= reached(services, name), name


def reached(services: dict[str, Service], name: str) -> set[str]:
    """All that has to be up before a service, directly or not."""
    found = set(services[name].depends_on)
    return found.union(*(reached(services, other) for other in found))


def test_a_worker_has_the_time_that_it_drains(services: dict[str, Service]) -> None:
    """
    And half a minute more: an engine is waited for so long, and results are written.
    """
    for name in ("worker-cpu", "worker-gpu"):
        drain_s = float(services[name].environ["PAGEMILL_DRAIN_S"] or 0)
        assert drain_s == WorkerSettings.model_fields["drain_s"].default
        assert services[name].stop_grace_s >= drain_s + 30
    grace_s = float(services["gateway"].environ["PAGEMILL_GATEWAY_GRACE_S"] or 0)
    # its batches are handed over after that, and then it waits for what else it has begun
    assert services["gateway"].stop_grace_s > grace_s + 10 + 5


def test_redis_keeps_what_it_has_taken(services: dict[str, Service]) -> None:
    """
    A file of all writes, and no eviction; the container has room for a rewrite of that file.
    """
    words = services["redis"].command
    said = dict(zip(words[1::2], words[2::2], strict=True))

    assert ("yes", "everysec", "noeviction") == (
        said["--appendonly"],
        said["--appendfsync"],
        said["--maxmemory-policy"],
    )
    assert said["--maxmemory"] == "1gb"
    assert int(services["redis"].raw["deploy"]["resources"]["limits"]["memory"]) >= 2 * 1024**3


def test_the_gpu_does_not_share_the_cpus_queue(services: dict[str, Service]) -> None:
    """
    A model and a queue of its own, since the slow worker would take its jobs. One variable joins the two, another
    ends the CPU's.
    """
    cpu, gpu = services["worker-cpu"], services["worker-gpu"]
    joined = compose.load("gpu", environ={"GPU_QUEUE": "default", "CPU_WORKERS": "0"})

    assert cpu.environ["PAGEMILL_QUEUE"] != gpu.environ["PAGEMILL_QUEUE"]
    assert cpu.environ["PAGEMILL_MODEL"] != gpu.environ["PAGEMILL_MODEL"]
    (device,) = gpu.raw["deploy"]["resources"]["reservations"]["devices"]
    assert ("nvidia", ["gpu"], ["0"]) == (device["driver"], device["capabilities"], device["device_ids"])
    assert joined["worker-gpu"].environ["PAGEMILL_QUEUE"] == joined["ingress"].environ["PAGEMILL_QUEUE"]
    assert 0 == joined["worker-cpu"].raw["deploy"]["replicas"]


def test_a_second_gpu_is_a_second_service() -> None:
    """
    The example gives each its own device, and Prometheus finds both under one name.
    """
    files = (compose.FILE, ROOT / "deploy" / "compose" / "two-gpus.yml")
    first, second = (compose.load("gpu", files=files)[name] for name in ("worker-gpu", "worker-gpu-1"))

    ids = [one.raw["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for one in (first, second)]
    assert [["0"], ["1"]] == ids
    assert first.environ == second.environ
    assert ["worker-gpu"] == second.raw["networks"]["default"]["aliases"]


def test_what_is_mounted_is_there(services: dict[str, Service]) -> None:
    """
    Files of the repository for reading alone, and where Prometheus and Grafana look for them.
    """
    bound = {
        (mount.target, Path(mount.source)) for one in services.values() for mount in one.mounts if mount.kind == "bind"
    }
    writable = [
        mount for one in services.values() for mount in one.mounts if mount.kind == "bind" and not mount.read_only
    ]

    assert [] == writable
    assert [] == [source for _, source in bound if not source.exists()]
    places = {target: source.relative_to(ROOT).as_posix() for target, source in bound}
    (provider,) = read_yaml(ROOT / "deploy/grafana/provisioning/dashboards/pagemill.yml")["providers"]
    assert "deploy/grafana/dashboards" == places[provider["options"]["path"]]
    assert "deploy/grafana/provisioning" == places["/etc/grafana/provisioning"]
    assert "deploy/prometheus" == places["/etc/prometheus"]
    assert "--config.file=/etc/prometheus/prometheus.yml" in services["prometheus"].command


def test_named_volumes_are_declared_and_used(services: dict[str, Service]) -> None:
    """
    One that is not mounted anywhere is a leftover.
    """
    used = {mount.source for one in services.values() for mount in one.mounts if mount.kind == "volume"}

    assert used == read_yaml(compose.FILE)["volumes"].keys()


def test_an_image_of_ours_owns_the_volumes_that_it_writes(services: dict[str, Service]) -> None:
    """
    A volume takes its owner from the folder of the first image that mounts it, unless that is not to be copied.
    """
    made = " ".join(dockerfile.steps("gateway", "RUN"))
    for name, service in services.items():
        for mount in service.raw.get("volumes", ()):
            if mount["type"] == "volume" and service.target == "gateway":
                assert f" {mount['target']}" in made, (name, mount["target"])
            elif mount["type"] == "volume" and mount["source"] in ("secrets", "s3"):
                assert mount["volume"]["nocopy"], (name, mount["target"])


def test_prometheus_scrapes_services_that_are_there(services: dict[str, Service]) -> None:
    """
    By the names and ports that compose gives them.
    """
    named: set[tuple[str, int]] = set()
    for job in read_yaml(PROMETHEUS / "prometheus.yml")["scrape_configs"]:
        for found in job.get("dns_sd_configs", ()):
            named |= {(name, found["port"]) for name in found["names"]}
        for static in job.get("static_configs", ()):
            pairs = [target.split(":") for target in static["targets"]]
            named |= {(name, int(port)) for name, port in pairs if name != "localhost"}

    assert {("worker-cpu", 9464), ("worker-gpu", 9464), ("exporter", 9464), ("gateway", 8000)} == named
    assert all(port in services[name].ports for name, port in named)
    (source,) = read_yaml(ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml")["datasources"]
    assert source["url"] == f"http://prometheus:{services['prometheus'].ports[0]}"


def test_images_of_others_are_pinned(services: dict[str, Service]) -> None:
    """
    To a version: an update is a change of the file.
    """
    for name, service in services.items():
        tag = service.raw["image"].rpartition(":")[2]
        assert service.target is not None or re.fullmatch(r"v?\d+\.\d+(\.\d+)?(-alpine)?", tag), name


def test_the_nightly_job_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    What the beat names is a bulk job of the same file, with an output for each day in the stack's bucket.
    """
    path = ROOT / "deploy" / "compose" / "pagemill.toml"
    monkeypatch.setenv("PAGEMILL_CONFIG", str(path))
    (entry,) = CelerySettings.load(strict=False).celery_beat
    spec = BulkSpec.build(tomllib.loads(path.read_text())["bulk"][entry.name])

    assert "{date}" in spec.input
    assert "{date}" in spec.output
    assert spec.output.startswith("s3://pagemill/out/")
