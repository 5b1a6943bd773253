"""REQUEUE beside what has happened since: other jobs of the same name, calls that come twice."""

from collections.abc import Callable
from typing import Any

from redis import Redis

from pagemill.client import Client
from pagemill.dead_letters import DeadLetter
from pagemill.keys import QueueKeys, idempotency_name
from tests.support.servers import BlockingConsumer, a_job

MakeConsumer = Callable[..., BlockingConsumer]


def buried(client: Client, worker: BlockingConsumer, **fields: Any) -> DeadLetter:
    """The letter of a new job that was given up."""
    client.submit(a_job(**fields))
    [job] = worker.pull()
    worker.run(worker.consumer.bury(job, why="retries", message="8 attempts failed"))
    return client.dead_letters()[-1]


def test_a_name_that_another_job_took_stays_with_it(
    client: Client, consumer: MakeConsumer, redis: Redis, queue: str
) -> None:
    """
    A requeued job whose idempotency key stands for another one by now runs without it: neither its
    end nor its being forgotten touches the other's.
    """
    worker = consumer()
    letter = buried(client, worker, idempotency_key="once")
    client.forget(letter.job_id)
    other = client.submit(a_job("another", idempotency_key="once")).job_id
    record = QueueKeys(queue).base + ":idem:" + idempotency_name("default", "once")

    client.requeue_dead(letter.entry_id)
    [requeued] = worker.pull(max_jobs=1)
    assert letter.job_id == requeued.job_id
    worker.finish(requeued)

    assert -1 == redis.ttl(record)
    client.forget(letter.job_id)
    again = client.submit(a_job("another", idempotency_key="once"))
    assert (other, True) == (again.job_id, again.duplicate)
    worker.finish(*worker.pull())


def test_a_name_that_nobody_took_is_the_jobs_again(
    client: Client, consumer: MakeConsumer, redis: Redis, queue: str
) -> None:
    """
    It expires with the requeued job's result, and goes when that is forgotten.
    """
    worker = consumer()
    letter = buried(client, worker, idempotency_key="once")
    record = QueueKeys(queue).base + ":idem:" + idempotency_name("default", "once")

    client.requeue_dead(letter.entry_id)
    assert -1 == redis.ttl(record)
    worker.finish(*worker.pull())
    assert redis.ttl(record) > 0

    client.forget(letter.job_id)
    assert not redis.exists(record)
