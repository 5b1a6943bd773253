"""Sweeps and what they tidy: one sweeper a fleet, dead consumers, idle streams, missing routes."""

from collections.abc import Callable

from redis import Redis

from pagemill.client import Client
from pagemill.keys import MODELS, QueueKeys
from tests.support.servers import MakeConsumer, a_job, wait_for


def test_one_sweeper_a_fleet(consumer: MakeConsumer) -> None:
    """
    While one worker sweeps, another's sweep does nothing.
    """
    first, second = consumer(), consumer()

    assert [True, False] == [one.run(one.consumer.sweep()).swept for one in (first, second)]


def test_a_dead_sweeper_is_followed(consumer: MakeConsumer) -> None:
    """
    The right to sweep runs out by itself.
    """
    first, second = consumer(lease_ms=40), consumer(lease_ms=40)
    first.run(first.consumer.sweep())

    assert wait_for(lambda: second.run(second.consumer.sweep()).swept)


def test_dead_consumers_and_idle_streams_go(client: Client, consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    When all work is done and the workers are gone, sweeping removes groups and streams.
    """
    client.submit(a_job(tenant="once"))
    worker = consumer(lease_ms=10)
    worker.finish(*worker.pull())
    worker.run(worker.consumer.leave())
    sweeper = consumer(lease_ms=10)

    wait_for(lambda: sweeper.run(sweeper.consumer.sweep()) and not redis.keys(f"{QueueKeys(queue).base}:s:*"))

    assert 0 == redis.exists(f"{QueueKeys(queue).base}:streams")


def test_an_idle_tenant_goes_while_its_worker_lives(
    client: Client, consumer: MakeConsumer, redis: Redis, queue: str
) -> None:
    """
    Streams of tenants that were here once do not pile up in a fleet that never stops.
    """
    worker, sweeper = consumer(), consumer(lease_ms=10)
    client.submit(a_job(tenant="once"))
    worker.finish(*worker.pull())

    wait_for(lambda: sweeper.run(sweeper.consumer.sweep()) and not redis.keys(f"{QueueKeys(queue).base}:s:*"))

    assert worker.worker_id in client.workers()
    assert [b"!now"] == redis.hkeys(f"{QueueKeys(queue).base}:vt:standard")
    job_id = client.submit(a_job(tenant="once")).job_id
    assert [job_id] == [job.job_id for job in worker.pull()]


def test_a_late_end_brings_nothing_back_of_a_tenant_that_went(
    client: Client, consumer: MakeConsumer, redis: Redis, queue: str
) -> None:
    """
    A tenant's last job may run from a hand-back, when its own stream has gone already.
    """
    first, sweeper = consumer(), consumer(lease_ms=10)
    client.submit(a_job(tenant="once"))
    first.run(first.consumer.release(first.pull()))
    stream = f"{QueueKeys(queue).base}:s:standard:once"
    wait_for(lambda: sweeper.run(sweeper.consumer.sweep()) and not redis.exists(stream))
    second = consumer()
    [job] = second.pull()

    assert ["done"] == second.finish(job)

    assert [b"!now"] == redis.hkeys(f"{QueueKeys(queue).base}:vt:standard")
    assert 5 == client.tenants()[0].used_tokens


def test_a_stream_with_work_stays(client: Client, consumer: MakeConsumer) -> None:
    """
    Tidying takes no stream that has an entry, read or not, and a removed one is made again.
    """
    worker, sweeper = consumer(), consumer(lease_ms=1)
    for _ in range(3):
        job_id = client.submit(a_job(tenant="comes-and-goes")).job_id
        sweeper.run(sweeper.consumer.sweep())
        jobs = worker.pull()
        assert [job_id] == [job.job_id for job in jobs]
        sweeper.run(sweeper.consumer.sweep())
        assert ["done"] == worker.finish(*jobs)


def test_a_worker_shows_itself(client: Client, consumer: MakeConsumer) -> None:
    """
    A heartbeat's fields are seen by clients until the worker leaves.
    """
    worker = consumer()
    worker.run(worker.consumer.heartbeat({"kv_usage": 0.5, "running": 3}))
    seen = client.workers()
    worker.run(worker.consumer.leave())

    assert ("0.5", "3") == (seen[worker.worker_id]["kv_usage"], seen[worker.worker_id]["running"])
    assert {} == client.workers()


def test_a_route_is_written_when_it_is_missing(consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    Heartbeats put a model's route in once, leave another queue's claim alone, and mend a lost one.
    """
    worker = consumer()

    def route_after(change: Callable[[], object]) -> bytes | None:
        change()
        worker.run(worker.consumer.heartbeat({"model": "tiny"}))
        return redis.hget(MODELS, "tiny")  # type: ignore[return-value]

    first = route_after(lambda: None)
    taken = route_after(lambda: redis.hset(MODELS, "tiny", "elsewhere"))
    mended = route_after(lambda: redis.delete(MODELS))

    assert [queue.encode(), b"elsewhere", queue.encode()] == [first, taken, mended]
