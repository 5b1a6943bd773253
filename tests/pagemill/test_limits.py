"""Limits of tenants and lanes: who is refused, why, and for how long."""

import asyncio
import threading
import time

import pytest
from redis import Redis

from pagemill.async_client import AsyncClient
from pagemill.client import Client
from pagemill.errors import Busy, SettingsError
from pagemill.keys import QueueKeys
from pagemill.shares import TenantShare
from tests.support.servers import MakeConsumer, a_job


def refused(client: Client, **fields: object) -> Busy | None:
    """Submit a job of ten tokens."""
    try:
        client.submit(a_job("abc", max_tokens=9, **fields))
    except Busy as busy:
        return busy
    return None


def reason(client: Client, **fields: object) -> str | None:
    busy = refused(client, **fields)
    return busy and busy.reason


def test_a_tenant_at_its_limit_is_busy_in_all_lanes(client: Client) -> None:
    """
    What a tenant may have waiting is counted over its lanes together, and is nobody else's matter.
    """
    client.set_tenant("acme", max_queued_tokens=25)

    asked = [("bulk", "acme"), ("standard", "acme"), ("interactive", "acme"), ("interactive", "other")]
    assert [None, None, "tenant", None] == [reason(client, lane=lane, tenant=tenant) for lane, tenant in asked]


def test_a_lane_at_its_limit_is_busy_for_all_tenants(client: Client) -> None:
    """
    A limit on bulk leaves the other lanes open.
    """
    client.set_lane_limit("bulk", 25)

    asked = [("bulk", "a"), ("bulk", "b"), ("bulk", "c"), ("standard", "c")]
    assert [None, None, "lane", None] == [reason(client, lane=lane, tenant=tenant) for lane, tenant in asked]


def test_one_limit_for_all_who_have_none_of_their_own(client: Client) -> None:
    """
    The limit of * counts for each tenant apart, and a tenant's own goes before it.
    """
    client.set_tenant("*", max_queued_tokens=10)
    client.set_tenant("large", max_queued_tokens=30)

    found = {tenant: [reason(client, tenant=tenant) for _ in range(4)] for tenant in ("a", "b", "large")}

    assert {
        "a": [None, "tenant", "tenant", "tenant"],
        "b": [None, "tenant", "tenant", "tenant"],
        "large": [None, None, None, "tenant"],
    } == found


def test_a_limit_holds_within_one_call(client: Client) -> None:
    """
    Of many jobs sent together those are taken that fit, and the others are told that they did not.
    """
    client.set_tenant("acme", max_queued_tokens=35)

    with pytest.raises(Busy, match="tenant acme"):
        client.submit_many([a_job("abc", max_tokens=9, tenant="acme") for _ in range(10)])

    assert 30 == client.stats().queued_tokens["standard"]


def test_every_way_out_of_the_queue_makes_room(
    client: Client, consumer: MakeConsumer, redis: Redis, queue: str
) -> None:
    """
    A pull, a cancel and a deadline free what the job counted for; a hand-back counts again.
    """
    waits = QueueKeys(queue).waiting("standard")
    client.set_tenant("acme", max_queued_tokens=20)
    client.submit(a_job("abc", max_tokens=9, tenant="acme"))
    cancelled = client.submit(a_job("abc", max_tokens=9, tenant="acme")).job_id
    full = [redis.hget(waits, "acme")]
    client.cancel(cancelled)
    full.append(redis.hget(waits, "acme"))
    worker = consumer()
    held = worker.pull()
    full.append(redis.hget(waits, "acme"))
    worker.run(worker.consumer.release(held))
    full.append(redis.hget(waits, "acme"))
    client.submit(a_job("abc", max_tokens=9, tenant="acme", timeout_s=0.001))
    full.append(redis.hget(waits, "acme"))
    time.sleep(0.005)
    worker.run(worker.consumer.sweep())
    full.append(redis.hget(waits, "acme"))
    worker.run(worker.consumer.retry(worker.pull()[0], delay_ms=60_000, why="later"))
    full.append(redis.hget(waits, "acme"))

    assert [b"20", b"10", None, b"10", b"20", b"10", None] == full


