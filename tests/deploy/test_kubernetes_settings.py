"""What deploy/k8s tells the programs: settings that they have, and times that fit theirs."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis
from typer.main import get_command

from pagemill.cli import app as command_line
from pagemill.settings import ClientSettings
from producers.gateway import health
from producers.gateway.settings import GatewaySettings
from producers.tasks.settings import CelerySettings, load_settings
from tests.support.manifests import OVERLAYS, Container, Manifests, everything, overlay, quantity
from worker.drain import LAST_STEP_S
from worker.models import models_root
from worker.returns import FLUSH_S
from worker.scrape import queue_reader, routes
from worker.settings import MetricsSettings, WorkerSettings
from worker.supervisor import REPORT_S

# what a process takes to import its code and to come to its first answer, generously
START_S = 30.0
# how long the gateway waits for what it does beside requests, and then for the process of its batches
GATEWAY_END_S = 5.0 + 10.0


def worker_settings() -> WorkerSettings:
    return WorkerSettings.read([])


def exporter_settings() -> MetricsSettings:
    return MetricsSettings.read([], also=[WorkerSettings])


def gateway_settings() -> GatewaySettings:
    ClientSettings.load(strict=False)
    return GatewaySettings.load()


READERS: dict[str, Callable[[], WorkerSettings | MetricsSettings | GatewaySettings | CelerySettings]] = {
    "pagemill-worker": worker_settings,
    "pagemill-exporter": exporter_settings,
    "pagemill-gateway": gateway_settings,
    "pagemill-ingress": load_settings,
}


@pytest.fixture(autouse=True)
def _nothing_but_the_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("PAGEMILL_CONFIG", "CELERY_BROKER_URL", "CELERY_RESULT_BACKEND"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=[*OVERLAYS, "everything"])
def manifests(request: pytest.FixtureRequest) -> Manifests:
    return overlay(request.param) if request.param in OVERLAYS else everything()


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> Callable[[Container], None]:
    """Puts a container's environment in place of ours."""

    def enter(container: Container) -> None:
        for name, value in container.environment.items():
            if name != "HOME":
                monkeypatch.setenv(name, value)

    return enter


def seconds(manifests: Manifests, owner: str) -> float:
    return float(manifests.container(owner).pod["terminationGracePeriodSeconds"])


def test_programs_take_the_settings_of_their_pods(manifests: Manifests, entered: Callable[[Container], None]) -> None:
    """
    Each is a setting with a value that it may have, and reaches the program: names are read as strictly as at a start.
    """
    for container in manifests.containers(init=False):
        if container.owner in READERS:
            entered(container)
            settings = READERS[container.owner]()
            if isinstance(settings, MetricsSettings | ClientSettings):
                assert container.environment["PAGEMILL_QUEUE"] == settings.queue
                assert container.environment["PAGEMILL_REDIS_URL"] == settings.redis_url


