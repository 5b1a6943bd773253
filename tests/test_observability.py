"""A job's way from whoever sends it to its worker, as a collector of traces and the logs see it: real programs."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis

from pagemill.client import Client
from pagemill.keys import QueueKeys
from pagemill.logs import MAX_LINES, WINDOW_S
from producers.child import Child
from producers.local_redis import local_redis
from producers.tasks.ids import job_id_of
from tests.support.celery_box import Caller, CeleryBox, calling, comes_up
from tests.support.collector import Collector, Seen, collecting
from tests.support.servers import a_job, wait_for
from tests.support.services import CHECKOUT, WorkerProcess, worker_process

QUEUE = "traced"

CLI = ("-c", "from pagemill.cli import main; main()")

# stands in each prompt, and so in no span and no log
SECRET = "the patient is ill"

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


@dataclass(frozen=True)
class Stage:
    """All that runs, and where their logs are."""

    collector: Collector
    url: str
    box: CeleryBox
    worker: WorkerProcess
    gateway_url: str
    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        """Of a program that takes part."""
        return clean_environ() | self.collector.environ | {"PAGEMILL_REDIS_URL": self.url, "PAGEMILL_QUEUE": QUEUE}

    def run(self, *command: str, **environ: str) -> str:
        """Run a program of ours to its end; what it printed."""
        done = subprocess.run(
            [sys.executable, *command],
            cwd=CHECKOUT,
            env=self.environ | environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert 0 == done.returncode, done.stderr
        return done.stdout

    def events(self, program: str) -> list[dict[str, Any]]:
        # Celery greets on standard output
        return [json.loads(line) for line in self.lines(program) if line.startswith("{")]

    def lines(self, program: str) -> list[str]:
        """What it has printed so far; of a line that is being written there may be a part, which is none."""
        whole, _, _ = (self.folder / f"{program}.log").read_bytes().rpartition(b"\n")
        return whole.decode().split("\n")


def clean_environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PAGEMILL_", "OTEL_"))}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("traced")
    with collecting() as collector, local_redis() as url:
        base = url[: url.rindex("/")]
        box = CeleryBox(folder, url, QUEUE, f"{base}/1", f"{base}/2")
        place = ("--redis-url", url, "--queue", QUEUE)
        gateway = Child(
            [sys.executable, "-m", "producers.gateway", *place, "--no-auth", "--port", "0"],
            log=folder / "gateway.log",
            environ=clean_environ() | collector.environ,
        )
        flags = (*place, "--engine", "fake", "--fake-tokens-per-s", "2000", "--log-level", "debug", "--log-limit", "0")
        with (
            box.ingress(**collector.environ) as ingress,
            gateway,
            worker_process(folder / "worker.log", *flags, environment=collector.environ) as worker,
        ):
            comes_up(ingress)
            comes_up(gateway, "gateway.listening")
            stage = Stage(collector, url, box, worker, "", folder)
            (address,) = (one["url"] for one in stage.events("gateway") if one["event"] == "gateway.listening")
            yield Stage(collector, url, box, worker, address, folder)


@pytest.fixture(scope="module")
def caller(stage: Stage) -> Iterator[Caller]:
    with calling(stage.box) as caller:
        yield caller


def linked(stage: Stage, job_id: str, sent: Seen) -> Seen:
    """The worker's span of a job, which is linked to a producer's and stands in a trace of its own."""
    (span,) = stage.collector.of_job(job_id)
    assert [sent.place] == span.links
    assert span.trace_id != sent.trace_id
    assert ("pagemill-worker", "process traced", "") == (span.service, span.name, span.parent_id)
    return span


def test_a_command_line_and_its_worker(stage: Stage) -> None:
    """
    The worker's span is linked to the producer's, says what was asked for and what came of it, and has a span for
    each part of the job's way.
    """
    said = stage.run(*CLI, "submit", SECRET, "--max-tokens", "40", "--temperature", "0.5")
    job_id = said.strip()

    sent = stage.collector.one("send traced", messaging__message__id=job_id)
    span = linked(stage, job_id, sent)
    wait_for(lambda: len(stage.collector.within(span)) == 3)
    parts = stage.collector.within(span)

    assert ("pagemill-cli", "PRODUCER", "") == (sent.service, sent.kind, sent.parent_id)
    assert {
        "messaging.system": "redis",
        "messaging.operation.type": "send",
        "messaging.destination.name": QUEUE,
    }.items() <= (sent.attributes.items())
    wanted = {
        "messaging.system": "redis",
        "messaging.operation.type": "process",
        "messaging.destination.name": QUEUE,
        "messaging.message.id": job_id,
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake",
        "gen_ai.request.max_tokens": 40,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.output_tokens": 40,
        "pagemill.job.attempt": 1,
        "pagemill.job.outcome": "done",
        "pagemill.engine.preemptions": 0,
    }
    assert wanted.items() <= span.attributes.items()
    assert not span.failed
    assert ["wait", "prefill", "decode"] == sorted(parts, key=lambda name: parts[name].began_ns)
    assert parts["wait"].ended_ns == span.began_ns
    assert span.began_ns <= parts["prefill"].began_ns <= parts["decode"].ended_ns <= span.ended_ns
    # 40 tokens at 2,000 a second
    assert parts["decode"].ended_ns - parts["prefill"].began_ns >= 15_000_000


def test_many_jobs_are_one_span_of_their_producer(stage: Stage, tmp_path: Path) -> None:
    """
    A file of jobs is sent in one span, which counts them; each job's span is linked to it.
    """
    lines = tmp_path / "jobs.jsonl"
    lines.write_text("".join(f'{{"prompt": "{number}: {SECRET}"}}\n' for number in range(5)))
    job_ids = stage.run(*CLI, "submit", "--jsonl", str(lines)).split()

    sent = stage.collector.one("send traced", messaging__batch__message_count=5)
    for job_id in job_ids:
        assert "text_completion" == linked(stage, job_id, sent).attributes["gen_ai.operation.name"]


def test_an_entry_of_any_language_says_its_trace(stage: Stage) -> None:
    """
    A job that another program writes with a traceparent is linked to that program's span.
    """
    with Redis.from_url(stage.url, protocol=2) as redis:
        for name, fields in {
            "told": {"traceparent": TRACEPARENT, "tracestate": "vendor=1"},
            "silent": {},
            "wrong": {"traceparent": "not one"},
        }.items():
            body = {"id": name, "prompt": SECRET, "options": {"max_tokens": 5}, **fields}
            redis.xadd(f"{QueueKeys(QUEUE).base}:in", {"d": json.dumps(body)})
    spans = {name: stage.collector.of_job(name)[0] for name in ("told", "silent", "wrong")}

    assert [(TRACE, PARENT)] == spans["told"].links
    assert ([], []) == (spans["silent"].links, spans["wrong"].links)
    assert {""} == {span.parent_id for span in spans.values()}


def test_what_is_not_recorded_costs_no_span(stage: Stage) -> None:
    """
    A job of a trace that its producer does not record has no span in the worker either.
    """
    with Client(stage.url, queue=QUEUE) as client:
        unrecorded = client.submit(a_job(SECRET, traceparent=f"00-{TRACE}-{PARENT}-00"))
        client.result(unrecorded.job_id, wait_s=20)
        later = client.submit(a_job(SECRET, traceparent=TRACEPARENT))
    stage.collector.of_job(later.job_id)

    assert [] == [
        span for span in stage.collector.spans if span.attributes.get("messaging.message.id") == unrecorded.job_id
    ]


def test_a_celery_task_goes_on_with_its_messages_trace(stage: Stage, caller: Caller) -> None:
    """
    The task's span is a child of the one in the message's headers, the send one of the task's, and the worker's is
    linked to that.
    """
    task_id = str(
        caller.app.send_task(
            "pagemill.generate",
            (SECRET,),
            {"options": {"max_tokens": 5}},
            queue="pagemill.ingress",
            headers={"traceparent": TRACEPARENT},
        ).id
    )
    assert 5 == caller.value(task_id)["usage"]["completion_tokens"]
    job_id = job_id_of(task_id)
    task = stage.collector.one("process pagemill.generate", messaging__message__id=task_id)
    sent = stage.collector.one("send traced", messaging__message__id=job_id)

    assert ("pagemill-celery", TRACE, PARENT) == (task.service, task.trace_id, task.parent_id)
    assert ("pagemill-celery", TRACE, task.span_id) == (sent.service, sent.trace_id, sent.parent_id)
    linked(stage, job_id, sent)


@pytest.mark.parametrize("streams", [False, True])
def test_a_request_goes_on_with_its_callers_trace(stage: Stage, streams: bool) -> None:
    """
    The gateway's span is a child of the caller's, and the log's lines of the request have the trace.
    """
    body = {"model": "fake", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 7, "stream": streams}
    parent = f"{PARENT[:-1]}{int(streams)}"
    headers = {"traceparent": f"00-{TRACE}-{parent}-01"}
    wait_for(lambda: httpx.get(f"{stage.gateway_url}/readyz").status_code == 200, 20)
    answer = httpx.post(f"{stage.gateway_url}/v1/chat/completions", json=body, headers=headers, timeout=30)
    assert 200 == answer.status_code

    request_id = answer.headers["x-request-id"]
    request = stage.collector.one("POST /v1/chat/completions", pagemill__request__id=request_id)
    wait_for(lambda: stage.collector.within(request))
    sent = stage.collector.within(request)["send traced"]

    assert ("pagemill-gateway", "SERVER", TRACE, parent) == (
        request.service,
        request.kind,
        request.trace_id,
        request.parent_id,
    )
    assert ("POST", "/v1/chat/completions", 200) == tuple(
        request.attributes[name] for name in ("http.request.method", "http.route", "http.response.status_code")
    )
    span = linked(stage, sent.attributes["messaging.message.id"], sent)
    assert ("interactive", 7) == (span.attributes["pagemill.job.lane"], span.attributes["gen_ai.usage.output_tokens"])

    def told() -> list[dict[str, Any]]:
        events = stage.events("gateway")
        return [one for one in events if one.get("request_id") == request_id and one["event"] == "request"]

    (line,) = wait_for(told)
    assert (TRACE, 200, QUEUE) == (line["trace_id"], line["status"], line["queue"])


def test_a_request_that_fails_says_so(stage: Stage) -> None:
    """
    A refusal is the caller's, and no failure of the gateway; probes have no spans, and an open status page is one.
    """
    assert 200 == httpx.get(f"{stage.gateway_url}/status/parts", timeout=30).status_code
    answer = httpx.post(f"{stage.gateway_url}/v1/chat/completions", json={"model": "none"}, timeout=30)
    request = stage.collector.one("POST /v1/chat/completions", pagemill__request__id=answer.headers["x-request-id"])

    assert (400, False) == (request.attributes["http.response.status_code"], request.failed)
    assert [] == stage.collector.named("GET /readyz") == stage.collector.named("GET /status/parts")
    assert "GET /status/parts" not in {one.get("route") for one in stage.events("gateway") if one["event"] == "request"}


@pytest.mark.parametrize("rows", [False, True])
def test_a_bulk_run_is_a_span_with_its_chunks(stage: Stage, tmp_path: Path, rows: bool) -> None:
    """
    Rows have spans in the worker only where they are asked for.
    """
    source = tmp_path / "in.jsonl"
    source.write_text("".join(f'{{"text": "{number}: {SECRET}", "custom_id": "{number}"}}\n' for number in range(6)))
    name = f"rows-{rows}".lower()
    flags = ("--input", str(source), "--output", str(tmp_path / "out"), "--rows-per-chunk", "3", "-o", "max_tokens=5")
    config = tmp_path / "job.toml"
    config.write_text(f'name = "{name}"\n')
    stage.run("-m", "producers.bulk", "run", "--config", str(config), *flags, PAGEMILL_TRACE_ROWS=str(rows).lower())

    run = stage.collector.one("bulk run", pagemill__run=name)
    inside = [span for span in stage.collector.spans if span.trace_id == run.trace_id and span.parent_id == run.span_id]
    chunks = [span for span in inside if span.name == "bulk chunk"]
    sent = [span for span in inside if span.name == "send traced"]

    assert ("pagemill-bulk", 6, 2) == (run.service, run.attributes["pagemill.rows"], run.attributes["pagemill.chunks"])
    assert [3, 3] == [span.attributes["pagemill.rows"] for span in chunks]
    assert 6 == sum(span.attributes["messaging.batch.message_count"] for span in sent)
    places = [span.place for span in sent]
    if rows:
        wait_for(lambda: sum(span.links[:1] == places for span in stage.collector.spans) == 6)
    # a job that comes later is seen later
    with Client(stage.url, queue=QUEUE) as client:
        stage.collector.of_job(client.submit(a_job(SECRET)).job_id)
    assert 6 * rows == sum(span.links[:1] == places for span in stage.collector.spans)


def test_no_prompt_leaves_its_queue(stage: Stage) -> None:
    """
    Neither spans nor logs have it, whatever came before.
    """
    # whichever tests ran before this one
    stage.run(*CLI, "submit", SECRET, "--wait")
    exported = b"".join(stage.collector.bodies)
    logged = b"".join((stage.folder / f"{name}.log").read_bytes() for name in ("worker", "gateway", "ingress"))

    assert len(exported) > 1000
    assert SECRET.encode() not in exported
    assert SECRET.encode() not in logged


def test_lines_of_jobs_have_their_ids(stage: Stage) -> None:
    """
    Each line of a worker is JSON with its time, level, queue and worker; those of a job have it and its trace.
    """
    with Client(stage.url, queue=QUEUE) as client:
        job_id = client.submit(a_job(SECRET, traceparent=TRACEPARENT)).job_id
        client.result(job_id, wait_s=20)
    wait_for(lambda: [one for one in stage.events("worker") if one.get("job_id") == job_id])
    events = stage.events("worker")

    assert [] == [one for one in events if not {"timestamp", "level", "queue", "event"} <= one.keys()]
    # the supervisor's own name the worker that they are about
    assert [] == [one for one in events if one.get("worker") != stage.worker.worker_id]
    (ended,) = (one for one in events if one.get("job_id") == job_id)
    assert ("job.ended", TRACE, "done") == (ended["event"], ended["trace_id"], ended["status"])


def test_lines_of_celery_name_the_task_and_none_of_its_values(stage: Stage, caller: Caller) -> None:
    """
    Celery's own lines have the form of ours.
    """
    asked = caller.send("submit", prompt=SECRET, options={"max_tokens": 5})
    job_id = caller.value(asked)["job_id"]
    with Client(stage.url, queue=QUEUE) as client:
        client.result(job_id, wait_s=20)
    results = caller.send("results", [job_id])
    assert "done" == caller.value(results)[0]["state"]

    def lines() -> list[dict[str, Any]]:
        return [one for one in stage.events("ingress") if one.get("task_id") == results]

    wait_for(lambda: any("succeeded" in one["event"] for one in lines()))
    found = lines()

    assert {"celery.app.trace", "celery.worker.strategy"} == {one["logger"] for one in found}
    assert {"pagemill.results"} == {one["task"] for one in found}
    assert found[-1]["event"].endswith("s: ...")


def test_a_flood_of_requests_is_a_few_lines(stage: Stage) -> None:
    """
    The gateway tells of some; its metrics count all.
    """
    began = time.monotonic()
    with httpx.Client(base_url=stage.gateway_url, timeout=30) as client:
        for _ in range(5 * MAX_LINES):
            assert 200 == client.get("/v1/models").status_code
    # one window may have been open before
    num_windows = 2 + int((time.monotonic() - began) / WINDOW_S)
    told = [one for one in stage.events("gateway") if one["event"] == "request" and one["route"] == "GET /v1/models"]

    assert 0 < len(told) <= num_windows * MAX_LINES
    assert all(one["request_id"].startswith("req-") and one["trace_id"] for one in told)
