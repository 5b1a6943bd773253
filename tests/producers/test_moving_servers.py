"""Producers and exporters at queues whose servers move: a cluster of three nodes, a master behind Sentinel."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from celery import signature

from pagemill.client import Client
from pagemill.ids import uuid7
from producers.child import Child
from producers.local_redis import local_redis
from tests.support.bulk_runs import bulk, output_rows, write_documents
from tests.support.celery_box import CeleryBox, calling, comes_up, up
from tests.support.gateways import running_gateway, write_keys
from tests.support.scrapes import scrape
from tests.support.servers import BlockingConsumer, a_job, wait_for
from tests.support.services import RunningService, worker_process
from tests.support.topologies import Cluster, SentinelTrio
from worker.fake_engine import FakeEngine

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[Cluster, SentinelTrio])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with request.param(tmp_path_factory.mktemp("servers")) as servers:
        yield servers.url


@pytest.fixture
def queue() -> str:
    return f"test-{uuid7()}"


@pytest.fixture
def service(url: str, queue: str) -> Iterator[RunningService]:
    engine = FakeEngine(tokens_per_s=1000, max_model_len=8192)
    with RunningService(url, queue, engine=engine) as service:
        yield service


def exported_port(log: Path) -> int:
    found = wait_for(lambda: re.search(r"http://127\.0\.0\.1:(\d+)/metrics", log.read_text()), 30)
    return int(found.group(1))


@pytest.mark.parametrize("apart", [False, True], ids=["in-the-ingress", "by-itself"])
def test_celery_tasks_are_completed(
    url: str,
    queue: str,
    service: RunningService,  # noqa: ARG001  the queue's worker
    apart: bool,
    tmp_path: Path,
) -> None:
    """
    Also those of another model's queue, which is on another node of a cluster; a batch calls back, a revoke is heard.
    """
    cold = BlockingConsumer(url, f"{queue}-cold")
    cold.run(cold.consumer.register_model(f"{queue}-model"))
    with ExitStack() as stack:
        celery_url = stack.enter_context(local_redis())
        box = CeleryBox(tmp_path, url, queue, celery_url, f"{celery_url[: celery_url.rindex('/')]}/1")
        if apart:
            stack.enter_context(up(box.completer(), "completer.started"))
        ingress = stack.enter_context(box.ingress(PAGEMILL_CELERY_COMPLETER=str(not apart)))
        comes_up(ingress)
        foreign = stack.enter_context(box.foreign_worker())
        comes_up(foreign)
        caller = stack.enter_context(calling(box))
        waiting = stack.enter_context(Client(url, queue=f"{queue}-cold"))
        done = uuid7()
        call = signature("foreign.note", app=caller.app).set(task_id=done)

        answered, revoked = caller.generate("a"), caller.generate("b", model=f"{queue}-model")
        caller.call("submit_batch", items=["one", "two"], callback=call)
        # a revoke goes to those that have the task; it is a job by now
        wait_for(lambda: waiting.stats().queued["standard"] == 1)
        caller.app.control.revoke(revoked)

        assert 8 == len(caller.value(answered)["text"])
        assert 2 == caller.value(done)["noted"]["done"]
        assert "REVOKED" == caller.ends(revoked)[0]
    cold.close()


def test_the_gateway_limits_its_callers(
    url: str,
    queue: str,
    service: RunningService,  # noqa: ARG001  the queue's worker
    tmp_path: Path,
) -> None:
    """
    Their counters are at a server that is found, too, wherever it is.
    """
    keys = write_keys(tmp_path / "keys.toml", two={"requests_per_minute": 2, "tokens_per_day": 10_000})
    body = {"model": "fake", "prompt": "x", "max_tokens": 5}
    headers = {"authorization": f"Bearer {keys['two']}"}
    with running_gateway(url, queue, keys_file=tmp_path / "keys.toml") as gateway:
        wait_for(lambda: httpx.get(f"{gateway.url}/readyz").status_code == 200, 20)
        found = [
            httpx.post(f"{gateway.url}/v1/completions", json=body, headers=headers, timeout=30).status_code
            for _ in range(3)
        ]

    assert [200, 200, 429] == found


def test_workers_and_exporters_show_the_queue(url: str, queue: str, tmp_path: Path) -> None:
    """
    Both read it from its own node.
    """
    place = ("--redis-url", url, "--queue", queue, "--metrics-port", "0")
    exporter = Child([sys.executable, "-m", "worker.exporter", *place], log=tmp_path / "exporter")
    with Client(url, queue=queue) as client, exporter:
        job_id = client.submit(a_job(max_tokens=5)).job_id
        found = scrape(exported_port(tmp_path / "exporter"))
        assert (1, 1) == (found.value("pagemill_source_up"), found.value("pagemill_queue_depth", lane="standard"))
        with worker_process(tmp_path / "log", *place, "--engine", "fake") as worker:
            assert "done" == client.result(job_id, wait_s=60).status
            listening = wait_for(lambda: [one for one in worker.events() if one["event"] == "metrics.listening"])
            found = scrape(listening[0]["port"])
    assert (1, 1) == (found.value("pagemill_source_up"), found.value("pagemill_queue_jobs_total", event="done"))


def test_the_demo_runs(url: str, tmp_path: Path) -> None:
    """
    At a server that is given.
    """
    (tmp_path / "one.txt").write_text("A text to summarise.")
    command = ("--engine", "fake", "--documents", str(tmp_path), "--redis-url", url)
    done = subprocess.run(
        [sys.executable, "-m", "producers.demo", *command], cwd=tmp_path, capture_output=True, text=True
    )

    assert 0 == done.returncode, done.stderr
    assert "1 of 1 summaries" in done.stdout


def test_bulk_runs(url: str, queue: str, service: RunningService, tmp_path: Path) -> None:  # noqa: ARG001
    """
    From its plan to its manifest.
    """
    documents = write_documents(tmp_path / "documents.jsonl", 30)
    output = (tmp_path / "out").as_uri()
    place = ("--redis-url", url, "--queue", queue)
    flags = ("--input", documents.as_uri(), "--output", output, "--template", "summarise", "--max-tokens", "5")

    done = bulk("run", *place, *flags)

    assert 0 == done.returncode, done.stderr
    assert [f"doc-{number}" for number in range(30)] == [row.custom_id for row in output_rows(output)]
