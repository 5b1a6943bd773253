"""RETRY of a job that nobody wants any more: it ends, and is not put off."""

from typing import Literal

import pytest
from redis import Redis

from pagemill.client import Client
from pagemill.keys import QueueKeys
from tests.support.batches import batch_of, counts
from tests.support.servers import MakeConsumer, a_job


@pytest.mark.parametrize(("field", "value", "state"), [("cancel", "1", "cancelled"), ("dl", "1", "expired")])
def test_a_job_with_a_verdict_is_not_put_off(
    client: Client,
    consumer: MakeConsumer,
    redis: Redis,
    queue: str,
    field: str,
    value: str,
    state: Literal["cancelled", "expired"],
) -> None:
    """
    One that was cancelled, or whose deadline has passed, ends at once, and a repeated call is a duplicate.
    """
    client.submit(a_job(timeout_s=60))
    worker = consumer()
    [job] = worker.pull()
    redis.hset(QueueKeys(queue).job(job.job_id), field, value)

    outcomes = [worker.run(worker.consumer.retry(job, delay_ms=60_000, why="store")) for _ in range(2)]

    assert (["done", "duplicate"], state) == (outcomes, client.status(job.job_id).state)
    assert state == client.result(job.job_id, wait_s=0).status
    stats = client.stats()
    assert (0, 0, 1) == (stats.running, stats.delayed, stats.totals[state])


def test_a_job_of_a_cancelled_batch_is_not_put_off(
    client: Client, consumer: MakeConsumer, redis: Redis, queue: str
) -> None:
    """
    The batch ends with it, also where the cancelling has not come to the job yet.
    """
    batch_id, _ = batch_of(client, 1)
    worker = consumer()
    [job] = worker.pull()
    client.cancel_batch(batch_id)
    redis.hdel(QueueKeys(queue).job(job.job_id), "cancel")

    worker.run(worker.consumer.retry(job, delay_ms=60_000, why="store"))

    status = client.batch_status(batch_id)
    assert ("ended", (1, 0, 0, 1, 0)) == (status.state, counts(status))
