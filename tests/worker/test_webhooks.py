"""Webhooks of batches: signed, delivered at least once, tried again, refused where they may not go."""

import asyncio
import base64
import hashlib
import hmac
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from redis import Redis

from pagemill.client import Client
from pagemill.connection import connect_async
from pagemill.consumer import Consumer
from pagemill.errors import SettingsError
from pagemill.ids import uuid7
from pagemill.keys import QueueKeys
from pagemill.messages import BatchStatus
from tests.support.receivers import Answer, Received, receiver, status
from tests.support.servers import MakeConsumer, a_job, wait_for
from tests.support.services import worker_process
from worker import webhooks
from worker.webhooks import Webhooks, backoff_ms, read_secret, signed_headers

SECRET = b"0123456789abcdef0123456789abcdef"
CODED = f"whsec_{base64.b64encode(SECRET).decode()}"


def ended_batch(client: Client, url: str, **fields: Any) -> str:
    batch_id = client.create_batch(webhook=url, **fields).batch_id
    client.seal_batch(batch_id)
    return batch_id


def verified(request: Received, secret: bytes) -> dict[str, Any]:
    """The message, after the check that the specification asks of a receiver."""
    headers = request.headers
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + request.body
    expected = base64.b64encode(hmac.new(secret, signed, hashlib.sha256).digest()).decode()
    assert f"v1,{expected}" == headers["webhook-signature"]
    message: dict[str, Any] = json.loads(request.body)
    return message


def deliver(
    url: str,
    queue: str,
    until: Callable[[], object],
    *,
    secret: bytes | None = SECRET,
    allow_private: bool = True,
) -> None:
    """Be the sweeper's holder until something has happened."""

    async def run() -> None:
        redis = connect_async(url)
        sender = Webhooks(
            Consumer(redis, queue, worker_id=f"w-{uuid7()}", lease_ms=30_000),
            secret=secret,
            allow_private=allow_private,
        )
        async with asyncio.timeout(20):
            while not until():
                await sender.deliver_due()
                await asyncio.sleep(0.02)
        sender.close()
        await redis.aclose()

    asyncio.run(run())


def settled(client: Client, batch_id: str) -> Callable[[], BatchStatus | None]:
    """Whether the webhook's state is final, as a condition."""

    def look() -> BatchStatus | None:
        batch = client.batch_status(batch_id)
        return batch if batch.webhook_state in ("delivered", "failed") else None

    return look


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries follow each other at once."""
    monkeypatch.setattr(webhooks, "FIRST_PAUSE_S", 0.01)


def test_the_end_of_a_batch_is_told(server_url: str, queue: str, client: Client, consumer: MakeConsumer) -> None:
    """
    The receiver gets the counts, and a signature that it can check with the shared secret.
    """
    with receiver(status(204)) as server:
        batch_id = client.create_batch(webhook=server.url, metadata={"night": "7"}).batch_id
        client.submit_many([a_job(f"{number}", batch=batch_id) for number in range(3)])
        client.seal_batch(batch_id)
        assert "" == client.batch_status(batch_id).webhook_state
        worker = consumer()
        worker.finish(*worker.pull())
        assert "pending" == client.batch_status(batch_id).webhook_state
        deliver(server_url, queue, settled(client, batch_id))

    [request] = server.received
    message = verified(request, SECRET)
    assert ("batch.ended", f"msg_{batch_id}") == (message["type"], request.headers["webhook-id"])
    assert (batch_id, 3, 3, 9, {"night": "7"}) == tuple(
        message["data"][name] for name in ("batch_id", "total", "done", "prompt_tokens", "metadata")
    )
    assert ("delivered", 1) == ((batch := client.batch_status(batch_id)).webhook_state, batch.webhook_tries)


def test_the_signature_is_that_of_the_specification() -> None:
    """
    The worked example of Standard Webhooks gives the header that stands there.
    """
    secret = read_secret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    body = b'{"test": 2432232314}'

    headers = signed_headers("msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body, secret)

    assert "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=" == headers["webhook-signature"]


def close(connection: Any) -> None:
    connection.close()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "failures",
    [
        [status(500), status(503), status(404)],
        [status(302, "Location: http://127.0.0.1:1/")],
        [close, b"nonsense\r\n\r\n"],
    ],
)
def test_what_fails_is_tried_again(server_url: str, queue: str, client: Client, failures: Sequence[Answer]) -> None:
    """
    After faults, refusals and redirects the same message is sent until it is taken.
    """
    with receiver(*failures, status(200)) as server:
        batch_id = ended_batch(client, server.url)
        deliver(server_url, queue, settled(client, batch_id))

    batch = client.batch_status(batch_id)
    assert ("delivered", len(failures) + 1, "") == (batch.webhook_state, batch.webhook_tries, batch.webhook_reason)
    assert 1 == len({(one.headers["webhook-id"], one.body) for one in server.received})
    for one in server.received:
        verified(one, SECRET)


def test_silence_is_a_failed_try(server_url: str, queue: str, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A receiver that takes a message and never answers gets it again.
    """
    monkeypatch.setattr(webhooks, "FIRST_PAUSE_S", 0.4)
    with receiver(lambda connection: connection.recv(1), status(200)) as server:
        batch_id = ended_batch(client, server.url)
        with monkeypatch.context() as hasty:
            hasty.setattr(webhooks, "TIMEOUT_S", 0.3)
            deliver(server_url, queue, lambda: client.batch_status(batch_id).webhook_reason)
        why = client.batch_status(batch_id).webhook_reason
        deliver(server_url, queue, settled(client, batch_id))

    assert "timed out" in why
    batch = client.batch_status(batch_id)
    assert ("delivered", 2, "") == (batch.webhook_state, batch.webhook_tries, batch.webhook_reason)
    assert 1 == len({(one.headers["webhook-id"], one.body) for one in server.received})


