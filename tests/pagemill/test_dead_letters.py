"""BURY, REQUEUE, PURGE: what becomes of a job that is given up."""

import asyncio
from typing import Any

import pytest
from redis import Redis

from pagemill.async_client import AsyncClient
from pagemill.calls import JOBS_A_CALL
from pagemill.client import Client
from pagemill.connection import connect
from pagemill.dead_letters import PAGE, DeadLetter
from pagemill.errors import InvalidJob, JobNotFound
from pagemill.keys import QueueKeys
from pagemill.messages import Delivery, Outcome
from pagemill.obituary import report_death
from pagemill.schema import Job
from tests.support.servers import BlockingConsumer, MakeConsumer, a_job, wait_for


def bury(worker: BlockingConsumer, job: Delivery, why: str = "retries", message: str = "8 attempts failed") -> Outcome:
    outcome: Outcome = worker.run(worker.consumer.bury(job, why=why, message=message))  # type: ignore[arg-type]
    return outcome


def buried(client: Client, worker: BlockingConsumer, **fields: Any) -> DeadLetter:
    """The letter of a new job that was given up."""
    client.submit(a_job(**fields))
    [job] = worker.pull()
    assert "done" == bury(worker, job)
    return client.dead_letters()[-1]


def test_a_job_that_is_given_up_fails_and_is_kept(client: Client, consumer: MakeConsumer) -> None:
    """
    Whoever waits hears of it once, and the letter has all that the job was.
    """
    job = a_job("a \u20ac", tenant="acme", lane="bulk", metadata={"row": "7"}, timeout_s=60, result_ttl_s=77)
    client.submit(job)
    worker = consumer()
    [held] = worker.pull()

    outcome = bury(worker, held, message='it said "no", \u20ac\n')

    result = client.result(job.id, wait_s=0)
    assert ("done", "failed", {"row": "7"}) == (outcome, result.status, result.metadata)
    assert result.failure is not None
    assert ("engine_error", 'it said "no", \u20ac\n') == (result.failure.code, result.failure.message)
    [letter] = client.dead_letters()
    assert job == Job.parse(letter.payload or b"")
    expected = DeadLetter(
        entry_id=letter.entry_id,
        job_id=job.id,
        why="retries",
        message=result.failure.message,
        at_ms=client.status(job.id).ended_ms,
        attempt=1,
        crashes=0,
        lapses=0,
        worker=worker.worker_id,
        lane="bulk",
        tenant="acme",
        tokens=held.tokens,
        result_ttl_s=77,
        timeout_ms=60_000,
        seed=held.seed,
        batch="",
        metadata={"row": "7"},
        payload=letter.payload,
    )
    assert expected == letter
    assert (1, 0, 1) == (client.stats().dead, client.stats().running, client.stats().totals["failed"])


def test_only_the_owner_buries(client: Client, consumer: MakeConsumer) -> None:
    """
    A burial is fenced as a result is, and a repeated one is a duplicate.
    """
    client.submit(a_job())
    zombie, worker = consumer(), consumer()
    [old] = zombie.pull()
    zombie.run(zombie.consumer.release([old]))
    [job] = worker.pull()

    outcomes = [bury(zombie, old), bury(worker, job), bury(worker, job)]
    client.forget(job.job_id)

    assert ["fenced", "done", "duplicate", "gone"] == [*outcomes, bury(worker, job)]
    assert 1 == client.stats().dead


def test_poison_keeps_its_history(client: Client, consumer: MakeConsumer, server_url: str, queue: str) -> None:
    """
    The letter of a job that ended two workers says so, and who the last of them was.
    """
    job_id = client.submit(a_job()).job_id
    workers = [consumer(), consumer()]
    workers[0].pull()
    with connect(server_url) as redis:
        report_death(redis, queue, workers[0].worker_id, cause="crash", why="SIGSEGV")
        workers[1].run(workers[1].consumer.take_suspects())
        report_death(redis, queue, workers[1].worker_id, cause="crash", why="exit code 72")

    [letter] = client.dead_letters()

    assert (job_id, "poison", 2, workers[1].worker_id) == (letter.job_id, letter.why, letter.crashes, letter.worker)
    assert letter.message.endswith("exit code 72")
    failure = client.result(job_id, wait_s=0).failure
    assert failure is not None
    assert ("poison", letter.message) == (failure.code, failure.message)


