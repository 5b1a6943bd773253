"""A queue as its operator looks at it: batches with their pace, and dead letters without what they hold."""

import asyncio
from dataclasses import replace

import pytest
from redis import Redis

from pagemill.batches import time_left_s
from pagemill.client import Client
from pagemill.connection import connect_async
from pagemill.keys import QueueKeys
from pagemill.messages import BatchStatus
from pagemill.overview import Overview, read_overview
from tests.support.batches import batch_of
from tests.support.servers import BlockingConsumer, MakeConsumer, a_job

SECRET = "the patient's name is"


@pytest.fixture(params=["newest", "oldest"])
def server_url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{request.param}_server"))


def overview(url: str, queue: str, *, limit: int = 10, last: Overview | None = None) -> Overview:
    async def read() -> Overview:
        async with connect_async(url) as redis:
            return await read_overview(redis, QueueKeys(queue), max_batches=limit, max_letters=limit, last=last)

    return asyncio.run(read())


def bury(client: Client, worker: BlockingConsumer, *, message: str = "why") -> str:
    """A dead letter that holds a prompt; its job's id."""
    job_id = client.submit(a_job(SECRET, tenant="acme", lane="bulk")).job_id
    [job] = worker.pull()
    worker.run(worker.consumer.bury(job, why="retries", message=message))
    return job_id


def test_a_new_queue_has_neither(server_url: str, queue: str) -> None:
    """
    Nothing is asked of what is not there.
    """
    found = overview(server_url, queue)

    assert ((), 0, ()) == (found.batches, found.num_batches, found.letters)


def test_the_newest_letters_come_first_and_hold_nothing(
    server_url: str, queue: str, client: Client, consumer: MakeConsumer
) -> None:
    """
    Who, why, when and where; no byte of what was asked.
    """
    worker = consumer()
    jobs = [bury(client, worker, message=f"fault {number}") for number in range(5)]

    found = overview(server_url, queue, limit=3)

    assert (5, jobs[:1:-1]) == (found.survey.stats.dead, [letter.job_id for letter in found.letters])
    newest = found.letters[0]
    assert ("retries", "fault 4", "bulk", "acme", worker.worker_id) == (
        newest.why,
        newest.message,
        newest.lane,
        newest.tenant,
        newest.worker,
    )
    assert abs(newest.at_ms - found.survey.now_ms) < 10_000
    assert SECRET not in repr(found)


def test_letters_are_read_again_when_there_are_others(
    server_url: str, queue: str, redis: Redis, client: Client, consumer: MakeConsumer
) -> None:
    """
    A letter may have megabytes: as long as none came or went, those that were seen are shown.
    """
    worker = consumer()
    bury(client, worker)
    first = overview(server_url, queue)
    calls_before = num_calls(redis, "xrevrange")
    again = overview(server_url, queue, last=first)
    calls_after = num_calls(redis, "xrevrange")
    newer = bury(client, worker)
    later = overview(server_url, queue, last=again)
    client.purge_dead(older_than_s=0)
    empty = overview(server_url, queue, last=later)

    assert (first.letters, calls_before) == (again.letters, calls_after)
    assert [newer, first.letters[0].job_id] == [letter.job_id for letter in later.letters]
    assert () == empty.letters


def num_calls(redis: Redis, command: str) -> int:
    """How often it was called, by scripts too."""
    stats = redis.info("commandstats")
    return int(stats.get(f"cmdstat_{command}", {"calls": 0})["calls"])


def test_batches_come_without_what_their_owner_wrote(
    server_url: str, queue: str, redis: Redis, client: Client, consumer: MakeConsumer
) -> None:
    """
    The newest first and some of all; one that has expired is passed over.
    """
    ids = [batch_of(client, 2, metadata={"about": SECRET})[0] for _ in range(4)]
    redis.delete(QueueKeys(queue).batch(ids[3]))
    worker = consumer()
    worker.finish(*worker.pull(max_jobs=1))

    found = overview(server_url, queue, limit=3)

    assert ([ids[2], ids[1]], 4) == ([one.batch_id for one in found.batches], found.num_batches)
    assert SECRET not in repr(found)
    first = next(one for one in overview(server_url, queue).batches if one.batch_id == ids[0])
    assert replace(client.batch_status(ids[0]), metadata={}) == first
    assert (1, 1) == (first.done, first.num_open)


def test_a_batch_tells_how_long_it_takes(queue: str, redis: Redis, client: Client, consumer: MakeConsumer) -> None:
    """
    Twenty jobs ended within ten seconds: the other twenty take as long.
    """
    batch_id, _ = batch_of(client, 40)
    assert time_left_s(client.batch_status(batch_id), now(redis)) is None
    worker = consumer()
    worker.finish(*worker.pull(max_jobs=20))
    redis.hincrby(QueueKeys(queue).batch(batch_id), "pace_from", -10_000)

    halfway = client.batch_status(batch_id)

    assert time_left_s(halfway, now(redis)) == pytest.approx(10, abs=1.5)
    worker.finish(*worker.pull(max_jobs=20))
    assert time_left_s(client.batch_status(batch_id), now(redis)) is None


def test_a_pace_begins_anew_after_a_long_silence(
    queue: str, redis: Redis, client: Client, consumer: MakeConsumer
) -> None:
    """
    Hours in which no worker lived say nothing of how fast it goes now.
    """
    batch_id, _ = batch_of(client, 3)
    worker = consumer()
    key = QueueKeys(queue).batch(batch_id)
    first, second, _ = worker.pull()
    worker.finish(first)
    for field in ("pace_at", "pace_from"):
        redis.hincrby(key, field, -7_200_000)
    worker.finish(second)

    found = client.batch_status(batch_id)

    assert now(redis) - found.pace_from_ms < 10_000
    assert found.pace == pytest.approx(1.0, abs=0.01)


def now(redis: Redis) -> int:
    seconds, microseconds = redis.time()
    return int(seconds * 1000 + microseconds // 1000)


BATCH = BatchStatus(
    **dict.fromkeys(("batch_id", "queue", "tenant", "webhook", "webhook_state", "webhook_reason"), ""),
    **dict.fromkeys(("done", "failed", "cancelled", "expired", "prompt_tokens", "completion_tokens", "gpu_ms"), 0),
    **dict.fromkeys(("created_ms", "sealed_ms", "ended_ms", "webhook_tries"), 0),
    state="sealed",
    total=1000,
    cancel_requested=False,
    metadata={},
)


def test_the_estimate_follows_the_pace() -> None:
    """
    A steady job a second for ten minutes leaves a thousand seconds; half a silent minute makes it more, an hour ends
    all guessing.
    """
    # what a rate of 1 leaves after ten minutes: 300 * (1 - e^-2)
    steady = replace(BATCH, pace=259.4, pace_at_ms=600_000, pace_from_ms=1)

    assert time_left_s(steady, 600_000) == pytest.approx(1000, rel=0.01)
    after_silence = time_left_s(steady, 630_000)
    assert after_silence is not None
    assert 1050 < after_silence < 1200
    assert time_left_s(steady, 600_000 + 3_600_000) is None
    assert time_left_s(replace(BATCH, pace=5.0, pace_at_ms=2_000, pace_from_ms=1_000), 2_000) is None
