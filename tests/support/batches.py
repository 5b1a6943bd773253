"""Batches for tests, and what was told of them."""

from typing import Any

from redis import Redis

from pagemill.client import Client
from pagemill.keys import QueueKeys
from pagemill.messages import BatchStatus
from pagemill.schema import Job
from tests.support.servers import a_job


def batch_of(client: Client, num_jobs: int, *, sealed: bool = True, **fields: Any) -> tuple[str, list[Job]]:
    """A batch and the jobs that have joined it."""
    batch_id = client.create_batch(**fields).batch_id
    jobs = [a_job(f"{number}", batch=batch_id) for number in range(num_jobs)]
    client.submit_many(jobs)
    if sealed:
        client.seal_batch(batch_id)
    return batch_id, jobs


def counts(status: BatchStatus) -> tuple[int, int, int, int, int]:
    return status.total, status.done, status.failed, status.cancelled, status.expired


def batch_events(redis: Redis, queue: str, word: str) -> list[tuple[int, int]]:
    """Total and ended of the events of batches with this word, in order."""
    entries: Any = redis.xrange(QueueKeys(queue).events)
    return [(int(f[b"total"]), int(f[b"ended"])) for _, f in entries if f.get(b"b") and f[b"st"] == word.encode()]
