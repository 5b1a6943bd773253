"""The queue's metrics: read once a second at most, left out where the queue cannot be read."""

import asyncio
from dataclasses import replace

from prometheus_client import CollectorRegistry

from pagemill.client import Client
from pagemill.connection import connect_async
from pagemill.errors import ServerAway
from pagemill.keys import QueueKeys
from pagemill.survey import Survey, read_survey
from tests.support.clock import Clock
from tests.support.servers import MakeConsumer, a_job
from worker.autoscale import Autoscaler, Limits
from worker.queue_metrics import READ_EVERY_S, QueueCollector, QueueReader


class Looks:
    """Gives a survey each time, or an error; counts how often it was asked."""

    def __init__(self, survey: Survey) -> None:
        self.survey = survey
        self.error: Exception | None = None
        self.count = 0

    async def __call__(self) -> Survey:
        self.count += 1
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return self.survey


def look(url: str, queue: str) -> Survey:
    async def read() -> Survey:
        redis = connect_async(url, timeout_s=5.0)
        try:
            return await read_survey(redis, QueueKeys(queue))
        finally:
            await redis.aclose()

    return asyncio.run(read())


def values(reader: QueueReader, *, num_tenants: int = 0) -> dict[tuple[str, ...], float]:
    """All samples by name and label values."""
    registry = CollectorRegistry()
    registry.register(QueueCollector(reader, num_tenants=num_tenants))
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in registry.collect()
        for sample in family.samples
    }


def test_a_queue_shows_what_is_in_it(server_url: str, queue: str, client: Client, consumer: MakeConsumer) -> None:
    """
    What waits by lane, what runs, how jobs ended and what they took; and what the server says of itself.
    """
    client.submit_many([a_job(f"{number}", lane="bulk", tenant="acme") for number in range(4)])
    cancelled = client.submit(a_job("x", lane="interactive")).job_id
    client.cancel(cancelled)
    worker = consumer()
    first, second = worker.pull(max_jobs=2)
    worker.finish(first)
    reader = QueueReader(Looks(look(server_url, queue)), Autoscaler(Limits()))

    asyncio.run(reader.refresh())
    found = values(reader, num_tenants=5)

    assert (2, 0, 0) == tuple(found["pagemill_queue_depth", lane] for lane in ("bulk", "standard", "interactive"))
    assert 2 * second.tokens == found["pagemill_backlog_tokens", "bulk"]
    assert 0 < found["pagemill_oldest_age_seconds", "bulk"] < 100
    assert (1, 1) == (found["pagemill_inflight_jobs",], found["pagemill_workers", "starting"])
    events = ("accepted", "done", "failed", "cancelled", "expired")
    assert (5, 1, 0, 1, 0) == tuple(found["pagemill_queue_jobs_total", event] for event in events)
    assert (1, 0) == tuple(found["pagemill_cancelled_total", phase] for phase in ("waiting", "running"))
    assert (3, 2, 5) == (
        found["pagemill_queue_tokens_total", "prompt"],
        found["pagemill_queue_tokens_total", "completion"],
        found["pagemill_tenant_tokens_total", "acme"],
    )
    assert 1 == found["pagemill_redis_noeviction",]
    assert found["pagemill_redis_memory_bytes",] > 100_000
    assert (1, 1) == (found["pagemill_autoscale_desired_workers",], found["pagemill_source_up",])


def test_jobs_that_come_back_are_counted_by_why(
    server_url: str, queue: str, client: Client, consumer: MakeConsumer
) -> None:
    """
    A hand-back, a fault by its kind, and a result that came too late.
    """
    client.submit_many([a_job("a"), a_job("b")])
    worker, other = consumer(), consumer()
    released, put_off = worker.pull()
    worker.run(worker.consumer.release([released]))
    worker.run(worker.consumer.retry(put_off, delay_ms=60_000, why="away", fault="store"))
    other.pull()
    assert ["fenced"] == worker.finish(released)
    reader = QueueReader(Looks(look(server_url, queue)), Autoscaler(Limits()))

    asyncio.run(reader.refresh())
    found = values(reader)

    assert (1, 0, 0) == tuple(found["pagemill_redeliveries_total", cause] for cause in ("release", "lapse", "crash"))
    assert (1, 1) == (found["pagemill_retries_total", "store"], found["pagemill_delayed_jobs",])
    assert 1 == found["pagemill_fenced_total",]


def test_tenants_are_named_up_to_a_limit(server_url: str, queue: str) -> None:
    """
    None unless it is asked for, and then those that took most.
    """
    survey = replace(look(server_url, queue), tenant_tokens={"a": 5, "b": 50, "c": 500})
    reader = QueueReader(Looks(survey), Autoscaler(Limits()))
    asyncio.run(reader.refresh())

    def named(limit: int) -> list[str]:
        return [key[1] for key in values(reader, num_tenants=limit) if key[0] == "pagemill_tenant_tokens_total"]

    assert [] == named(0)
    assert ["c", "b"] == named(2)


def test_the_queue_is_read_once_a_second_at_most(server_url: str, queue: str) -> None:
    """
    However many scrape at once.
    """
    clock, looks = Clock(), Looks(look(server_url, queue))
    reader = QueueReader(looks, Autoscaler(Limits()), clock=clock)

    async def scrape() -> list[int]:
        counts = []
        for _ in range(2):
            await asyncio.gather(*(reader.refresh() for _ in range(20)))
            counts.append(looks.count)
            clock.now += READ_EVERY_S
        return counts

    assert [1, 2] == asyncio.run(scrape())


def test_a_queue_that_cannot_be_read_shows_nothing(server_url: str, queue: str) -> None:
    """
    Not zeros: its metrics are gone, `pagemill_source_up` is 0, and as many workers are wanted as before.
    """
    clock, looks = Clock(), Looks(look(server_url, queue))
    reader = QueueReader(looks, Autoscaler(Limits(min_workers=3)), clock=clock)
    asyncio.run(reader.refresh())
    assert 1 == values(reader)["pagemill_source_up",]

    looks.error = ServerAway("it is away")
    clock.now += READ_EVERY_S
    asyncio.run(reader.refresh())

    assert {("pagemill_source_up",): 0.0} == values(reader)
    assert 3 == reader.decision.desired_workers
    assert "it is away" in reader.decision.reason
