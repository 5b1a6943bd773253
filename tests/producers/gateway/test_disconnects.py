"""What becomes of a job whose client leaves, and of streams that the gateway's end meets."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from redis import Redis

from pagemill.client import Client
from producers.gateway.api_keys import ApiKey, hash_of
from producers.gateway.limits import KEY
from tests.support.gateways import RunningGateway, running_gateway, write_keys
from tests.support.servers import is_routed, wait_for
from tests.support.services import RunningService
from worker.fake_engine import FakeEngine

QUEUE = "gateway-tests"
# of the fake engine's 4,000 tokens a second: a minute and more, of its context two seconds
LONG = {"model": "fake", "prompt": "x", "max_tokens": 8000}


@pytest.fixture
def queue_client(redis_url: str) -> Iterator[Client]:
    with Client(redis_url, queue=QUEUE) as client:
        yield client


def cancelled(client: Client) -> int:
    return client.stats().totals.get("cancelled", 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_job(gateway: RunningGateway, queue_client: Client, stream: bool) -> None:
    """
    The worker is told, and the request is counted as one whose client left.
    """
    before = cancelled(queue_client)
    body = json.dumps(LONG | {"stream": stream, "n": 4}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    host, _, port = gateway.url.removeprefix("http://").partition(":")

    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head + body)
        wait_for(lambda: queue_client.stats().running == 1)
        if stream:
            assert connection.recv(10).startswith(b"HTTP/1.1")

    wait_for(lambda: cancelled(queue_client) == before + 1)
    wait_for(lambda: gateway.gateway.in_flight == 0)


def test_a_job_under_an_idempotency_key_goes_on(gateway: RunningGateway, queue_client: Client) -> None:
    """
    Its caller may ask again, and then gets the answer that was made meanwhile.
    """
    before = cancelled(queue_client)
    headers = {"Idempotency-Key": f"key-{time.time_ns()}"}
    body = LONG | {"max_tokens": 3000}

    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{gateway.url}/v1/completions", json=body, headers=headers, timeout=0.2)
    answer = httpx.post(f"{gateway.url}/v1/completions", json=body, headers=headers, timeout=30)

    assert 3000 == answer.json()["usage"]["completion_tokens"]
    assert before == cancelled(queue_client)


def test_streams_finish_when_the_gateway_is_told_to_stop(redis_url: str, gateway: RunningGateway) -> None:  # noqa: ARG001
    """
    No event of a running stream is lost; new requests are not taken.
    """

    async def scenario() -> str:
        async with (
            httpx.AsyncClient(timeout=30) as web,
            web.stream(
                "POST", f"{other.url}/v1/completions", json=LONG | {"max_tokens": 2000, "stream": True}
            ) as stream,
        ):
            lines = stream.aiter_lines()
            first = await anext(lines)
            stopping.set()
            return "".join([first, *[line async for line in lines]])

    stopping = threading.Event()
    with running_gateway(redis_url, QUEUE) as other:
        text = ""

        def read() -> None:
            nonlocal text
            text = asyncio.run(scenario())

        reader = threading.Thread(target=read)
        reader.start()
        assert stopping.wait(20)
    reader.join(20)

    events = [json.loads(part) for part in text.split("data: ") if part.startswith("{")]
    assert 2000 == sum(len(event["choices"][0]["text"]) for event in events)
    assert text.endswith("[DONE]")


def test_an_error_after_the_first_event_is_an_event(redis_url: str, gateway: RunningGateway) -> None:
    """
    The last one, without [DONE]: here the job was cancelled by an operator.
    """
    with (
        httpx.Client(timeout=30) as web,
        web.stream("POST", f"{gateway.url}/v1/completions", json=LONG | {"stream": True, "n": 4}) as stream,
        Client(redis_url, queue=QUEUE) as operator,
    ):
        lines = stream.iter_lines()
        first = json.loads(next(lines).removeprefix("data: "))
        operator.cancel(first["id"].removeprefix("cmpl-"))
        rest = [line for line in lines if line]

    assert "request_cancelled" == json.loads(rest[-1].removeprefix("data: "))["error"]["code"]
    assert "data: [DONE]" not in rest


def test_a_silent_stream_is_kept_alive(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Comments, which clients pass over, come while no text does.
    """
    monkeypatch.setattr("producers.gateway.generation.PATIENCE_S", 0.02)
    slow = FakeEngine(model_name="slow", tokens_per_s=10)
    body = {"model": "slow", "prompt": "x", "max_tokens": 4, "stream": True}
    with RunningService(redis_url, "slow", engine=slow), running_gateway(redis_url, "slow") as gateway:
        wait_for(lambda: is_routed(redis_url, "slow"))
        lines = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=30).text.splitlines()

    assert ": waiting" in lines
    assert "data: [DONE]" in lines
    assert 4 == sum(len(json.loads(line[6:])["choices"][0]["text"]) for line in lines if line.startswith("data: {"))