def test_the_payload_object_of_a_dead_job_stays(client: Client, consumer: MakeConsumer, queue: str) -> None:
    """
    A payload in the store is named by the letter, and goes to the sweeper when that is purged.
    """
    from pagemill import calls
    from pagemill.client_core import prepare
    from pagemill.scripts import run

    submission = prepare(a_job())._replace(payload=b"", ref="s3://bucket/payload")
    run(client._redis, calls.submit(QueueKeys(queue), [submission], 0))
    worker = consumer()
    [job] = worker.pull()
    bury(worker, job)
    [letter] = client.dead_letters()
    before = worker.run(worker.consumer.take_orphans(10))

    purged = client.purge_dead([letter.entry_id])

    after = worker.run(worker.consumer.take_orphans(10))
    assert ("s3://bucket/payload", None) == (letter.payload_ref, letter.payload)
    assert (1, [], ["s3://bucket/payload"]) == (purged, before, after)


def test_a_requeued_job_runs_anew(client: Client, consumer: MakeConsumer) -> None:
    """
    The same id, payload and seed, no attempt counted, and a result that replaces the failed one.
    """
    worker = consumer()
    letter = buried(client, worker, prompt="again", metadata={"row": "7"}, tenant="acme")

    accepted = client.requeue_dead(letter.entry_id)

    status = client.status(letter.job_id)
    assert (letter.job_id, "queued", False) == (accepted.job_id, accepted.state, accepted.duplicate)
    assert ("queued", 0, "") == (status.state, status.attempt, status.worker)
    [job] = worker.pull()
    assert (1, 0, letter.payload, letter.seed) == (job.attempt, job.lapses, job.payload, job.seed)
    assert ["done"] == worker.finish(job)
    assert "done" == client.result(letter.job_id, wait_s=0).status
    stats = client.stats()
    assert ([], 0, 0, 0) == (client.dead_letters(), stats.dead, stats.running, stats.queued["standard"])
    assert (2, 1, 1, 1) == tuple(stats.totals[name] for name in ("accepted", "requeued", "failed", "done"))


def test_a_requeued_suspect_is_none(client: Client, consumer: MakeConsumer, server_url: str, queue: str) -> None:
    """
    What was held against the job is forgotten: it runs among others, and one more death alone does not kill it.
    """
    client.submit(a_job())
    dying = consumer()
    dying.pull()
    with connect(server_url) as redis:
        report_death(redis, queue, dying.worker_id, cause="crash", why="SIGSEGV")
        worker = consumer()
        [job] = worker.run(worker.consumer.take_suspects())
        bury(worker, job)
        client.requeue_dead(client.dead_letters()[0].entry_id)
        assert [job.job_id] == [one.job_id for one in worker.pull()]
        assert 1 == report_death(redis, queue, worker.worker_id, cause="crash", why="SIGSEGV").suspects


def test_a_requeued_job_gets_its_time_again(client: Client, consumer: MakeConsumer) -> None:
    """
    Its deadline is as far off as when it was accepted.
    """
    worker = consumer()
    letter = buried(client, worker, timeout_s=30)

    client.requeue_dead(letter.entry_id)

    status = client.status(letter.job_id)
    assert 30_000 == status.deadline_ms - status.accepted_ms


def test_a_job_is_requeued_after_its_result_expired(client: Client, consumer: MakeConsumer) -> None:
    """
    The letter outlives all else that the queue keeps of the job, and needs nothing of it.
    """
    worker = consumer()
    letter = buried(client, worker, idempotency_key="once", stream=True)
    client.forget(letter.job_id)

    client.requeue_dead(letter.entry_id)

    [job] = worker.pull()
    assert (letter.job_id, True) == (job.job_id, job.stream_tokens)
    again = client.submit(a_job(idempotency_key="once", stream=True))
    assert (letter.job_id, True) == (again.job_id, again.duplicate)
    worker.finish(job)


def test_a_job_that_was_submitted_again_is_not_doubled(client: Client, consumer: MakeConsumer) -> None:
    """
    Whoever submits a dead job again under its id has it run; a requeue then changes nothing.
    """
    worker = consumer()
    job = a_job()
    letter = buried(client, worker, id=job.id)
    client.forget(job.id)
    client.submit(job)

    accepted = client.requeue_dead(letter.entry_id)

    assert (job.id, "queued", True) == (accepted.job_id, accepted.state, accepted.duplicate)
    assert (1, 1) == (client.stats().dead, client.stats().queued["standard"])


def test_a_letter_is_requeued_once(client: Client, consumer: MakeConsumer) -> None:
    """
    A repeated requeue finds the job, and no text that could be no id finds a letter.
    """
    letter = buried(client, consumer())
    client.requeue_dead(letter.entry_id)

    again = client.requeue_dead(letter.entry_id)
    assert (letter.job_id, "queued", True) == (again.job_id, again.state, again.duplicate)
    with pytest.raises(JobNotFound, match="no dead letter"):
        client.dead_letter(letter.entry_id)
    for entry_id in ("1", "+", "- +", "1-1"):
        with pytest.raises(JobNotFound, match="no dead letter"):
            client.requeue_dead(entry_id)
        with pytest.raises(JobNotFound, match="no dead letter"):
            client.dead_letter(entry_id)
    assert 1 == client.stats().queued["standard"]


