"""Results of very many jobs, while more are submitted."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from pagemill.bulk_client import BulkClient
from pagemill.errors import ObjectStoreError, ServerAway
from tests.support.servers import MakeConsumer, a_job, wait_for


@pytest.fixture
def client(server_url: str, queue: str) -> Iterator[BulkClient]:
    with BulkClient(server_url, queue=queue) as client:
        yield client


def test_what_ends_is_gathered_once(client: BulkClient, consumer: MakeConsumer) -> None:
    """
    Jobs that are added by and by come out as they end, each once; others of the queue do not.
    """
    worker = consumer()
    draw = random.Random(3)
    gathering = client.gather()
    waiting, seen = set[str](), list[str]()
    for _ in range(20):
        accepted = client.submit_many([a_job() for _ in range(draw.randrange(1, 9))])
        client.submit(a_job("not gathered"))
        gathering.add(accepted)
        waiting.update(one.job_id for one in accepted)
        worker.finish(*worker.pull(max_jobs=draw.randrange(1, 12)))
        seen += [result.job_id for result in gathering.take(0.0).results]
    worker.finish(*worker.pull(max_jobs=1000))
    while len(gathering):
        seen += [result.job_id for result in gathering.take(1.0).results]

    assert waiting == set(seen)
    assert len(waiting) == len(seen)


def test_what_had_ended_before_comes_at_once(client: BulkClient, consumer: MakeConsumer) -> None:
    """
    A duplicate of a job that is over needs no event.
    """
    worker = consumer()
    job = a_job()
    client.submit(job)
    worker.finish(*worker.pull())
    gathering = client.gather()

    gathering.add([client.submit(job)])

    assert [job.id] == [result.job_id for result in gathering.take(0.0).results]
    assert 0 == len(gathering)


def test_what_came_before_the_server_went_away_is_given(
    client: BulkClient, consumer: MakeConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Results that were read are not lost with the error of those that were to be read next.
    """
    monkeypatch.setattr("pagemill.gathering.CHUNK", 2)
    worker = consumer()
    gathering = client.gather()
    accepted = client.submit_many([a_job() for _ in range(6)])
    gathering.add(accepted)
    worker.finish(*worker.pull(max_jobs=6))
    pipeline, num_calls = gathering._pipeline, 0

    def away_at_the_second(*commands: object) -> list[object]:
        nonlocal num_calls
        num_calls += 1
        if num_calls in (2, 3):
            raise ServerAway("the server is away")
        return pipeline(*commands)

    gathering._pipeline = away_at_the_second
    seen = [result.job_id for result in gathering.take(1.0).results]
    assert 2 == len(seen)
    with pytest.raises(ServerAway):
        gathering.take(0.0)
    seen += [result.job_id for result in gathering.take(0.0).results]

    assert sorted(one.job_id for one in accepted) == sorted(seen)


def test_what_the_queue_forgot_is_lost(client: BulkClient, redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A job that a replaced server does not know is named, so that it can be submitted again.
    """
    monkeypatch.setattr("pagemill.gathering.LOOK_S", 0.05)
    gathering = client.gather()
    job = client.submit(a_job())
    gathering.add([job])
    redis.flushdb()

    assert [job.job_id] == wait_for(lambda: gathering.take(0.01).lost)
    assert 0 == len(gathering)


def test_many_are_forgotten_together(server_url: str, queue: str, tmp_path: Path, consumer: MakeConsumer) -> None:
    """
    Their keys go, and their results in the store; those that run, or are unknown, are left alone.
    """
    worker = consumer()
    with BulkClient(server_url, queue=queue, object_store=tmp_path.as_uri()) as client:
        job_ids = [one.job_id for one in client.submit_many([a_job() for _ in range(30)])]
        worker.finish(*worker.pull(max_jobs=29))
        stored = (tmp_path / "results.json").as_uri()
        (tmp_path / "results.json").write_text("{}")
        client._redis.set(client._directory.own.result(job_ids[0]), f'{{"ref":"{stored}"}}')
        with BulkClient(server_url, queue=queue) as storeless, pytest.raises(ObjectStoreError):
            storeless.forget_many(job_ids)

        known = client.forget_many([*job_ids, "unknown"])

        assert 30 == known
        assert [] == list(tmp_path.iterdir())
        assert [0] * 29 + [1] == [client._redis.exists(client._directory.own.job(job_id)) for job_id in job_ids]
