"""What kustomize makes of deploy/k8s, read."""

import base64
import math
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import server_box
from tests.support.deploy import ROOT

K8S = ROOT / "deploy" / "k8s"
OVERLAYS = tuple(sorted(path.parent.name for path in K8S.glob("overlays/*/kustomization.yaml")))
COMPONENTS = tuple(sorted(path.parent.name for path in K8S.glob("components/*/kustomization.yaml")))
EXAMPLE = K8S / "secrets.example.yaml"

Object = dict[str, Any]

_UNITS = {"": 1, "Ki": 1024, "Mi": 1024**2, "Gi": 1024**3, "m": 1e-3}


def build(folder: Path) -> "Manifests":
    """
    What `kubectl apply --kustomize` would send.
    """
    kubectl = server_box.find("kubectl")
    if kubectl is None:
        pytest.skip("there is no kubectl here: `python -m tests.support.server_box` fetches it where pip can")
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, timeout=60, check=False)
    assert (0, "") == (done.returncode, done.stderr)
    return Manifests(tuple(yaml.load_all(done.stdout, yaml.CSafeLoader)))


@cache
def overlay(name: str) -> "Manifests":
    return build(K8S / "overlays" / name)


def compose(folder: Path, components: Sequence[str], *, namespace: str = "pagemill", **fields: Any) -> "Manifests":
    """An overlay of somebody's own, in a folder: the base, and components of it."""
    here = os.path.relpath(K8S, folder)
    text = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": namespace,
        "resources": [f"{here}/base"],
        "components": [f"{here}/components/{name}" for name in components],
        **fields,
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(text))
    return build(folder)


@cache
def everything() -> "Manifests":
    """All components but one of the two that exclude each other, in a namespace that no overlay has."""
    with tempfile.TemporaryDirectory() as folder:
        return compose(Path(folder), [name for name in COMPONENTS if name != "cpu"], namespace="elsewhere")


@cache
def example_secrets() -> dict[str, dict[str, str]]:
    """Keys and values of the secrets that the operator fills in, by name."""
    return {one["metadata"]["name"]: one["stringData"] for one in yaml.safe_load_all(EXAMPLE.read_text())}


@dataclass(frozen=True)
class Container:
    """One of a pod, with its pod's spec."""

    owner: str
    pod: Object
    spec: Object
    environment: Mapping[str, str]

    @property
    def name(self) -> str:
        return f"{self.owner}/{self.spec['name']}"

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.spec.get("ports", ())}

    def probe(self, kind: str) -> Object:
        found: Object = self.spec[f"{kind}Probe"]
        return found

    def patience_s(self, kind: str) -> int:
        """For how long a probe may fail before something is done."""
        probe = self.probe(kind)
        return int(probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3))


class Manifests:
    """The objects of one build."""

    def __init__(self, objects: Sequence[Object]) -> None:
        self.objects = objects

    def of(self, *kinds: str) -> list[Object]:
        return [one for one in self.objects if one["kind"] in kinds]

    def one(self, kind: str, name: str) -> Object:
        (found,) = (one for one in self.of(kind) if one["metadata"]["name"] == name)
        return found

    @property
    def workloads(self) -> list[Object]:
        return self.of("Deployment", "StatefulSet")

    def containers(self, *, init: bool = True) -> Iterator[Container]:
        for workload in self.workloads:
            pod = workload["spec"]["template"]["spec"]
            for spec in (*(pod.get("initContainers", ()) if init else ()), *pod["containers"]):
                yield Container(workload["metadata"]["name"], pod, spec, self._environment(spec))

    def container(self, owner: str) -> Container:
        """The only one that goes on running."""
        (found,) = (one for one in self.containers(init=False) if one.owner == owner)
        return found

    def _environment(self, spec: Object) -> dict[str, str]:
        """As the container finds it, with the example's secrets where the build has none."""
        found: dict[str, str] = {}
        for source in spec.get("envFrom", ()):
            if "configMapRef" in source:
                found |= self.one("ConfigMap", source["configMapRef"]["name"])["data"]
            else:
                found |= self._secret(source["secretRef"]["name"])
        return found | {one["name"]: _value(one, spec) for one in spec.get("env", ())}

    def _secret(self, name: str) -> Mapping[str, str]:
        for one in self.of("Secret"):
            if one["metadata"]["name"] == name:
                return {key: base64.b64decode(value).decode() for key, value in one["data"].items()}
        return example_secrets()[name]

    def chosen(self, selector: Mapping[str, Any]) -> list[Object]:
        """Workloads whose pods a selector of labels finds."""
        return [one for one in self.workloads if _matches(selector, one["spec"]["template"]["metadata"]["labels"])]


def _value(variable: Object, spec: Object) -> str:
    if "value" in variable:
        return str(variable["value"])
    # of the resources a container may be told its own; whole ones, rounded up
    kind, _, resource = variable["valueFrom"]["resourceFieldRef"]["resource"].partition(".")
    return str(math.ceil(quantity(spec["resources"][kind][resource])))


def _matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    expressions = selector.get("matchExpressions", ())
    assert {"In"} >= {one["operator"] for one in expressions}
    return wanted and all(labels.get(one["key"]) in one["values"] for one in expressions)


def quantity(text: str | float) -> float:
    """A quantity of Kubernetes as a number."""
    found = re.fullmatch(r"([0-9.]+)(Ki|Mi|Gi|m|)", str(text))
    assert found is not None, text
    return float(found.group(1)) * _UNITS[found.group(2)]