def test_a_name_of_no_setting_is_refused_by_some_program(
    entered: Callable[[Container], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    So the test above finds one that was renamed or misspelt.
    """
    for owner, name in (("pagemill-worker", "PAGEMILL_DRAIN"), ("pagemill-gateway", "PAGEMILL_GATEWAY_GRACE")):
        entered(overlay("gpu").container(owner))
        monkeypatch.setenv(name, "1")
        with pytest.raises(Exception, match="unknown setting"):
            READERS[owner]()
        monkeypatch.delenv(name)


def test_programs_are_started_by_commands_that_there_are(manifests: Manifests) -> None:
    """
    Of the command line, or modules.
    """
    commands = get_command(command_line).commands.keys()  # type: ignore[attr-defined]
    for container in manifests.containers():
        match container.spec["command"]:
            case ["pagemill", verb, *rest]:
                assert verb in commands
                assert [] == rest or ["pull", "$(PAGEMILL_MODEL)"] == rest
            case ["python", "-m", module]:
                assert importlib.util.find_spec(module) is not None
            case ["celery", "-A", module, "worker", "-Q", "pagemill.ingress", *rest]:
                assert importlib.util.find_spec(module) is not None
                # as many processes as its share of the node bears
                assert "--concurrency=2" in rest
            case ["valkey-server"]:
                assert "noeviction" in container.spec["args"]
            case other:
                raise AssertionError(f"{container.name} is started by {other}")


def test_probes_ask_what_is_answered(manifests: Manifests, entered: Callable[[Container], None]) -> None:
    """
    Paths that the program has, on the port that its settings name and all addresses.
    """
    for container in manifests.containers(init=False):
        if container.owner not in ("pagemill-worker", "pagemill-exporter", "pagemill-gateway"):
            continue
        entered(container)
        settings = READERS[container.owner]()
        if isinstance(settings, GatewaySettings):
            place, paths = (settings.host, settings.port), {route.path for route in health.router.routes}  # type: ignore[attr-defined]
        else:
            assert isinstance(settings, MetricsSettings)
            reader = queue_reader(settings, Redis())
            known = routes(settings, CollectorRegistry(), reader, healthy=lambda: True, ready=lambda: True)
            place, paths = (settings.metrics_host, settings.metrics_port), set(known)
        assert ("0.0.0.0", *container.ports.values()) == place
        for kind in ("startup", "liveness", "readiness"):
            if f"{kind}Probe" in container.spec:
                asked = container.probe(kind)["httpGet"]
                assert asked["path"] in paths
                assert asked["port"] in container.ports


def test_folders_of_settings_are_mounted(manifests: Manifests, entered: Callable[[Container], None]) -> None:
    """
    The root is read-only: models and kernels are kept where a volume is, keys are read where the secret is.
    """
    for container in manifests.containers():
        mounts = [mount["mountPath"] for mount in container.spec.get("volumeMounts", ())]
        if container.owner == "pagemill-worker":
            entered(container)
            folder = str(models_root())
            assert any(folder.startswith(f"{mount}/") for mount in mounts)
            for name in ("TRITON_CACHE_DIR", "HF_HOME"):
                assert any(container.environment[name].startswith(f"{mount}/") for mount in mounts)
        if container.owner == "pagemill-gateway":
            entered(container)
            assert str(gateway_settings().keys_file.parent) in mounts  # type: ignore[union-attr]
        if "HOME" in container.environment:
            assert container.environment["HOME"] in mounts


def test_a_pod_is_given_time_to_drain(manifests: Manifests, entered: Callable[[Container], None]) -> None:
    """
    Kubernetes kills it later than it would have ended by itself: running jobs had their time, went back, results
    are written, and the supervisor has told the queue.
    """
    entered(manifests.container("pagemill-worker"))
    worker = worker_settings()
    entered(manifests.container("pagemill-gateway"))
    gateway = gateway_settings()
    pause_s = manifests.container("pagemill-gateway").spec["lifecycle"]["preStop"]["sleep"]["seconds"]

    # unstarted jobs are asked for, checkpoints are written, running jobs go back, results are written
    drain_s = worker.drain_s + LAST_STEP_S + 4 * FLUSH_S + REPORT_S
    assert drain_s < seconds(manifests, "pagemill-worker")
    assert pause_s + gateway.grace_s + GATEWAY_END_S < seconds(manifests, "pagemill-gateway")


def test_a_worker_that_starts_again_in_its_container_is_not_killed(
    manifests: Manifests, entered: Callable[[Container], None]
) -> None:
    """
    The supervisor pauses between two starts, and nobody answers meanwhile: the pod's probe waits for longer.
    """
    container = manifests.container("pagemill-worker")
    entered(container)

    assert worker_settings().max_restart_s + START_S < container.patience_s("liveness")


def test_a_worker_may_load_its_model(manifests: Manifests) -> None:
    """
    It is healthy and not ready meanwhile; the rollout does not give up before the probe does.
    """
    container = manifests.container("pagemill-worker")

    assert "/readyz" == container.probe("startup")["httpGet"]["path"]
    deployment = manifests.one("Deployment", "pagemill-worker")
    assert container.patience_s("startup") < deployment["spec"]["progressDeadlineSeconds"]


def test_threads_of_a_cpu_worker_are_the_cores_that_it_asks_for(entered: Callable[[Container], None]) -> None:
    """
    More would wait for each other; the default is all that the node has.
    """
    for name in ("cpu", "try"):
        container = overlay(name).container("pagemill-worker")
        entered(container)
        settings = worker_settings()
        assert ("cpu", quantity(container.spec["resources"]["requests"]["cpu"])) == (
            settings.device,
            settings.num_threads,
        )


def test_the_device_is_that_of_the_image(entered: Callable[[Container], None]) -> None:
    """
    A GPU worker that finds none ends with a message, and does not compute on its CPU.
    """
    entered(overlay("gpu").container("pagemill-worker"))

    assert "cuda" == worker_settings().device


def test_no_worker_goes_before_it_could_have_loaded(entered: Callable[[Container], None]) -> None:
    """
    Scaling down waits for as long as a start may take, the last worker too; limits are those of the exporter.
    """
    built = overlay("gpu")
    scaled = built.one("ScaledObject", "pagemill-worker")["spec"]
    behavior = scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    load_s = built.container("pagemill-worker").patience_s("startup")
    entered(built.container("pagemill-exporter"))
    settings = exporter_settings()

    assert load_s <= scaled["cooldownPeriod"]
    assert load_s <= behavior["scaleDown"]["stabilizationWindowSeconds"]
    # the first start pulls the model too
    assert 2 * load_s <= scaled["initialCooldownPeriod"]
    assert (settings.autoscale_min_workers, settings.autoscale_max_workers) == (
        scaled["minReplicaCount"],
        scaled["maxReplicaCount"],
    )