def test_a_large_job_is_taken_when_nothing_of_its_tenant_waits(client: Client) -> None:
    """
    No limit refuses a job for good.
    """
    client.set_tenant("acme", max_queued_tokens=5)
    client.set_lane_limit("bulk", 5)
    reason(client, lane="bulk")

    assert ["lane", None, "tenant"] == [
        reason(client, lane=lane, tenant="acme") for lane in ("bulk", "standard", "standard")
    ]


def test_a_repeated_submit_is_not_refused(client: Client) -> None:
    """
    A job that is in the queue already is a duplicate, however full the queue is.
    """
    client.set_tenant("acme", max_queued_tokens=10)
    job = a_job("abc", max_tokens=9, tenant="acme")
    client.submit(job)

    assert client.submit(job).duplicate


def test_without_a_worker_the_wait_is_long(client: Client) -> None:
    """
    Where nothing ends, nobody is asked back within a minute.
    """
    client.set_lane_limit("standard", 10)

    assert [None, 60.0] == [busy and busy.retry_after_s for busy in (refused(client), refused(client))]


def test_the_wait_is_as_long_as_the_queue_needs(client: Client, consumer: MakeConsumer) -> None:
    """
    Producers are told to come back when, as fast as jobs end now, there will be room for what they sent.
    """
    client.submit_many([a_job("abc", max_tokens=999, lane="bulk") for _ in range(40)])
    client.set_lane_limit("bulk", 10_000)
    worker = consumer()
    held = worker.pull(max_jobs=30)
    begin = time.monotonic()
    for start in range(0, 30, 5):
        worker.finish(*held[start : start + 5])
        time.sleep(0.25)
    tokens_s = 30_000 / (time.monotonic() - begin)

    waits = []
    for _ in range(2):
        with pytest.raises(Busy) as caught:
            # 10,000 wait: all of these are beyond the limit
            client.submit_many([a_job("abc", max_tokens=999, lane="bulk") for _ in range(30)])
        waits.append(caught.value.retry_after_s)
        client.set_lane_limit("bulk", 5_000)

    # the first refusal is told: 1,000 tokens are to go, and then 6,000
    assert 0.1 <= waits[0] <= max(0.1, 2 * 1_000 / tokens_s)
    assert 6_000 / tokens_s / 2 < waits[1] < 6_000 / tokens_s * 2


def test_patience_ends_with_a_last_try(client: Client) -> None:
    """
    Who waits for less than it was told tries once more before it gives up.
    """
    client.set_lane_limit("standard", 10)
    first = client.submit(a_job("abc", max_tokens=9)).job_id
    busy = refused(client)
    cancel = threading.Timer(1.0, client.cancel, [first])
    cancel.start()
    begin = time.monotonic()

    assert busy is not None
    assert busy.retry_after_s == 60.0
    assert "queued" == client.submit_many([a_job("abc", max_tokens=9)], wait_s=2.5)[0].state
    assert time.monotonic() - begin >= 2.5
    cancel.join()
    with pytest.raises(Busy):
        client.submit_many([a_job("abc", max_tokens=9)], wait_s=0.05)


def test_one_job_waits_where_its_caller_wants_that(server_url: str, queue: str, client: Client) -> None:
    """
    `submit` raises at once, or tries again for as long as it is told; of both clients.
    """
    client.set_lane_limit("standard", 10)
    first = client.submit(a_job("abc", max_tokens=9)).job_id
    with pytest.raises(Busy):
        client.submit(a_job("abc", max_tokens=9))
    cancel = threading.Timer(0.3, client.cancel, [first])
    cancel.start()
    second = client.submit(a_job("abc", max_tokens=9), wait_s=1.5)
    cancel.join()
    cancel = threading.Timer(0.3, client.cancel, [second.job_id])

    async def submit_third() -> str:
        async with AsyncClient(server_url, queue=queue) as other:
            with pytest.raises(Busy):
                await other.submit(a_job("abc", max_tokens=9))
            cancel.start()
            return (await other.submit(a_job("abc", max_tokens=9), wait_s=1.5)).state

    assert "queued" == asyncio.run(submit_third())
    cancel.join()


