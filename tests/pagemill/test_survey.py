"""A queue as a whole: who has waited for longest, when deadlines fall due, how fast it drains."""

import asyncio
import time

import pytest
from redis import Redis

from pagemill.client import Client
from pagemill.connection import connect_async
from pagemill.errors import QueueUnavailable
from pagemill.keys import QueueKeys
from pagemill.survey import HORIZONS_S, Survey, drain_rate, read_survey
from tests.support.servers import MakeConsumer, a_job


def survey(url: str, queue: str) -> Survey:
    async def read() -> Survey:
        redis = connect_async(url, timeout_s=5.0)
        try:
            return await read_survey(redis, QueueKeys(queue))
        finally:
            await redis.aclose()

    return asyncio.run(read())


def made_older(redis: Redis, queue: str, job_id: str, seconds: float) -> None:
    """As if a job had been accepted so much earlier."""
    redis.hincrby(QueueKeys(queue).job(job_id), "acc", round(-1000 * seconds))


@pytest.fixture(params=["newest", "oldest"])
def server_url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{request.param}_server"))


def test_a_new_queue_is_empty(server_url: str, queue: str) -> None:
    """
    A queue that nobody has used has zeros, no deadline and no worker; the server's memory is told all the same.
    """
    found = survey(server_url, queue)

    assert (0, 0, None, 0.0, {}) == (
        found.queued,
        found.queued_tokens,
        found.deadline_s,
        found.drain_tokens_per_s,
        found.workers,
    )
    assert {0.0} == set(found.oldest_age_s.values())
    assert (0,) * len(HORIZONS_S) == found.due
    assert {"used_memory", "maxmemory", "aof_enabled", "evicted_keys"} <= found.server.keys()


def test_the_oldest_waiting_job_is_found_in_each_lane(
    server_url: str, queue: str, redis: Redis, client: Client, consumer: MakeConsumer
) -> None:
    """
    Jobs that workers have, and those that were cancelled while they waited, are not waiting; tenants all count.
    """
    taken, cancelled, waiting, other = (
        client.submit(a_job(name, lane="bulk", tenant=tenant)).job_id
        for name, tenant in (("a", "one"), ("b", "one"), ("c", "one"), ("d", "two"))
    )
    worker = consumer()
    assert [taken] == [job.job_id for job in worker.pull(max_jobs=1)]
    client.cancel(cancelled)
    for job_id, age_s in ((taken, 4000), (cancelled, 3000), (waiting, 2000), (other, 1000)):
        made_older(redis, queue, job_id, age_s)

    found = survey(server_url, queue)

    assert 2000 <= found.oldest_age_s["bulk"] < 2100
    assert (0.0, 0.0) == (found.oldest_age_s["interactive"], found.oldest_age_s["standard"])
    assert (2, 1, 1) == (found.queued, found.stats.running, found.cancelled_waiting)
    assert [worker.worker_id] == list(found.workers)


def test_a_job_that_was_handed_back_keeps_its_age(
    server_url: str, queue: str, redis: Redis, client: Client, consumer: MakeConsumer
) -> None:
    """
    It has waited since it was accepted, not since it came back.
    """
    job_id = client.submit(a_job("a")).job_id
    worker = consumer()
    held = worker.pull()
    made_older(redis, queue, job_id, 500)
    worker.run(worker.consumer.release(held))

    assert 500 <= survey(server_url, queue).oldest_age_s["standard"] < 600


def test_deadlines_are_counted_by_when_they_fall_due(server_url: str, queue: str, client: Client) -> None:
    """
    Each horizon counts all deadlines up to it, and the nearest one is named.
    """
    for timeout_s in (20, 100, 100_000):
        client.submit(a_job("a", timeout_s=timeout_s))
    client.submit(a_job("b"))

    found = survey(server_url, queue)

    expected = [sum(timeout_s <= horizon_s for timeout_s in (20, 100, 100_000)) for horizon_s in HORIZONS_S]
    assert tuple(expected) == found.due
    assert found.deadline_s == pytest.approx(20, abs=5)


def test_the_drain_rate_is_of_what_ended_lately(
    server_url: str, queue: str, client: Client, consumer: MakeConsumer
) -> None:
    """
    It counts estimated tokens, as the backlog does; what ended within the first second is taken as one second's.
    """
    client.submit(a_job("a" * 300, max_tokens=900))
    worker = consumer()
    held = worker.pull()
    worker.finish(*held)

    assert survey(server_url, queue).drain_tokens_per_s == pytest.approx(held[0].tokens, rel=0.2)


def test_the_drain_rate_fades() -> None:
    """
    A minute of steady work gives its rate; half a minute of silence after it leaves less of it.
    """
    now_ms = round(time.time() * 1000)
    # what a rate of 100 leaves after a minute: 100 * 30 * (1 - e^-2)
    counters = {"drain:bulk": 2594, "drain:at": now_ms, "drain:from": now_ms - 60_000}

    assert drain_rate(counters, now_ms) == pytest.approx(100, rel=0.01)
    assert drain_rate(counters, now_ms + 30_000) == pytest.approx(100 * 0.3679 * 0.8647 / 0.9502, rel=0.01)
    assert 0.0 == drain_rate({}, now_ms)


def test_an_unreachable_server_is_said(queue: str) -> None:
    """
    No survey is better than one of zeros.
    """
    with pytest.raises(QueueUnavailable):
        survey("redis://127.0.0.1:1/0", queue)


def test_many_tenants_are_sampled_at_both_ends(server_url: str, queue: str, redis: Redis, client: Client) -> None:
    """
    Of a hundred tenants those that are served next and those that are served last are looked at.
    """
    ids = client.submit_many([a_job(f"{number}", tenant=f"t{number:03}") for number in range(100)])
    ring = [name.decode() for name in redis.zrange(f"{QueueKeys(queue).base}:ring:standard", 0, -1)]
    by_tenant = {f"t{number:03}": one.job_id for number, one in enumerate(ids)}
    made_older(redis, queue, by_tenant[ring[-1]], 700)

    assert 700 <= survey(server_url, queue).oldest_age_s["standard"] < 800


def test_a_job_behind_many_that_were_cancelled_waits_all_the_same(server_url: str, queue: str, client: Client) -> None:
    """
    They stay in its stream until a worker comes by, and are not looked at one by one.
    """
    first, *others, last = [client.submit(a_job(f"{number}")).job_id for number in range(8)]
    for job_id in (first, *others):
        client.cancel(job_id)
    time.sleep(0.05)
    waits = survey(server_url, queue).oldest_age_s["standard"]
    client.cancel(last)

    assert 0.05 <= waits < 10
    assert 0 == survey(server_url, queue).oldest_age_s["standard"]