def test_nothing_of_all_this_stays(redis_url: str, gateway: RunningGateway) -> None:
    """
    No caller, reader or counter is left behind.
    """
    wait_for(lambda: gateway.gateway.in_flight == 0)
    readers = [one for readers in gateway.gateway.hub._readers.values() for one in readers]
    wait_for(lambda: sum(one.num_watches for one in readers) == 0)
    with Redis.from_url(redis_url) as redis:
        assert all(redis.ttl(name) > 0 for name in redis.keys(f"{KEY}*"))


def test_all_jobs_of_a_request_end_when_its_client_leaves(redis_url: str) -> None:
    """
    All are cancelled at first, those that have not begun as well, and none runs on until another has ended.
    """
    slow = FakeEngine(model_name="slow", tokens_per_s=50, max_num_seqs=2)
    body = {"model": "slow", "prompt": ["x"] * 12, "max_tokens": 2000}
    with (
        RunningService(redis_url, "many", engine=slow, lease_s=12.0),
        running_gateway(redis_url, "many") as gateway,
        Client(redis_url, queue="many") as client,
    ):
        wait_for(lambda: is_routed(redis_url, "slow"))
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=1.0)
        # those that wait end at once, and the running ones within a lease; one after the other took 12 thirds
        wait_for(lambda: client.stats().totals.get("cancelled", 0) == 12, 20)


def test_text_that_was_read_under_an_idempotency_key_is_paid_for(redis_url: str, tmp_path: Path) -> None:
    """
    Also when the client leaves before the stream's last event: the job goes on, and is charged when it ends.
    """
    key = write_keys(tmp_path / "keys.toml", one={"tokens_per_day": 10**6})["one"]
    headers = {"Authorization": f"Bearer {key}", "Idempotency-Key": f"key-{time.time_ns()}"}
    body = LONG | {"max_tokens": 1000, "stream": True}
    name = f"{KEY}{ApiKey(sha256=hash_of(key)).id}"
    with (
        RunningService(redis_url, "paid", engine=FakeEngine(tokens_per_s=1000)),
        running_gateway(redis_url, "paid", keys_file=tmp_path / "keys.toml") as gateway,
        Redis.from_url(redis_url) as redis,
    ):
        wait_for(lambda: is_routed(redis_url))
        with httpx.stream("POST", f"{gateway.url}/v1/completions", json=body, headers=headers, timeout=30) as stream:
            next(stream.iter_lines())
        wait_for(lambda: gateway.gateway.in_flight == 0)
        wait_for(lambda: not gateway.gateway._tasks, 20)

        # 1,000 of the answer and one of the prompt, where a third of the request's bytes was the estimate for that
        assert b"1001" == redis.hget(name, "used")


def test_a_client_that_does_not_read_is_let_go(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    It keeps its place for the time that its job may take and a little more; what it has not read is its text alone.
    """
    monkeypatch.setattr("producers.gateway.generate.READ_S", 0.0)
    engine = FakeEngine(model_name="wide", tokens_per_s=50_000)
    body = json.dumps({"model": "wide", "prompt": "x", "max_tokens": 8000, "n": 32, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with (
        RunningService(redis_url, "wide", engine=engine),
        running_gateway(redis_url, "wide", timeout_s=4) as gateway,
    ):
        wait_for(lambda: is_routed(redis_url, "wide"))
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((host, int(port)))
            connection.sendall(head + body)
            wait_for(lambda: gateway.gateway.in_flight == 1)
            wait_for(lambda: gateway.gateway.in_flight == 0, 30)
        assert "pagemill_gateway_client_gone_total 1.0" in httpx.get(f"{gateway.url}/metrics").text
