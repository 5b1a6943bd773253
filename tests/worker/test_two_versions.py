"""
Two versions of the wire format side by side: a rolling update in one queue.

The worker of the version before is this one, told that it speaks no more than that: it takes that
version and the one before it, and meets jobs that are too new for it, as the next release will
have it do. Jobs of version 1 are what the release of version 1 wrote, byte for byte.
"""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from redis import Redis

from pagemill import calls
from pagemill.calls import Submission
from pagemill.client import Client
from pagemill.connection import connect
from pagemill.keys import QueueKeys
from pagemill.schema import Job, Result
from pagemill.scripts import run
from pagemill.versions import SCHEMA_VERSION
from tests.support.servers import wait_for
from tests.support.services import RunningService
from tests.support.wire import JOBS_OF_1, unknown_to_1
from worker.fake_engine import FakeEngine
from worker.retries import POLICIES, Fault, Policy

BEFORE = SCHEMA_VERSION - 1
NEXT = SCHEMA_VERSION + 1


@contextmanager
def worker(url: str, queue: str, version: int = SCHEMA_VERSION, max_retries: int = 1000) -> Iterator[RunningService]:
    quick: dict[Fault, Policy] = {fault: Policy(base_s=0.1, cap_s=0.2, max_retries=max_retries) for fault in POLICIES}
    # slow enough that each of two workers gets some of the jobs
    engine = FakeEngine(tokens_per_s=4000.0, max_num_seqs=8)
    with (
        RunningService(url, queue, engine=engine, version=version, policies=quick, lease_s=1.0) as service,
        connect(url) as redis,
    ):
        # an older worker refuses what is too new for every worker that it knows of
        wait_for(lambda: redis.exists(QueueKeys(queue).worker(service.worker_id)))
        yield service


def submit_as_1(redis: Redis, queue: str, number: int) -> str:
    """What the client of version 1 sends, but for the id."""
    name = f"old-{number}"
    fields = json.loads(JOBS_OF_1[number % 3]) | {"id": name}
    submission = Submission(
        job_id=name,
        fingerprint=name,
        idempotency="",
        payload=json.dumps(fields).encode(),
        ref="",
        lane=fields.get("lane", "standard"),
        tenant=fields.get("tenant", "default"),
        tokens=20,
        timeout_ms=0,
        result_ttl_s=600,
        stream=0,
        seed=7,
        metadata=json.dumps(fields["metadata"]) if "metadata" in fields else "",
        version=1,
    )
    run(redis, calls.submit(QueueKeys(queue), [submission], 0))
    return name


def write_raw(redis: Redis, queue: str, name: str, **fields: object) -> str:
    job = {"id": name, "prompt": "Why?", "options": {"max_tokens": 8}} | fields
    redis.xadd(QueueKeys(queue).raw, {"d": json.dumps(job)})
    return name


def results_of(redis: Redis, queue: str, names: list[str]) -> dict[str, bytes]:
    """The records of the results, when all jobs have ended."""
    keys = [QueueKeys(queue).result(name) for name in names]
    wait_for(lambda: redis.exists(*keys) == len(keys), 40)
    return dict(zip(names, redis.mget(keys), strict=True))  # type: ignore[arg-type]


def test_two_versions_of_workers_and_producers_finish_all_jobs(
    server_url: str, queue: str, redis: Redis, client: Client
) -> None:
    """
    Clients and raw writers of both versions fill one queue, workers of both serve it: every job is done,
    once; a result is of its job's version, and no older worker has run a job that is too new for it.
    """
    old, new = [], []
    batch = client.create_batch("rolling")
    with worker(server_url, queue, BEFORE) as before, worker(server_url, queue):
        for number in range(60):
            old.append(submit_as_1(redis, queue, number))
            old.append(write_raw(redis, queue, f"old-raw-{number}", version=1))
            job = Job.build(id=f"new-{number}", prompt="Why?", options={"max_tokens": 8}, batch=batch.batch_id)
            new.append(client.submit(job).job_id)
            new.append(write_raw(redis, queue, f"new-raw-{number}", version=2, batch=batch.batch_id))
        wait_for(lambda: not redis.xlen(QueueKeys(queue).raw))
        client.seal_batch(batch.batch_id)
        records = results_of(redis, queue, old + new)

    results = {name: Result.model_validate_json(record) for name, record in records.items()}
    assert {"done"} == {result.status for result in results.values()}
    assert {1} == {results[name].version for name in old}
    assert {2} == {results[name].version for name in new}
    assert [] == [fault for name in old for fault in unknown_to_1(records[name])]
    by_before = {name for name, result in results.items() if result.worker == before.worker_id}
    assert by_before
    assert by_before <= set(old)
    # each was counted once, by the batch and by the queue
    assert (120, 120) == ((status := client.batch_status(batch.batch_id)).total, status.done)
    assert (240, 240) == ((totals := client.stats().totals)["accepted"], totals["done"])
    assert 0 == redis.exists(QueueKeys(queue).dead)


