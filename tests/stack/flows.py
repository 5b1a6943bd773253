"""What users do with the stack: a job from each kind of producer, and a worker that goes away in the middle."""

import io
import json
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from typing import Any

import openai
from redis import Redis

from pagemill.client import Client
from pagemill.keys import QueueKeys
from pagemill.object_store import open_store
from pagemill.schema import Job
from producers.bulk.manifest import read_manifest, verify_manifest
from tests.stack.native import NativeStack, Stopped
from tests.support.bulk_runs import output_rows
from tests.support.celery_box import Caller, CeleryBox, calling
from tests.support.scrapes import get, get_json

QUESTION: list[Any] = [{"role": "user", "content": "Why is the sky blue?"}]
DOCUMENTS = {f"{name}.txt": f"The {name} is long, and many towns lie at it." for name in ("Rhine", "Nile", "Amur")}
WAIT_S = 120.0


class Stack:
    """A stack that runs, as those see it who use it from outside."""

    def __init__(self, native: NativeStack, model: str) -> None:
        self.native, self.model = native, model
        worker = native.services["worker-cpu"]
        said = {name: native.places.here(worker, value) for name, value in worker.environ.items() if value is not None}
        self.redis_url, self.queue, self.store_url = (
            said[f"PAGEMILL_{name}"] for name in ("REDIS_URL", "QUEUE", "OBJECT_STORE")
        )
        self.credentials = native.volume("worker-cpu", "/secrets") / "aws_credentials"

    def client(self) -> Client:
        return Client(self.redis_url, queue=self.queue, object_store=self.store_url)

    @property
    def api_key(self) -> str:
        """The key that the first start has shown, in the log where users find it."""
        found = re.search(r"API key local, .*: (pm-\S+)", self.native.log("setup"))
        assert found is not None, self.native.log("setup")
        return found[1]

    def bucket(self, folder: str) -> str:
        """A folder of the stack's bucket, as `pagemill.toml` names it."""
        place, _, query = self.store_url.partition("?")
        return f"{'/'.join(place.split('/')[:3])}/{folder}?{query}"


def from_the_client(stack: Stack) -> int:
    """One job that is small, and one whose prompt and result lie in the bucket."""
    with stack.client() as client:
        small = client.submit(messages=QUESTION, options={"max_tokens": 8})
        large = client.submit(messages=QUESTION, options={"max_tokens": 8}, result_store="object")
        assert client.text(small.job_id, wait_s=WAIT_S)
        assert client.text(large.job_id, wait_s=WAIT_S)
        found = list(open_store(stack.store_url).list("results/"))
        assert len(found) == 1, found
    return 2


def from_celery(caller: Caller) -> int:
    """A task by name, from an app that knows a broker and a backend."""
    answer = caller.value(caller.send("generate", messages=QUESTION, options={"max_tokens": 8}), WAIT_S)
    assert answer["text"], answer
    return 1


def from_openai(stack: Stack) -> int:
    """A chat, a stream and a batch of OpenAI's own client, with the key that the first start has shown."""
    url = f"http://127.0.0.1:{stack.native.port('gateway')}/v1"
    with openai.OpenAI(base_url=url, api_key="pm-wrong", max_retries=0) as stranger:
        try:
            stranger.models.list()
        except openai.AuthenticationError:
            pass
        else:
            raise AssertionError("the gateway let a wrong key in")
    with openai.OpenAI(base_url=url, api_key=stack.api_key, max_retries=0, timeout=WAIT_S) as client:
        usual: dict[str, Any] = {"model": stack.model, "messages": QUESTION, "max_tokens": 8, "temperature": 0}
        assert client.chat.completions.create(**usual).choices[0].message.content
        events = client.chat.completions.create(**usual, stream=True)
        assert "".join(event.choices[0].delta.content or "" for event in events if event.choices)
        return 2 + _batch(client, usual)


def _batch(client: openai.OpenAI, usual: dict[str, Any], num_lines: int = 3) -> int:
    path = "/v1/chat/completions"
    lines = [{"custom_id": str(n), "method": "POST", "url": path, "body": usual} for n in range(num_lines)]
    data = io.BytesIO("\n".join(map(json.dumps, lines)).encode())
    file = client.files.create(file=("requests.jsonl", data), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint=path, completion_window="24h")
    done = wait_for(lambda: _ended(client.batches.retrieve(made.id)), "the end of the batch")
    assert done.status == "completed", done
    answers = client.files.content(done.output_file_id).text.splitlines()
    assert len(answers) == num_lines, answers
    return num_lines


def _ended(batch: Any) -> Any:
    return batch if batch.status in ("completed", "failed", "expired", "cancelled") else None


def from_bulk(stack: Stack, caller: Caller | None) -> int:
    """
    The nightly job of pagemill.toml, from documents in the bucket to rows in the bucket.

    Args:
        caller: An app of another service sends it; None: the beat does.
    """
    day = datetime.now(UTC).date().isoformat()
    output = _put_documents(stack, day, DOCUMENTS)
    if caller is None:
        wait_for(lambda: _is_written(output), "what the beat has sent")
    else:
        caller.value(_send_bulk(caller, day), WAIT_S)
    return _check_rows(output, DOCUMENTS)