def test_a_batch_that_waits_is_let_in_bit_by_bit(client: Client, consumer: MakeConsumer) -> None:
    """
    With patience all jobs go in as room is made, and the limit is never passed.
    """
    client.set_lane_limit("standard", 50)
    client.submit_many([a_job("abc", max_tokens=9) for _ in range(5)])
    worker = consumer()
    worker.finish(*worker.pull())
    most = 0

    jobs = iter([a_job("abc", max_tokens=9) for _ in range(20)])
    for job in jobs:
        if refused(client, id=job.id) is not None:
            most = max(most, client.stats().queued_tokens["standard"])
            worker.finish(*worker.pull())
            client.submit_many([job], wait_s=5)

    assert 50 == most


def test_the_operator_sees_what_is_set_and_used(client: Client, consumer: MakeConsumer) -> None:
    """
    Tenants are listed with what was set for them, what they have waiting and what they used.
    """
    client.set_tenant("acme", weight=2.5, max_queued_tokens=1000)
    client.set_tenant("*", max_queued_tokens=70)
    client.set_tenant("gone", weight=3)
    client.set_tenant("gone", weight=1)
    client.set_lane_limit("bulk", 500)
    worker = consumer()
    client.submit(a_job("abc", max_tokens=9, tenant="other"))
    worker.finish(*worker.pull())
    client.submit(a_job("abc", max_tokens=9, tenant="acme", lane="bulk"))
    nothing = {"interactive": 0, "standard": 0, "bulk": 0}

    assert [
        TenantShare("*", max_queued_tokens=70, queued_tokens=nothing),
        TenantShare("acme", 2.5, 1000, {**nothing, "bulk": 10}),
        TenantShare("other", queued_tokens=nothing, used_tokens=5),
    ] == client.tenants()
    assert {"interactive": 0, "standard": 0, "bulk": 500} == client.lane_limits()


def test_a_limit_is_taken_away_with_0(client: Client, redis: Redis, queue: str) -> None:
    """
    Nothing stays of what is as usual.
    """
    keys = QueueKeys(queue)
    client.set_tenant("acme", weight=2, max_queued_tokens=5)
    client.set_lane_limit("bulk", 5)
    client.set_tenant("acme", weight=1, max_queued_tokens=0)
    client.set_lane_limit("bulk", 0)

    assert 0 == redis.exists(keys.tenants, keys.limits)


@pytest.mark.parametrize(
    ("tenant", "values", "words"),
    [
        ("acme", {"weight": 0.0}, "weight is 0: want 0.001"),
        ("acme", {"weight": 1e6}, "weight is 1e.06"),
        ("acme", {"weight": float("nan")}, "weight is nan"),
        ("*", {"weight": 2.0}, "one tenant's"),
        ("acme", {"max_queued_tokens": -1}, "limit is -1"),
        ("a b", {"weight": 2.0}, "tenant's name"),
    ],
)
def test_what_cannot_be_counted_with_is_not_set(
    client: Client, tenant: str, values: dict[str, float], words: str
) -> None:
    """
    A value out of range is a typed error that says the range.
    """
    with pytest.raises(SettingsError, match=words):
        client.set_tenant(tenant, **values)  # type: ignore[arg-type]


def test_a_nonsense_limit_stops_nobody(client: Client, redis: Redis, queue: str) -> None:
    """
    What somebody wrote into the table by hand and is no number counts for nothing.
    """
    limits = QueueKeys(queue).limits
    redis.hset(limits, mapping={"lane:standard": "many", "tenant:a": "nan", "tenant:b": "inf", "tenant:*": "-5"})

    assert [None, None, None] == [reason(client, tenant=tenant) for tenant in ("a", "b", "c")]
    assert {0} == {one.max_queued_tokens for one in client.tenants() if one.tenant != "*"}
