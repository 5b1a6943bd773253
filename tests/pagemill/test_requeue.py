"""REQUEUE beside what has happened since: other jobs of the same name, calls that come twice."""

from collections.abc import Callable
from typing import Any

import pytest
from redis import Redis

from pagemill.client import Client
from pagemill.dead_letters import DeadLetter
from pagemill.errors import JobNotFound
from pagemill.keys import QueueKeys, idempotency_name
from tests.support.raw_entries import adopt, in_stream, refuse, take, write
from tests.support.servers import BlockingConsumer, MakeConsumer, a_job

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _settings(server_url: str, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_REDIS_URL", server_url)
    monkeypatch.setenv("PAGEMILL_QUEUE", queue)


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


def test_a_second_requeue_tells_how_the_job_is(client: Client, consumer: MakeConsumer) -> None:
    """
    Whoever repeats a call whose reply was lost hears of the job that it began, and begins no other.
    """
    worker = consumer()
    letter = buried(client, worker)
    first = client.requeue_dead(letter.entry_id)
    waiting = client.requeue_dead(letter.entry_id)
    worker.finish(*worker.pull())
    ended = client.requeue_dead(letter.entry_id)

    found = [(one.job_id, one.state, one.duplicate) for one in (first, waiting, ended)]
    assert [
        (letter.job_id, "queued", False),
        (letter.job_id, "queued", True),
        (letter.job_id, "done", True),
    ] == found
    assert (1, []) == (client.stats().totals["requeued"], worker.pull())


def test_a_raw_entry_is_put_back_once(client: Client, consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    Also while nobody has adopted it, and the refusal still stands under its name.
    """
    worker = consumer()
    write(redis, queue)
    [entry] = take(worker)
    refuse(worker, entry, entry.job_id)
    [letter] = client.dead_letters()

    answers = [client.requeue_dead(letter.entry_id) for _ in range(2)]

    assert [(entry.job_id, "queued", again) for again in (False, True)] == [
        (one.job_id, one.state, one.duplicate) for one in answers
    ]
    assert (1, 0) == in_stream(redis, queue)
    adopt(worker, *take(worker))
    assert "queued" == client.requeue_dead(letter.entry_id).state
    worker.finish(*worker.pull())


def test_what_was_requeued_long_ago_is_not_found(
    client: Client, consumer: MakeConsumer, redis: Redis, queue: str
) -> None:
    """
    What became of a letter is known for an hour.
    """
    letter = buried(client, consumer())
    client.requeue_dead(letter.entry_id)
    known = f"{QueueKeys(queue).base}:rq:{letter.entry_id}"
    assert 3500 < redis.ttl(known) <= 3600
    redis.delete(known)

    with pytest.raises(JobNotFound, match="it was requeued"):
        client.requeue_dead(letter.entry_id)


def test_all_goes_on_where_a_letter_is_gone(
    run: Run, client: Client, consumer: MakeConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Another operator may purge one after `requeue --all` has seen it: the others run, and it says so.
    """
    worker = consumer()
    first, second = buried(client, worker), buried(client, worker, prompt="b")
    read = Client.dead_letters

    def read_and_lose(self: Client, limit: int = 100, after: str = "-") -> list[DeadLetter]:
        letters = read(self, limit, after)
        client.purge_dead([first.entry_id])
        return letters

    monkeypatch.setattr(Client, "dead_letters", read_and_lose)
    code, shown, told = run("dead", "requeue", "--all")

    assert (0, f"{second.job_id} queued\n") == (code, shown)
    assert f"no dead letter {first.entry_id}" in told


def test_all_has_raw_entries_judged_anew(
    run: Run, client: Client, consumer: MakeConsumer, redis: Redis, queue: str
) -> None:
    """
    `requeue --all` puts back the entries that can be, and leaves what never was one.
    """
    worker = consumer()
    write(redis, queue)
    redis.xadd(QueueKeys(queue).raw, {"job": b"{}"})
    entries = take(worker)
    for entry in entries:
        refuse(worker, entry, entry.job_id)

    assert (0, f"{entries[0].job_id} queued\n", "") == run("dead", "requeue", "--all")

    assert [entries[1].job_id] == [letter.job_id for letter in client.dead_letters()]
    assert [entries[0].payload] == [entry.payload for entry in take(worker)]