def bulk_goes(stack: Stack, caller: Caller, num_documents: int = 24) -> int:
    """
    Stop the service of bulk jobs while it is at one, and start it: the job is done where it was, and its task ends.

    Returns:
        Its rows.
    """
    day = (datetime.now(UTC) + timedelta(days=1)).date().isoformat()
    texts = {f"{number:02}.txt": f"River {number} is {number * 7} miles long." for number in range(num_documents)}
    output = _put_documents(stack, day, texts)
    with stack.client() as client:
        ended = client.stats().totals["done"]
        sent = _send_bulk(caller, day)
        wait_for(lambda: client.stats().running > num_documents // 4, "a bulk job that is at work")
        stopped = stack.native.stop("bulk")
        assert (0, False) == (stopped.code, stopped.killed), (stopped, stack.native.log("bulk")[-3000:])
        stack.native.start("bulk")
        caller.value(sent, WAIT_S)
        assert client.stats().totals["done"] - ended == num_documents, "a row was computed twice"
    stack.native.await_healthy("bulk")
    return _check_rows(output, texts)


def _put_documents(stack: Stack, day: str, texts: Mapping[str, str]) -> str:
    """Where the nightly job of that day looks for them; gives where it writes."""
    store = open_store(stack.bucket(f"in/{day}"))
    for name, text in texts.items():
        store.put(name, text.encode())
    return stack.bucket(f"out/{day}/")


def _send_bulk(caller: Caller, day: str) -> str:
    sent = caller.app.send_task("pagemill.bulk", kwargs={"name": "nightly", "date": day}, queue="pagemill.bulk")
    return str(sent.id)


def _check_rows(output: str, texts: Mapping[str, str]) -> int:
    assert _is_written(output)
    rows = output_rows(output)
    assert sorted(row.custom_id for row in rows) == sorted(texts), rows
    assert all(row.text for row in rows), rows
    return len(rows)


def _is_written(output: str) -> bool:
    store = open_store(output)
    manifest = read_manifest(store)
    if manifest is not None:
        verify_manifest(store, manifest)
    return manifest is not None


def foreign_app(stack: Stack) -> AbstractContextManager[Caller]:
    """An app of another service: two URLs, and none of our code."""
    broker, backend = (re.sub(r"/0$", f"/{number}", stack.redis_url) for number in (1, 2))
    return calling(CeleryBox(stack.native.folder, stack.redis_url, stack.queue, broker, backend))


def worker_goes(
    stack: Stack, number: signal.Signals | None = None, *, num_jobs: int, max_tokens: int
) -> dict[str, int]:
    """
    End the worker while it is busy, and start it again: each job ends once.

    Args:
        number: The signal, as `docker compose kill` sends it; None is `docker compose stop`.

    Returns:
        Counts: jobs, those that had ended before it was gone, and those that it handed back or that were taken back.
    """
    options = {"max_tokens": max_tokens, "min_tokens": max_tokens}
    jobs = [
        Job.build(messages=[{"role": "user", "content": f"Count to {n}."}], options=options) for n in range(num_jobs)
    ]
    with stack.client() as client, Redis.from_url(stack.redis_url) as redis:
        returned = _num_returned(client)
        client.submit_many(jobs)
        wait_for(lambda: client.stats().running > num_jobs // 4, "a busy worker")
        stopped = stack.native.stop("worker-cpu", number)
        if number is None:
            assert (0, False) == (stopped.code, stopped.killed), (stopped, stack.native.log("worker-cpu")[-3000:])
        before = _ends(redis, stack.queue, jobs)
        assert sum(before.values()) < num_jobs, "there was nothing left to recover"
        stack.native.start("worker-cpu")
        results = list(client.finished((job.id for job in jobs), wait_s=WAIT_S))
        assert sorted(result.job_id for result in results) == sorted(job.id for job in jobs)
        assert all(result.status == "done" for result in results), results
        assert {max_tokens} == {result.usage.completion_tokens for result in results}
        after = _ends(redis, stack.queue, jobs)
        assert after == Counter(job.id for job in jobs), f"jobs ended more than once: {after - Counter(set(after))}"
        returned = _num_returned(client) - returned
        assert returned > 0, "the worker had nothing in its hands"
    stack.native.await_healthy("worker-cpu")
    return {"jobs": num_jobs, "ended_before": sum(before.values()), "returned": returned}


def _num_returned(client: Client) -> int:
    """Jobs that ever left a worker without an end."""
    totals = client.stats().totals
    return totals.get("released", 0) + totals.get("reclaimed", 0)


def _ends(redis: "Redis", queue: str, jobs: list[Job]) -> Counter[str]:
    """How often each of these jobs has ended, as the queue has told it."""
    wanted = {job.id.encode() for job in jobs}
    told = redis.xrange(QueueKeys(queue).events)
    return Counter(fields[b"j"].decode() for _, fields in told if fields.get(b"j") in wanted)


def is_watched(stack: Stack) -> int:
    """Prometheus scrapes all that it is told of in the stack, with metrics of what the flows did; gives the targets."""
    port = stack.native.port("prometheus")

    def targets() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = get_json(port, "/api/v1/targets?state=active")[1]["data"]["activeTargets"]
        return found if {"up"} == {one["health"] for one in found} else []

    jobs = {one["labels"]["job"] for one in wait_for(targets, "all targets")}
    assert jobs == {"pagemill-worker", "pagemill-exporter", "pagemill-gateway", "prometheus"}, jobs
    status, text = get(stack.native.port("exporter"), "/metrics")
    assert status == 200
    assert "pagemill_source_up" in text
    return len(jobs)


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not come within {timeout_s:.0f} s"
        time.sleep(0.05)
    return found


def clean_end(ended: dict[str, Stopped]) -> None:
    """No service was killed, and none ended with an error."""
    bad = {name: one for name, one in ended.items() if one.killed or one.code not in (0, -signal.SIGTERM)}
    assert not bad, bad
