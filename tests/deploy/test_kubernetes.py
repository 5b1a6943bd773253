"""What deploy/k8s says: objects that Kubernetes takes, that fit together, in pods that may do little."""

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from cloudcoil.models.keda.v1alpha1 import ScaledObject
from cloudcoil.models.prometheus_operator.v1 import PodMonitor, PrometheusRule, ServiceMonitor

from tests.support.deploy import GRAFANA, PROMETHEUS, ROOT, read_yaml
from tests.support.manifests import (
    COMPONENTS,
    K8S,
    OVERLAYS,
    Manifests,
    compose,
    everything,
    example_secrets,
    overlay,
    quantity,
)

# the oldest that knows all that is used, and the newest
VERSIONS = ("1.30", "1.37")
CUSTOM = {"ScaledObject": ScaledObject, "PodMonitor": PodMonitor, "ServiceMonitor": ServiceMonitor}
IMAGES = {"pagemill/gateway", "pagemill/worker-cpu", "pagemill/worker-gpu"}


@pytest.fixture(params=[*OVERLAYS, "everything"])
def manifests(request: pytest.FixtureRequest) -> Manifests:
    """Each overlay, and one with all components."""
    return overlay(request.param) if request.param in OVERLAYS else everything()


def faults(obj: dict[str, Any]) -> list[str]:
    """What is wrong with an object by its schema; a field that the schema does not have is."""
    if "." not in obj["apiVersion"] or ".k8s.io" in obj["apiVersion"] or obj["kind"] == "PodDisruptionBudget":
        return [fault for version in VERSIONS for fault in _faults_of_builtin(obj, version)]
    model = {**CUSTOM, "PrometheusRule": PrometheusRule}[obj["kind"]]
    try:
        known = model.model_validate(obj).model_dump(mode="json", by_alias=True, exclude_unset=True)
    except ValueError as error:
        return [str(error)]
    return sorted(_paths(obj) - _paths(known))