def test_a_job_that_dies_again_has_another_letter(client: Client, consumer: MakeConsumer) -> None:
    """
    There is one letter a job, however often it is requeued.
    """
    worker = consumer()
    first = buried(client, worker)
    client.requeue_dead(first.entry_id)
    [job] = worker.pull()
    bury(worker, job)

    [second] = client.dead_letters()

    assert (first.job_id, True) == (second.job_id, first.entry_id < second.entry_id)


def test_garbage_is_kept_and_not_requeued(client: Client, redis: Redis, queue: str) -> None:
    """
    What never was a job has its bytes in its letter.
    """
    entry_id = redis.xadd(QueueKeys(queue).dead, {"why": "garbage", "msg": "no JSON", "at": "5", "raw": b"\xff\x00{"})
    assert isinstance(entry_id, bytes)

    letter = client.dead_letter(entry_id.decode())

    assert ("garbage", b"\xff\x00{", None, "") == (letter.why, letter.raw, letter.payload, letter.job_id)
    with pytest.raises(InvalidJob):
        client.requeue_dead(letter.entry_id)
    assert 1 == client.stats().dead


def test_letters_come_in_pages(client: Client, redis: Redis, queue: str) -> None:
    """
    A limit and the last one's id make pages; a page of many takes several commands.
    """
    for number in range(2 * PAGE + 5):
        redis.xadd(QueueKeys(queue).dead, {"j": f"{number}", "why": "poison"})

    first = client.dead_letters(PAGE + 1)
    rest = client.dead_letters(1000, first[-1].entry_id)

    names = [letter.job_id for letter in first + rest]
    assert ([f"{number}" for number in range(2 * PAGE + 5)], PAGE + 1) == (names, len(first))
    assert ([], []) == (client.dead_letters(0), client.dead_letters(5, rest[-1].entry_id))


def test_letters_are_purged_by_id_and_by_age(client: Client, redis: Redis, queue: str) -> None:
    """
    Of very many, those before a time go, or exactly those that are named.
    """
    keys = QueueKeys(queue)
    many = 2 * JOBS_A_CALL + 10
    for number in range(many):
        redis.xadd(keys.dead, {"j": f"{number}"}, id=f"1000-{number + 1}")
    named = [redis.xadd(keys.dead, {"j": "named"}, id=f"2000-{number}").decode() for number in range(many)]
    redis.xadd(keys.dead, {"j": "last"}, id="3000-0")

    counts = [client.purge_dead(before_ms=1000), client.purge_dead(before_ms=1001), client.purge_dead(named)]

    assert [0, many, many] == counts
    assert (["last"], 0) == ([letter.job_id for letter in client.dead_letters()], client.purge_dead(named[:3]))


def test_a_full_server_still_buries(client: Client, consumer: MakeConsumer, redis: Redis) -> None:
    """
    A server that refuses all that grows takes a burial, as it takes a result.
    """
    client.submit(a_job())
    worker = consumer()
    [job] = worker.pull()
    redis.config_set("maxmemory", 1)
    try:
        outcome = bury(worker, job)
    finally:
        redis.config_set("maxmemory", 0)

    assert ("done", 1) == (outcome, client.stats().dead)


def test_the_async_client_has_the_same_verbs(
    client: Client, consumer: MakeConsumer, server_url: str, queue: str
) -> None:
    """
    Read, requeue and purge from an event loop.
    """
    worker = consumer()
    first, second = buried(client, worker, prompt="a"), buried(client, worker, prompt="b")

    async def story() -> tuple[list[DeadLetter], DeadLetter, str, int]:
        async with AsyncClient(server_url, queue=queue) as there:
            letters, one = await there.dead_letters(), await there.dead_letter(second.entry_id)
            accepted = await there.requeue_dead(first.entry_id)
            return letters, one, accepted.job_id, await there.purge_dead(before_ms=second.at_ms + 1000)

    assert ([first, second], second, first.job_id, 1) == asyncio.run(story())


def test_a_dead_letter_wakes_who_waits(client: Client, consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    It is an end as any: in the events, once.
    """
    letter = buried(client, consumer())

    events = [fields[b"j"].decode() for _, fields in redis.xrange(QueueKeys(queue).events)]

    assert [letter.job_id] == events
    assert wait_for(lambda: client.status(letter.job_id).ended)
