"""DISOWN: claims whose reply was lost are handed back, however much their worker holds."""

import pytest
from redis import Redis

from pagemill import calls
from pagemill.client import Client
from pagemill.keys import QueueKeys
from pagemill.messages import Pull, Room
from pagemill.schema import LANES
from pagemill.scripts import run
from pagemill.versions import SCHEMA_VERSION
from tests.support.servers import BlockingConsumer, MakeConsumer, a_job

# more than one page of DISOWN, in one stream
MANY = 1000


def pull_unheard(redis: Redis, queue: str, worker: BlockingConsumer, num_jobs: int) -> list[str]:
    """What a PULL of this worker claims whose reply does not reach it."""
    call = calls.pull(
        QueueKeys(queue),
        worker.worker_id,
        rooms=[Room(num_jobs, 1_000_000)] * len(LANES),
        job_cap_tokens=0,
        lease_ms=30_000,
        turn=0,
        version=SCHEMA_VERSION,
    )
    pulled: Pull = run(redis, call)
    return [job.job_id for job in pulled.jobs]


@pytest.mark.parametrize("num_held", [0, MANY - 1, MANY, 2 * MANY + 1])
def test_lost_claims_behind_much_that_is_held(
    client: Client, consumer: MakeConsumer, redis: Redis, queue: str, num_held: int
) -> None:
    """
    The claims of a lost reply are the newest of their stream; all of them go back, and nothing that is held.
    """
    client.submit_many([a_job("held") for _ in range(num_held)])
    worker = consumer()
    held = worker.pull(max_jobs=num_held) if num_held else []
    client.submit_many([a_job("lost") for _ in range(3)])
    lost = pull_unheard(redis, queue, worker, 3)
    assert (num_held, 3) == (len(held), len(lost))

    # after that the worker asks at its next pull
    worker.consumer.doubt()
    worker.pull(max_jobs=0)

    assert lost == [job.job_id for job in consumer().pull()]
    assert frozenset() == worker.run(worker.consumer.renew(held)).lost
    worker.run(worker.consumer.release(held))