def test_the_pauses_grow_and_are_drawn() -> None:
    """
    Seconds at first, an hour at last, and never the same for all.
    """
    assert all(1000 <= backoff_ms(1) <= 2000 for _ in range(50))
    assert all(32_000 <= backoff_ms(6) <= 64_000 for _ in range(50))
    assert all(1_800_000 <= backoff_ms(tries) <= 3_600_000 for tries in (12, 60, 10_000))
    assert len({backoff_ms(9) for _ in range(20)}) > 10


def test_a_receiver_that_is_away_has_three_days(
    server_url: str, queue: str, client: Client, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A try that would come later is not made: the webhook has failed, and the batch says why.
    """
    monkeypatch.setattr(webhooks, "FIRST_PAUSE_S", 0.01)
    with receiver(status(500)) as server:
        batch_id = ended_batch(client, server.url, result_ttl_s=60)
        key = QueueKeys(queue).batch(batch_id)
        deliver(server_url, queue, lambda: client.batch_status(batch_id).webhook_tries >= 2)
        assert redis.ttl(key) > 3 * 86400
        redis.hincrby(key, "ended", -3 * 86_400_000)
        deliver(server_url, queue, settled(client, batch_id))

    batch = client.batch_status(batch_id)
    assert ("failed", "the receiver answered 500") == (batch.webhook_state, batch.webhook_reason)
    assert redis.ttl(key) <= 60


def test_a_receiver_can_say_that_it_wants_no_more(server_url: str, queue: str, client: Client) -> None:
    """
    410 ends the tries.
    """
    with receiver(status(410)) as server:
        batch_id = ended_batch(client, server.url)
        deliver(server_url, queue, settled(client, batch_id))

    assert ("failed", 1) == ((batch := client.batch_status(batch_id)).webhook_state, batch.webhook_tries)


def test_private_addresses_are_refused(server_url: str, queue: str, client: Client) -> None:
    """
    Unless the operator allows them, nothing inside the network is spoken to.
    """
    with receiver(status(200)) as server:
        batch_id = ended_batch(client, server.url)
        deliver(server_url, queue, settled(client, batch_id), allow_private=False)

    batch = client.batch_status(batch_id)
    assert ("failed", []) == (batch.webhook_state, server.received)
    assert "127.0.0.1, which is no public address" in batch.webhook_reason


def test_without_a_secret_nothing_is_sent(server_url: str, queue: str, client: Client) -> None:
    """
    The batch says what is missing, and a worker that has a secret can deliver it later.
    """
    with receiver(status(200)) as server:
        batch_id = ended_batch(client, server.url)
        deliver(server_url, queue, lambda: client.batch_status(batch_id).webhook_reason, secret=None)

    batch = client.batch_status(batch_id)
    assert ("pending", []) == (batch.webhook_state, server.received)
    assert "webhook_secret" in batch.webhook_reason


def test_a_dead_deliverers_webhook_is_delivered_by_another(
    server_url: str, queue: str, client: Client, consumer: MakeConsumer, redis: Redis
) -> None:
    """
    What was taken and not settled is due again; what was settled is not.
    """
    with receiver(status(200)) as server:
        batch_id = ended_batch(client, server.url)
        dead = consumer()
        [taken] = dead.run(dead.consumer.take_hooks(8, hold_ms=60_000))
        assert [] == dead.run(dead.consumer.take_hooks(8, hold_ms=60_000))
        # as if the minute had passed
        redis.zincrby(f"{QueueKeys(queue).base}:hooks", -60_000, batch_id)
        deliver(server_url, queue, settled(client, batch_id))

    assert (batch_id, 1) == (taken.batch_id, len(server.received))
    assert 2 == client.batch_status(batch_id).webhook_tries
    late = dead.run(dead.consumer.settle_hook(batch_id, webhooks.HookDelivery("again", 0, "late")))
    assert ("", "delivered") == (late, client.batch_status(batch_id).webhook_state)


def test_slow_receivers_hold_up_nobody_but_themselves(
    server_url: str, queue: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A few may hang; others are told meanwhile, and the loop goes on.
    """
    monkeypatch.setattr(webhooks, "TIMEOUT_S", 15.0)
    with receiver(lambda connection: connection.recv(1)) as hanging, receiver(status(200)) as server:
        for _ in range(3):
            ended_batch(client, hanging.url)
        good = ended_batch(client, server.url)
        deliver(server_url, queue, settled(client, good))

    assert 1 == len(server.received)


def test_no_more_than_a_few_are_under_way(
    server_url: str, queue: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Receivers that hang take a bounded number of threads.
    """
    monkeypatch.setattr(webhooks, "MAX_IN_FLIGHT", 2)
    with receiver(lambda connection: connection.recv(1)) as hanging:
        batches = [ended_batch(client, hanging.url) for _ in range(5)]
        turns = iter(range(30))
        deliver(server_url, queue, lambda: next(turns) >= 29)

    assert 2 == sum(client.batch_status(batch_id).webhook_tries for batch_id in batches)


def test_a_batch_that_has_expired_leaves_no_webhook(server_url: str, queue: str, client: Client, redis: Redis) -> None:
    """
    Nothing is sent for it, and its place among the webhooks goes.
    """
    keys = QueueKeys(queue)
    with receiver(status(200)) as server:
        batch_id = ended_batch(client, server.url)
        redis.delete(keys.batch(batch_id))
        deliver(server_url, queue, lambda: not redis.exists(f"{keys.base}:hooks"))

    assert [] == server.received


@pytest.mark.parametrize("text", ["", "whsec_", "secret", "whsec_c2hvcnQ=", "whsec_!!!", CODED[6:], f"x{CODED}"])
def test_a_secret_that_is_none(text: str) -> None:
    """
    It is refused in words that do not repeat it.
    """
    with pytest.raises(SettingsError) as caught:
        read_secret(text)

    assert "openssl rand -base64 32" in str(caught.value)
    assert len(text) < 8 or text not in str(caught.value)


def test_a_worker_delivers(server_url: str, queue: str, client: Client, tmp_path: Any) -> None:
    """
    `pagemill worker` with a secret tells the end of a batch that it has answered.
    """
    with receiver(status(200)) as server:
        batch_id = client.create_batch(webhook=server.url).batch_id
        client.submit(a_job(batch=batch_id))
        client.seal_batch(batch_id)
        with run_worker(server_url, queue, tmp_path) as worker:
            batch = wait_for(settled(client, batch_id), 30)
            assert not any(CODED in json.dumps(event) for event in worker.events())

    assert (1, "delivered") == (verified(server.received[0], SECRET)["data"]["done"], batch.webhook_state)


def run_worker(url: str, queue: str, folder: Any) -> Any:
    flags = ("--engine", "fake", "--redis-url", url, "--queue", queue, "--lease-s", "1", "--allow-private-webhooks")
    return worker_process(folder / "log", *flags, environment={"PAGEMILL_WEBHOOK_SECRET": CODED})