def _faults_of_builtin(obj: dict[str, Any], version: str) -> list[str]:
    try:
        kubernetes_validate.validate(obj, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{'.'.join(map(str, error.path))}: {error.message} ({version})"]
    return []


def _paths(value: Any, at: str = "") -> set[str]:
    if isinstance(value, dict):
        return {at}.union(*(_paths(one, f"{at}.{key}") for key, one in value.items()))
    if isinstance(value, list):
        return {at}.union(*(_paths(one, f"{at}.{number}") for number, one in enumerate(value)))
    return {at}


def test_each_object_is_what_its_schema_says(manifests: Manifests) -> None:
    """
    All fields exist and have the right type: Kubernetes's own in an old and in a new version, KEDA's, and those of
    the Prometheus operator.
    """
    wrong = {f"{one['kind']} {one['metadata']['name']}": said for one in manifests.objects if (said := faults(one))}

    assert {} == wrong


@pytest.mark.parametrize(
    ("kind", "name", "path"),
    [
        ("Deployment", "pagemill-worker", "spec.template.spec.terminationGracePeriodSecond"),
        ("Deployment", "pagemill-gateway", "spec.template.spec.securityContext.runAsNonroot"),
        ("PodDisruptionBudget", "pagemill-gateway", "spec.maxUnavailables"),
        ("NetworkPolicy", "pagemill-gateway", "spec.ingres"),
        ("ScaledObject", "pagemill-worker", "spec.minReplicas"),
        ("ScaledObject", "pagemill-worker", "spec.advanced.horizontalPodAutoscalerConfig.behavior.scaledown"),
        ("PodMonitor", "pagemill-worker", "spec.podMetricsEndpoint"),
        ("PrometheusRule", "pagemill", "spec.group"),
    ],
)
def test_a_misspelt_field_is_found(kind: str, name: str, path: str) -> None:
    """
    The schemas are strict: the API server would drop such a field, and nobody would hear of it.
    """
    spoilt = copy.deepcopy(overlay("gpu").one(kind, name))
    *parents, field = path.split(".")
    place = spoilt
    for parent in parents:
        place = place[parent]
    place[field] = {}

    assert [] != faults(spoilt)


def test_selectors_find_pods_and_ports_are_there(manifests: Manifests) -> None:
    """
    Each Deployment its own pods; Services, budgets, policies and monitors those that they are named after.
    """
    for workload in manifests.workloads:
        assert [workload] == manifests.chosen(workload["spec"]["selector"])
    for service in manifests.of("Service"):
        (target,) = manifests.chosen({"matchLabels": service["spec"]["selector"]})
        assert service["metadata"]["name"] == target["metadata"]["name"]
        wanted = {port["targetPort"] for port in service["spec"]["ports"]}
        assert wanted <= manifests.container(target["metadata"]["name"]).ports.keys()
    for budget in manifests.of("PodDisruptionBudget"):
        (target,) = manifests.chosen(budget["spec"]["selector"])
        assert target["metadata"]["name"] == budget["metadata"]["name"]
    for policy in manifests.of("NetworkPolicy"):
        found = manifests.chosen(policy["spec"]["podSelector"])
        assert found, policy["metadata"]["name"]
        wanted = {port["port"] for rule in policy["spec"].get("ingress", ()) for port in rule["ports"]}
        for target in found:
            assert wanted <= manifests.container(target["metadata"]["name"]).ports.keys()


def test_what_pods_name_is_there(manifests: Manifests) -> None:
    """
    Settings and claims come with the build; secrets too, or the operator fills them in, as the example shows.
    """
    names = {kind: {one["metadata"]["name"] for one in manifests.of(kind)} for kind in ("ConfigMap", "Secret")}
    claims = {one["metadata"]["name"] for one in manifests.of("PersistentVolumeClaim")}
    for container in manifests.containers():
        for source in container.spec.get("envFrom", ()):
            if "configMapRef" in source:
                assert source["configMapRef"]["name"] in names["ConfigMap"]
            else:
                assert source["secretRef"]["name"] in names["Secret"] | example_secrets().keys()
        volumes = {volume["name"]: volume for volume in container.pod.get("volumes", ())}
        templates = {"data"} if container.owner == "pagemill-redis" else set()
        mounted = {mount["name"] for mount in container.spec.get("volumeMounts", ())}
        assert mounted <= volumes.keys() | templates, container.name
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims
            elif "secret" in volume:
                assert volume["secret"]["secretName"] in example_secrets()
            else:
                assert "sizeLimit" in volume["emptyDir"]


def test_secrets_of_the_example_are_asked_for_and_sent_by_nobody(tmp_path: Path) -> None:
    """
    A pod wants each of them; no kustomization names the file, so that nothing is applied that was not filled in.
    """
    with_celery = compose(tmp_path, ["gpu", "celery"])
    text = json.dumps(with_celery.objects)

    assert {} == {name: 0 for name in example_secrets() if f'"{name}"' not in text}
    assert [] == [path for path in K8S.rglob("kustomization.yaml") if "secrets.example" in path.read_text()]


def test_all_is_in_one_namespace(manifests: Manifests) -> None:
    """
    The overlay's, which only lets pods in that are as restricted as ours.
    """
    (namespace,) = manifests.of("Namespace")

    assert "restricted" == namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    places = {one["metadata"].get("namespace") for one in manifests.objects if one is not namespace}
    assert {namespace["metadata"]["name"]} == places


@pytest.mark.parametrize("name", OVERLAYS)
def test_images_are_ours_and_have_a_version(name: str) -> None:
    """
    The overlay sets the tags, and not to one that moves.
    """
    images = {container.owner: container.spec["image"] for container in overlay(name).containers()}
    images.pop("pagemill-redis", None)

    assert IMAGES >= {image.partition(":")[0] for image in images.values()}
    assert [] == [image for image in images.values() if not re.search(r":\d+\.\d+\.\d+$", image)]


def test_images_are_targets_of_the_dockerfile() -> None:
    """
    Which runs them as the user that pods name, so that files of the image are readable and those of volumes writable.
    """
    dockerfile = ROOT / "Dockerfile"
    if not dockerfile.exists():
        pytest.skip("there is no Dockerfile here")
    text = dockerfile.read_text()

    assert set() == {image.partition("/")[2] for image in IMAGES} - set(re.findall(r"(?i)\bas (\S+)$", text, re.M))
    (user,) = {int(user) for user in re.findall(r"^USER (\d+)", text, re.M)}
    pods = [one for one in overlay("gpu").containers() if one.owner != "pagemill-redis"]
    assert {user} == {container.pod["securityContext"]["runAsUser"] for container in pods}


def test_pods_may_do_little(manifests: Manifests) -> None:
    """
    No root, no rights, nothing to write to but what is mounted, no token of the API.

    Without `enableServiceLinks: false` Kubernetes sets PAGEMILL_GATEWAY_PORT to the address of a Service.
    """
    for container in manifests.containers():
        pod, spec = container.pod, container.spec
        assert (False, False) == (pod["automountServiceAccountToken"], pod["enableServiceLinks"]), container.name
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert {"type": "RuntimeDefault"} == pod["securityContext"]["seccompProfile"]
        expected = {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert expected == spec["securityContext"]
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert not any("hostPath" in volume for volume in pod.get("volumes", ()))


def test_pods_say_what_they_need(manifests: Manifests) -> None:
    """
    Requests for the scheduler, and a limit of memory that is not below them.
    """
    for container in manifests.containers():
        resources = container.spec["resources"]
        assert {"cpu", "memory"} <= resources["requests"].keys(), container.name
        assert quantity(resources["requests"]["memory"]) <= quantity(resources["limits"]["memory"])


def test_each_container_is_looked_at() -> None:
    """
    One that hangs is started again, and one that is not there yet gets no work and holds a rollout up.
    """
    for container in everything().containers(init=False):
        assert "livenessProbe" in container.spec, container.name
        assert {"startupProbe", "readinessProbe"} & container.spec.keys(), container.name


def test_a_gpu_worker_has_one_gpu_and_others_have_none() -> None:
    """
    On nodes that are kept for those; its shared memory fits what it may use.
    """
    worker = overlay("gpu").container("pagemill-worker")

    assert "pagemill/worker-gpu" == worker.spec["image"].partition(":")[0]
    assert 1 == worker.spec["resources"]["limits"]["nvidia.com/gpu"]
    assert ["nvidia.com/gpu"] == [one["key"] for one in worker.pod["tolerations"]]
    (shm,) = (volume["emptyDir"] for volume in worker.pod["volumes"] if volume["name"] == "shm")
    assert "Memory" == shm["medium"]
    assert quantity(shm["sizeLimit"]) < quantity(worker.spec["resources"]["limits"]["memory"])
    for name in OVERLAYS:
        for container in overlay(name).containers():
            has_gpu = "nvidia.com/gpu" in container.spec["resources"]["limits"]
            assert has_gpu == (
                container.spec["image"].startswith("pagemill/worker-gpu") and container.name[-5:] != "model"
            )


def test_the_operator_gets_the_alerts_and_dashboards_of_prometheus_and_grafana() -> None:
    """
    The same, made from them: there is one copy to change.
    """
    done = subprocess.run(
        [sys.executable, str(K8S / "make_rules.py"), "--check"], capture_output=True, text=True, check=False
    )
    built = everything()

    assert (0, "", "") == (done.returncode, done.stdout.strip(), done.stderr)
    assert read_yaml(PROMETHEUS / "rules" / "pagemill.yml") == built.one("PrometheusRule", "pagemill")["spec"]
    shown = {
        file: text
        for one in built.of("ConfigMap")
        if one["metadata"].get("labels", {}).get("grafana_dashboard") == "1"
        for file, text in one["data"].items()
    }
    assert {path.name: path.read_text() for path in (GRAFANA / "dashboards").glob("*.json")} == shown


def test_jobs_of_the_operator_are_those_of_prometheus() -> None:
    """
    Alerts and dashboards ask for them by name; each is a label of what is scraped, on a port that it has.
    """
    built = overlay("gpu")
    jobs = set()
    for monitor in built.of("PodMonitor", "ServiceMonitor"):
        spec = monitor["spec"]
        sources = built.of("Service") if monitor["kind"] == "ServiceMonitor" else built.chosen(spec["selector"])
        (source,) = (
            one for one in sources if spec["selector"]["matchLabels"].items() <= one["metadata"]["labels"].items()
        )
        jobs.add(source["metadata"]["labels"][spec["jobLabel"]])
        (endpoint,) = spec.get("endpoints") or spec["podMetricsEndpoints"]
        ports = source["spec"].get("ports") or built.container(source["metadata"]["name"]).spec["ports"]
        assert endpoint["port"] in {port["name"] for port in ports}
    scraped = {job["job_name"] for job in read_yaml(PROMETHEUS / "prometheus.yml")["scrape_configs"]}

    assert {name for name in scraped if name.startswith("pagemill")} == jobs


def test_the_page_names_what_is_there() -> None:
    """
    docs/kubernetes.md has each overlay and component, and no others.
    """
    text = (ROOT / "docs" / "kubernetes.md").read_text()

    assert set(OVERLAYS) == set(re.findall(r"overlays/(\w+)", text))
    assert set(COMPONENTS) == set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert [] == [name for name in example_secrets() if f"`{name}`" not in text]