def test_jobs_of_the_next_version_wait_for_their_worker(server_url: str, queue: str, redis: Redis) -> None:
    """
    The producer was updated first: its jobs are put off, and done as soon as a worker for them starts.
    """
    with Client(server_url, queue=queue) as client, worker(server_url, queue, BEFORE):
        new = [client.submit(prompt=f"{number}", options={"max_tokens": 4}).job_id for number in range(5)]
        wait_for(lambda: all(client.status(job_id).state == "delayed" for job_id in new))
        assert "the job has schema version 2; this Pagemill takes 1" == client.status(new[0]).reason
        old = submit_as_1(redis, queue, 0)
        assert "done" == client.result(old, wait_s=20).status
        with worker(server_url, queue):
            results = [client.result(job_id, wait_s=20) for job_id in new]

    assert [("done", 1)] * 5 == [(result.status, result.attempt) for result in results]


def test_workers_are_updated_one_after_the_other(server_url: str, queue: str, redis: Redis) -> None:
    """
    While jobs of both versions keep coming, the old worker drains and the new one has them all.
    """
    rng = random.Random(7)
    with Client(server_url, queue=queue) as client:
        names = []
        with worker(server_url, queue, BEFORE), worker(server_url, queue, BEFORE):
            names += [submit_as_1(redis, queue, number) for number in range(20)]
            with worker(server_url, queue):
                for number in range(20, 40):
                    late = client.submit(prompt="Why?", options={"max_tokens": 8}).job_id
                    names += [late] if rng.random() < 0.5 else [late, submit_as_1(redis, queue, number)]
        with worker(server_url, queue):
            records = results_of(redis, queue, names)

    assert {"done"} == {Result.model_validate_json(record).status for record in records.values()}


@pytest.mark.parametrize("way", ["client", "raw"])
def test_without_a_worker_for_it_a_later_job_fails_at_last(way: str, server_url: str, queue: str, redis: Redis) -> None:
    """
    Nobody came who knows the version: the job ends with a code that says so.
    """
    with worker(server_url, queue, max_retries=2), Client(server_url, queue=queue) as client:
        if way == "client":
            payload = b'{"version":%d,"id":"late","input":"of a field that we do not know"}' % NEXT
            submission = Submission("late", "f", "", payload, "", "standard", "default", 9, 0, 60, 0, 7, "", "", NEXT)
            run(redis, calls.submit(QueueKeys(queue), [submission], 0))
        else:
            write_raw(redis, queue, "late", version=NEXT)
        failure = wait_for(lambda: redis.exists(QueueKeys(queue).result("late"))) and client.result("late").failure

    assert failure is not None
    assert "unsupported_version" == failure.code
    assert f"schema version {NEXT}" in failure.message
    # a raw entry stays there with its bytes, for a worker that knows it
    assert (way == "raw") == bool(redis.exists(QueueKeys(queue).dead))


def test_a_job_that_is_too_old_fails(server_url: str, queue: str, redis: Redis) -> None:
    """
    The worker of the next version takes two versions as well, and refuses the one before them.
    """
    with worker(server_url, queue, NEXT), Client(server_url, queue=queue) as client:
        old = submit_as_1(redis, queue, 0)
        mine = client.submit(prompt="Why?", options={"max_tokens": 4}).job_id
        theirs = write_raw(redis, queue, "theirs", version=NEXT)
        records = results_of(redis, queue, [old, mine, theirs])

    results = [Result.model_validate_json(record) for record in records.values()]
    assert ["failed", "done", "done"] == [result.status for result in results]
    assert "unsupported_version" == (results[0].failure.code if results[0].failure else None)
