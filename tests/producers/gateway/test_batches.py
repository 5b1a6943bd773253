"""Batches of the official client: created, polled, cancelled, downloaded, and gone on with after an end."""

import io
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from pagemill.client import Client
from tests.support.gateways import RunningGateway, running_gateway
from tests.support.servers import wait_for

QUEUE = "gateway-tests"


def chat_line(custom_id: str, **body: Any) -> dict[str, Any]:
    fields = {"model": "fake", "messages": [{"role": "user", "content": custom_id}], "max_tokens": 5, "seed": 1}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": fields | body}


def created(client: openai.OpenAI, lines: Sequence[Any], endpoint: Any = "/v1/chat/completions") -> Batch:
    text = b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
    file = client.files.create(file=("in.jsonl", io.BytesIO(text)), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"night": "1"}
    )


def ended(client: openai.OpenAI, batch: Batch, timeout_s: float = 30) -> Batch:
    def look() -> Batch | None:
        found = client.batches.retrieve(batch.id)
        return found if found.status in ("completed", "failed", "expired", "cancelled") else None

    found: Batch = wait_for(look, timeout_s)
    return found


def lines_of(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def counts(batch: Batch) -> tuple[int, int, int]:
    assert batch.request_counts is not None
    return batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed


def test_a_batch_is_answered_in_order(client: openai.OpenAI) -> None:
    """
    Each line has the response that the request alone would get; more than one part is written.
    """
    lines = [chat_line(f"request {number}") for number in range(600)]

    batch = created(client, lines)
    assert ("validating", "batch", {"night": "1"}) == (batch.status, batch.object, batch.metadata)
    done = ended(client, batch)

    assert ("completed", (600, 600, 0), None) == (done.status, counts(done), done.error_file_id)
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at  # type: ignore[operator]
    answers = lines_of(client, done.output_file_id)
    assert [line["custom_id"] for line in lines] == [answer["custom_id"] for answer in answers]
    assert [(200, None)] * 600 == [(answer["response"]["status_code"], answer["error"]) for answer in answers]
    alone = client.chat.completions.create(**lines[7]["body"])
    assert alone.choices[0].message.content == answers[7]["response"]["body"]["choices"][0]["message"]["content"]
    assert batch.id in [one.id for one in client.batches.list(limit=5)]


def test_bad_lines_are_in_the_error_file_and_the_others_answered(client: openai.OpenAI) -> None:
    """
    What is no request, what cannot be served, and what the worker refuses; blank lines, CRLF and a BOM are none.
    """
    lines: list[Any] = [
        b"\xef\xbb\xbf" + json.dumps(chat_line("good")).encode() + b"\r\n",
        b"\n",
        b"{broken\n",
        b"\xff\xfe\n",
        chat_line("good"),
        chat_line("tools", tools=[{"type": "function"}]),
        chat_line("model", model="other"),
        chat_line("long", messages=[{"role": "user", "content": "x" * 9000}]),
        chat_line("url") | {"url": "/v1/completions"},
        chat_line("stream", stream=True),
        {"custom_id": "half"},
        b'{"custom_id": "' + b"y" * (5 * 1024 * 1024) + b'"}\n',
        json.dumps(chat_line("last")).encode(),
    ]

    done = ended(client, created(client, lines))

    assert ("completed", (12, 2, 10)) == (done.status, counts(done))
    assert ["good", "last"] == [line["custom_id"] for line in lines_of(client, done.output_file_id)]
    errors = lines_of(client, done.error_file_id)
    codes = [(line["custom_id"], line["response"]["body"]["error"]["code"]) for line in errors]
    assert [
        ("", "invalid_json"),
        ("", "invalid_encoding"),
        ("good", "duplicate_custom_id"),
        ("tools", "invalid_value"),
        ("model", "mismatched_model"),
        ("long", "context_length_exceeded"),
        ("url", "mismatched_endpoint"),
        ("stream", None),
        ("half", "invalid_value"),
        ("", "line_too_long"),
    ] == codes


def test_plain_completions_have_batches_too(client: openai.OpenAI) -> None:
    """
    A line with several prompts is one response.
    """
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "fake", "prompt": ["x", "y"], "max_tokens": 4},
    }

    done = ended(client, created(client, [line], "/v1/completions"))

    [answer] = lines_of(client, done.output_file_id)
    assert [4, 4] == [len(choice["text"]) for choice in answer["response"]["body"]["choices"]]


