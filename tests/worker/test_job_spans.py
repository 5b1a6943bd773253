"""The spans of jobs that do not go straight through, and of workers whose collector is no help; real workers."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pagemill.client import Client
from pagemill.schema import Job, Options
from tests.support.collector import Collector, collecting, took_s
from tests.support.scrapes import scrape
from tests.support.servers import a_job, wait_for
from tests.support.services import WorkerProcess, worker_process
from worker.job_spans import CONTENT_CHARS

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"

# too long to end by itself while a test looks
LONG = 4000


@contextmanager
def traced_worker(
    url: str, queue: str, log: Path, collector: Collector, *flags: str, **environ: str
) -> Iterator[WorkerProcess]:
    place = ("--redis-url", url, "--queue", queue, "--engine", "fake")
    with worker_process(log, *place, *flags, environment=collector.environ | environ) as worker:
        yield worker


def test_a_job_that_moves_has_a_span_of_each_worker(
    server_url: str, queue: str, client: Client, tmp_path: Path
) -> None:
    """
    One that is handed back, is taken up by another worker whose death it survives, and ends with a third: the spans
    of those who could still tell are linked to the same producer, and say which try it was.
    """
    flags = ("--lease-s", "1", "--drain-s", "0")
    with collecting() as collector:
        with traced_worker(server_url, queue, tmp_path / "1", collector, *flags, "--fake-tokens-per-s", "500") as first:
            job_id = client.submit(a_job(max_tokens=LONG, traceparent=TRACEPARENT)).job_id
            # it is running before the engine has it
            wait_for(lambda: any(int(one.get("generated_tokens", 0)) for one in client.workers().values()), 20)
            first.send(signal.SIGTERM)
            first.wait()
        with traced_worker(
            server_url, queue, tmp_path / "2", collector, *flags, "--fake-tokens-per-s", "500"
        ) as second:
            wait_for(lambda: client.status(job_id).state == "running")
            second.kill()
        with traced_worker(server_url, queue, tmp_path / "3", collector, *flags):
            assert "done" == client.result(job_id, wait_s=30).status
            released, done = collector.of_job(job_id, 2)

    assert [[(TRACE, PARENT)]] * 2 == [released.links, done.links]
    outcomes = [span.attributes["pagemill.job.outcome"] for span in (released, done)]
    assert (["released", "done"], [False, False]) == (outcomes, [released.failed, done.failed])
    assert "pagemill.redelivered" not in released.events
    assert {"attempt": 1, "lapses": 1, "faults": 0} == done.events["pagemill.redelivered"]
    assert 1 == done.attributes["pagemill.job.lapses"]
    # of what the first had saved
    assert 0 < done.events["pagemill.resumed"]["tokens"] < LONG
    assert LONG == done.attributes["gen_ai.usage.output_tokens"]


def test_each_try_of_a_job_that_ends_engines_has_a_span(
    server_url: str, queue: str, client: Client, tmp_path: Path
) -> None:
    """
    They have failed, by the engine's fault, and are counted; the worker sends them although it ends.
    """
    flags = ("--fake-poison", "--no-supervisor")
    job_id = client.submit(a_job("poison:raise", traceparent=TRACEPARENT)).job_id
    with collecting() as collector:
        for number in range(2):
            with traced_worker(server_url, queue, tmp_path / str(number), collector, *flags) as worker:
                assert 0 != worker.wait()
        client.cancel(job_id)
        spans = collector.of_job(job_id, 2)

    assert [1, 2] == [span.attributes["pagemill.job.attempt"] for span in spans]
    for span in spans:
        assert (True, "engine", "put_off") == (
            span.failed,
            span.attributes["error.type"],
            span.attributes["pagemill.job.outcome"],
        )
        assert [(TRACE, PARENT)] == span.links


def test_a_refused_job_has_its_code(server_url: str, queue: str, client: Client, tmp_path: Path) -> None:
    """
    And nothing of the message, which may quote the prompt.
    """
    with collecting() as collector, traced_worker(server_url, queue, tmp_path / "log", collector):
        job_id = client.submit(a_job("x" * 9000, traceparent=TRACEPARENT)).job_id
        assert "failed" == client.result(job_id, wait_s=20).status
        (span,) = collector.of_job(job_id)

    assert (True, "prompt_too_long", "failed") == (
        span.failed,
        span.attributes["error.type"],
        span.attributes["pagemill.job.outcome"],
    )


def test_content_and_the_producers_trace_are_had_for_the_asking(
    server_url: str, queue: str, client: Client, tmp_path: Path
) -> None:
    """
    Then spans have the beginning of prompt and answer, and are children of the producer's.
    """
    flags = ("--trace-content", "--trace-jobs", "child")
    with collecting() as collector, traced_worker(server_url, queue, tmp_path / "log", collector, *flags):
        messages = [{"role": "user", "content": "abc" * CONTENT_CHARS}]
        job = Job.build(messages=messages, options={"max_tokens": 9}, traceparent=TRACEPARENT)
        answer = client.text(client.submit(job).job_id, wait_s=20)
        (span,) = collector.of_job(job.id)

    asked = json.loads(span.attributes["gen_ai.input.messages"])
    given = json.loads(span.attributes["gen_ai.output.messages"])
    text = {"type": "text", "content": ("abc" * CONTENT_CHARS)[:CONTENT_CHARS]}
    assert [{"role": "user", "parts": [text]}] == asked
    reply = {"role": "assistant", "parts": [{"type": "text", "content": answer}], "finish_reason": "length"}
    assert [reply] == given
    assert (TRACE, PARENT, []) == (span.trace_id, span.parent_id, span.links)


def run_jobs(client: Client, number: int, **fields: Any) -> None:
    jobs = [Job(prompt="hello", options=Options(max_tokens=5), **fields) for _ in range(number)]
    client.submit_many(jobs)
    assert number == sum(1 for _ in client.finished([job.id for job in jobs], wait_s=60))


@pytest.mark.parametrize(
    ("status", "delay_s"),
    [
        pytest.param(200, 60.0, id="slow"),
        pytest.param(0, 0.0, id="dead"),
        pytest.param(503, 0.0, id="busy", marks=pytest.mark.slow),
        pytest.param(400, 0.0, id="refusing", marks=pytest.mark.slow),
    ],
)
def test_a_collector_that_is_no_help_holds_up_nothing(
    server_url: str, queue: str, client: Client, tmp_path: Path, status: int, delay_s: float
) -> None:
    """
    Jobs go on as fast as those without spans, it is said once, spans are counted, and the worker ends soon.
    """
    number, unrecorded = 400, {"traceparent": f"{TRACEPARENT[:-1]}0"}
    with collecting(status, delay_s) as collector:
        environ = {
            "OTEL_BSP_MAX_QUEUE_SIZE": "200",
            "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "100",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
        }
        if not status:
            environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://127.0.0.1:1"
        flags = ("--metrics-port", "0")
        with traced_worker(server_url, queue, tmp_path / "log", collector, *flags, **environ) as worker:
            run_jobs(client, number, **unrecorded)
            plain_s = took_s(lambda: run_jobs(client, number, **unrecorded))
            traced_s = took_s(lambda: run_jobs(client, number))
            (port,) = (one["port"] for one in worker.events() if one["event"] == "metrics.listening")
            # two batches at least: the second one is not told of
            wait_for(lambda: (scrape(port).value("pagemill_trace_spans_total", outcome="failed") or 0) >= 200, 20)
            found = scrape(port)
            told = told_of_traces(worker)
            worker.send(signal.SIGTERM)
            end_s = took_s(lambda: worker.wait())

    # what making spans costs is far less; the rest is for other programs on this machine
    assert traced_s < 3 * plain_s + 1.0
    assert 0 == found.value("pagemill_trace_spans_total", outcome="exported")
    # a queue of 200 has no room for the spans of 400 jobs, unless they are refused at once
    assert status == 400 or (found.value("pagemill_trace_spans_total", outcome="dropped") or 0) > 0
    assert ["traces.not_exported"] == [one["event"] for one in told]
    # the drain of an idle worker, and two seconds for the last spans
    assert end_s < 8.0


def told_of_traces(worker: WorkerProcess) -> list[dict[str, Any]]:
    return [one for one in worker.events() if "trace" in one["event"] or one.get("logger", "").startswith("opentele")]


def test_the_last_spans_are_sent_before_the_end(server_url: str, queue: str, client: Client, tmp_path: Path) -> None:
    """
    Those of jobs that end with the worker wait for no other batch.
    """
    with collecting() as collector:
        environ = {"OTEL_BSP_SCHEDULE_DELAY": "600000"}
        with traced_worker(server_url, queue, tmp_path / "log", collector, **environ) as worker:
            job_id = client.submit(a_job()).job_id
            client.result(job_id, wait_s=20)
            assert [] == collector.bodies
            worker.send(signal.SIGTERM)
            assert 0 == worker.wait()
        assert 1 == len(collector.of_job(job_id))
