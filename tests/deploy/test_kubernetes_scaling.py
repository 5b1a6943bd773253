"""What KEDA would do with what a real exporter says."""

import re
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pagemill.client import Client
from producers.child import Child
from tests.support.gateways import running_gateway
from tests.support.manifests import Manifests, compose, everything, overlay
from tests.support.redis_process import RedisProcess
from tests.support.scrapes import get_json
from tests.support.servers import a_job, wait_for


def trigger() -> dict[str, Any]:
    (found,) = overlay("gpu").one("ScaledObject", "pagemill-worker")["spec"]["triggers"]
    assert ("metrics-api", "AverageValue") == (found["type"], found["metricType"])
    return dict(found["metadata"])


def number_at(answer: Any, location: str) -> float:
    """As KEDA reads `valueLocation`: names with dots between, down to a number."""
    for name in location.split("."):
        answer = answer[name]
    assert isinstance(answer, int | float), f"{location} is {answer!r}: KEDA wants a number"
    return float(answer)


def replicas(answer: Any) -> int:
    """How many pods an average of `targetValue` each comes to; none where it is not above the activation's value."""
    asked = trigger()
    value = number_at(answer, asked["valueLocation"])
    if value <= float(asked["activationTargetValue"]):
        return 0
    return int(-(-value // float(asked["targetValue"])))


def test_a_queue_wants_no_worker_then_many_then_what_there_are(tmp_path: Path) -> None:
    """
    None while nothing waits, so many as empty the backlog in time when jobs come, with the reason; and no answer where
    the queue cannot be read, at which KEDA leaves the pods that are there.
    """
    path = urlsplit(trigger()["url"]).path
    log = tmp_path / "log"
    with RedisProcess(tmp_path / "redis") as server, Client(server.url) as client:
        flags = ["--redis-url", server.url, "--metrics-port", "0", "--autoscale-tokens-per-s", "10"]
        with Child([sys.executable, "-m", "worker.exporter", *flags], log=log):
            address = wait_for(lambda: re.search(r"http://127\.0\.0\.1:(\d+)/metrics", log.read_text()))
            port = int(address.group(1))
            idle = get_json(port, path)
            client.submit_many([a_job(f"{number}", max_tokens=1000) for number in range(9)])
            busy = wait_for(lambda: (found := get_json(port, path))[1]["desired_workers"] and found)
            server.kill()
            away = wait_for(lambda: (found := get_json(port, path))[0] == 503 and found)

    assert (200, 0, "nothing to do") == (idle[0], replicas(idle[1]), idle[1]["reason"])
    # some 9,000 tokens within 300 s at 10 tokens/s
    assert (200, 4) == (busy[0], replicas(busy[1]))
    assert "tokens wait, to be done within 300 s at 10 tokens/s a worker" in busy[1]["reason"]
    assert (503, False) == (away[0], away[1]["source_up"])


def test_keda_finds_the_exporter_from_its_own_namespace(tmp_path: Path) -> None:
    """
    Its address has the Service's name, namespace and port; an overlay with another namespace says so.
    """
    gpu = overlay("gpu")
    service = gpu.one("Service", "pagemill-exporter")
    name, namespace = (service["metadata"][field] for field in ("name", "namespace"))
    (port,) = (one["port"] for one in service["spec"]["ports"])

    assert f"http://{name}.{namespace}.svc:{port}/autoscale" == trigger()["url"]
    replacements = [
        {
            "source": {"kind": "Service", "name": "pagemill-exporter", "fieldPath": "metadata.namespace"},
            "targets": [
                {
                    "select": {"kind": "ScaledObject", "name": "pagemill-worker"},
                    "fieldPaths": ["spec.triggers.0.metadata.url"],
                    "options": {"delimiter": ".", "index": 1},
                }
            ],
        }
    ]
    elsewhere = compose(tmp_path, ["cpu", "keda"], namespace="elsewhere", replacements=replacements)
    (found,) = elsewhere.one("ScaledObject", "pagemill-worker")["spec"]["triggers"]
    assert "http://pagemill-exporter.elsewhere.svc:9464/autoscale" == found["metadata"]["url"]


def test_the_number_of_workers_is_kedas_alone() -> None:
    """
    An `apply` does not set it back; without KEDA it is set.
    """
    built = overlay("gpu")
    target = built.one("ScaledObject", "pagemill-worker")["spec"]["scaleTargetRef"]["name"]

    assert "replicas" not in built.one("Deployment", target)["spec"]
    assert 1 == overlay("cpu").one("Deployment", target)["spec"]["replicas"]


def test_nobody_is_called_for_the_first_worker_that_loads() -> None:
    """
    Scaled to none, a queue has jobs and no worker for as long as one takes to start: the alert waits for longer. All
    others are as they are.
    """
    built = overlay("gpu")
    found = {rule["alert"]: rule for rule in rules_of(built) if "alert" in rule}
    plain = {rule["alert"]: rule for rule in rules_of(everything()) if "alert" in rule}
    load_s = built.container("pagemill-worker").patience_s("startup")

    assert {"PagemillNoWorkers"} == {name for name, rule in found.items() if rule != plain[name]}
    minutes = re.fullmatch(r"(\d+)m", found["PagemillNoWorkers"]["for"])
    assert minutes is not None
    assert load_s < 60 * int(minutes.group(1))


def rules_of(manifests: Manifests) -> list[dict[str, Any]]:
    groups = manifests.one("PrometheusRule", "pagemill")["spec"]["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_a_gateway_takes_requests_while_there_is_no_worker(server_url: str, queue: str) -> None:
    """
    Its pod stays ready: what comes in is what has the workers started. /readyz would take it out of its Service.
    """
    path = overlay("gpu").container("pagemill-gateway").probe("readiness")["httpGet"]["path"]
    with running_gateway(server_url, queue) as gateway:
        assert 200 == status(gateway.url + path)
        assert 503 == status(f"{gateway.url}/readyz")


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