def test_a_file_without_requests_fails_its_batch(client: openai.OpenAI) -> None:
    """
    Empty, or of another kind; why is told.
    """
    for lines in ([], [b"a,b,c\n", b"1,2,3\n"]):
        done = ended(client, created(client, lines))
        assert done.errors is not None
        assert ("failed", ["invalid_file"]) == (done.status, [one.code for one in done.errors.data or []])
    done = ended(client, created(client, [chat_line("x", model="nobody")]))
    assert done.errors is not None
    assert ["model_not_found"] == [one.code for one in done.errors.data or []]


def test_a_cancelled_batch_keeps_what_it_has(client: openai.OpenAI, redis_url: str) -> None:
    """
    Its output has the lines that were answered, its error file the others; the queue is rid of them.
    """
    lines = [chat_line(f"short {number}") for number in range(256)]
    lines += [chat_line(f"long {number}", max_tokens=8000) for number in range(300)]

    batch = created(client, lines)
    wait_for(lambda: counts(client.batches.retrieve(batch.id))[1] == 256, 30)
    assert "cancelling" == client.batches.cancel(batch.id).status
    done = ended(client, batch)

    assert "cancelled" == done.status
    assert 556 == counts(done)[0] == counts(done)[1] + counts(done)[2]
    answered = lines_of(client, done.output_file_id)
    failed = lines_of(client, done.error_file_id)
    assert {line["custom_id"] for line in lines} == {line["custom_id"] for line in (*answered, *failed)}
    assert {"batch_cancelled"} == {line["error"]["code"] for line in failed}
    with Client(redis_url, queue=QUEUE) as queue:
        wait_for(lambda: queue.stats().running == 0)
        assert 0 == sum(queue.stats().queued.values())
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def test_a_batch_goes_on_in_another_gateway(
    redis_url: str,
    gateway: RunningGateway,  # noqa: ARG001  it has the worker
    tmp_path: Path,
) -> None:
    """
    One that ends leaves it to the next: each line is answered once.
    """
    store = tmp_path.as_uri()
    lines = [chat_line(f"{number}", max_tokens=20) for number in range(1000)]
    with running_gateway(redis_url, "another", object_store=store) as first:
        client = openai.OpenAI(base_url=f"{first.url}/v1", api_key="x")
        batch = created(client, lines)
        wait_for(lambda: counts(client.batches.retrieve(batch.id))[1] >= 256, 30)
    with running_gateway(redis_url, "another", object_store=store) as second:
        client = openai.OpenAI(base_url=f"{second.url}/v1", api_key="x")
        done = ended(client, batch)
        answers = lines_of(client, done.output_file_id)

    assert ("completed", (1000, 1000, 0)) == (done.status, counts(done))
    assert [line["custom_id"] for line in lines] == [answer["custom_id"] for answer in answers]
    assert [] == list((tmp_path / "batches").rglob("*.jsonl"))


def test_a_batch_whose_time_is_over_expires(
    redis_url: str,
    gateway: RunningGateway,  # noqa: ARG001  it has the worker
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """
    What is answered by then is kept, and the rest told as late.
    """
    monkeypatch.setattr("producers.gateway.batches.WINDOW_S", 2)
    lines = [chat_line("short"), *(chat_line(f"{number}", max_tokens=8000) for number in range(300))]
    with running_gateway(redis_url, "another", object_store=tmp_path.as_uri()) as other:
        client = openai.OpenAI(base_url=f"{other.url}/v1", api_key="x")
        began = time.time()
        done = ended(client, created(client, lines))
        errors = lines_of(client, done.error_file_id)

    assert "expired" == done.status
    assert {"batch_expired"} == {line["error"]["code"] for line in errors}
    assert time.time() - began < 25


@pytest.fixture(autouse=True)
def _nothing_runs_on(gateway: RunningGateway) -> Iterator[None]:
    yield
    wait_for(lambda: not gateway.gateway.batches._running, 30)
