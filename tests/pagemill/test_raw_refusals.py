"""REFUSE_RAW: raw entries that never become jobs, kept with their bytes, and how they get another try."""

import json

import pytest
from redis import Redis

from pagemill.client import Client
from pagemill.errors import InvalidJob
from pagemill.keys import QueueKeys
from pagemill.messages import Accepted
from pagemill.raw import MAX_ENTRY_BYTES, MAX_READERS
from tests.support.raw_entries import adopt, dead_letters, in_stream, refuse, take, write
from tests.support.servers import MakeConsumer, a_job


def test_a_full_server_still_refuses_garbage(consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    An entry that moves to the dead letters takes no more memory there.
    """
    worker = consumer()
    write(redis, queue, b"garbage")
    [entry] = take(worker)
    redis.config_set("maxmemory", "100kb")
    try:
        refused = refuse(worker, entry, entry.job_id)
    finally:
        redis.config_set("maxmemory", "0")

    assert (1, (0, 0)) == (refused, in_stream(redis, queue))


def test_garbage_is_kept_with_its_bytes(client: Client, consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    The dead letters hold what was written and why it is no job; whoever waits for the job hears of it.
    """
    worker = consumer()
    garbage = b"\x00\xff not a job\r\n"
    why = 'no JSON: "\x00" \u2028\n'
    write(redis, queue, garbage)
    [entry] = take(worker)

    assert [1, 0] == [refuse(worker, entry, entry.job_id, why) for _ in range(2)]

    [letter] = dead_letters(redis, queue)
    assert (b"garbage", why.encode(), garbage) == (letter[b"why"], letter[b"msg"], letter[b"raw"])
    assert (entry.job_id, worker.worker_id) == (letter[b"j"].decode(), letter[b"worker"].decode())
    result = client.result(entry.job_id)
    assert ("failed", why) == (result.status, result.failure.message if result.failure else None)
    status = client.status(entry.job_id)
    assert ("failed", 0) == (status.state, status.attempt)
    assert (0, 0) == in_stream(redis, queue)


def test_garbage_that_names_a_job_of_the_queue_leaves_it_alone(
    client: Client, consumer: MakeConsumer, redis: Redis, queue: str
) -> None:
    """
    Nobody can end another's job with a bad entry of its name.
    """
    worker = consumer()
    client.submit(a_job(id="good"))
    write(redis, queue, b'{"id": "good"}')
    [entry] = take(worker)

    refuse(worker, entry, "good")

    assert "queued" == client.status("good").state
    assert 1 == len(dead_letters(redis, queue))


def test_fields_that_are_no_job_are_kept_by_line(consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    An entry with other fields than d is kept as names and values.
    """
    worker = consumer()
    redis.xadd(QueueKeys(queue).raw, {"prompt": "Why?", "lane": b"\xff"})
    [entry] = take(worker)

    refuse(worker, entry, entry.job_id)

    assert (None, b"prompt\nWhy?\nlane\n\xff") == (entry.payload, dead_letters(redis, queue)[0][b"raw"])


def test_an_entry_that_is_too_large_reaches_no_worker(
    client: Client, consumer: MakeConsumer, redis: Redis, queue: str
) -> None:
    """
    It goes from the stream to the dead letters inside the server; the next entry is served.
    """
    worker = consumer()
    take(worker)
    large = write(redis, queue, b"x" * MAX_ENTRY_BYTES)
    good = write(redis, queue)

    entries = take(worker)

    assert [good] == [entry.entry_id for entry in entries]
    [letter] = dead_letters(redis, queue)
    assert MAX_ENTRY_BYTES == len(letter[b"raw"])
    failure = client.result(f"raw-{large}").failure
    assert "payload_too_large" == (failure.code if failure else None)
    adopt(worker, *entries)


def test_an_entry_that_readers_die_of_is_given_up(consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    After a few readers that died with an entry in hand nobody gets it any more.
    """
    write(redis, queue, b"deadly")
    taken = []
    for _ in range(MAX_READERS + 1):
        reader = consumer()
        taken.append(len(take(reader)))
        redis.delete(reader.consumer.keys.worker(reader.worker_id))

    assert [1] * MAX_READERS + [0] == taken
    [letter] = dead_letters(redis, queue)
    assert (b"deadly", b"3 workers died with the entry, and it is given up") == (letter[b"raw"], letter[b"msg"])


def test_a_refusal_for_want_of_room_counts_as_no_death(consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    An entry may wait for room in the hands of any number of workers that come and go.
    """
    write(redis, queue, id="first")
    write(redis, queue, id="second")
    for _ in range(2 * MAX_READERS):
        reader = consumer()
        adopt(reader, *take(reader), limit=1)
        redis.delete(reader.consumer.keys.worker(reader.worker_id))
    last = consumer()

    assert ["second"] == [json.loads(entry.payload or b"")["id"] for entry in take(last)]
    adopt(last, *take(last))


def test_a_refused_entry_can_be_put_back(client: Client, consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    Its dead letter becomes an entry again, and the job that it then is has the id that it had.
    """
    worker = consumer()
    entry_id = write(redis, queue)
    [entry] = take(worker)
    refuse(worker, entry, entry.job_id, "no worker knows it")
    [letter] = client.dead_letters()

    accepted = client.requeue_dead(letter.entry_id)
    [again] = take(worker)
    adopt(worker, again)
    [delivery] = worker.pull()

    assert (f"raw-{entry_id}", False) == (accepted.job_id, accepted.duplicate)
    assert (accepted.job_id, entry.payload) == (again.job_id, again.payload)
    assert accepted.job_id == delivery.job_id
    assert ([], "running") == (client.dead_letters(), client.status(accepted.job_id).state)
    worker.finish(delivery)
    assert "done" == client.result(accepted.job_id).status


def test_what_never_was_one_field_is_not_put_back(
    client: Client, consumer: MakeConsumer, redis: Redis, queue: str
) -> None:
    """
    Its letter keeps what it says, and not how to write it again.
    """
    worker = consumer()
    redis.xadd(QueueKeys(queue).raw, {"job": b"{}"})
    [entry] = take(worker)
    refuse(worker, entry, entry.job_id)
    [letter] = client.dead_letters()

    with pytest.raises(InvalidJob):
        client.requeue_dead(letter.entry_id)


def test_the_id_of_a_refused_entry_can_be_used_again(
    client: Client, consumer: MakeConsumer, redis: Redis, queue: str
) -> None:
    """
    A program that mends its job need not think of another name for it.
    """
    worker = consumer()
    write(redis, queue, b'{"id": "row-7", "promt": "Why?"}')
    refuse(worker, *take(worker), "row-7")
    assert "failed" == client.result("row-7").status

    write(redis, queue, id="row-7")
    [answer] = adopt(worker, *take(worker))
    worker.finish(*worker.pull())

    assert Accepted("row-7", "queued", duplicate=False) == answer
    assert "done" == client.result("row-7").status
