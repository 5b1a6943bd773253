"""TAKE_RAW, ADOPT, REFUSE_RAW: jobs that any program wrote, each once."""

import threading
import time

from redis import Redis

from pagemill.client import Client
from pagemill.errors import Busy, Conflict
from pagemill.keys import QueueKeys
from pagemill.messages import Accepted
from pagemill.raw import TAKE_LOOKS, Taken
from pagemill.schema import MAX_PAYLOAD_BYTES
from tests.support.raw_entries import adopt, in_stream, take, write
from tests.support.servers import MakeConsumer, a_job, wait_for


def test_an_entry_becomes_a_job(client: Client, consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    One XADD is enough: the job gets the entry's id, and the entry goes.
    """
    worker = consumer()
    entry_id = write(redis, queue, lane="interactive", tenant="acme", timeout_s=60)

    [answer] = adopt(worker, *take(worker))
    [delivery] = worker.pull()

    assert Accepted(f"raw-{entry_id}", "queued", duplicate=False) == answer
    assert (f"raw-{entry_id}", "interactive", "acme") == (delivery.job_id, delivery.lane, delivery.tenant)
    assert delivery.deadline_ms == delivery.accepted_ms + 60_000
    assert (0, 0) == in_stream(redis, queue)
    assert ["done"] == worker.finish(delivery)
    assert "answer" == client.text(f"raw-{entry_id}")


def test_an_entry_stays_until_it_is_dealt_with(consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    A reply that is lost loses no entry: what was taken comes again until it is adopted, and once.
    """
    worker = consumer()
    write(redis, queue)

    first, again = take(worker), take(worker)

    assert first == again
    assert [True, False] == [isinstance(adopt(worker, *first)[0], Accepted) for _ in range(2)]
    assert [] == take(worker)
    assert 1 == len(worker.pull())


def test_what_nobody_has_adopted_is_counted(client: Client, consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    The queue's counters tell how many raw entries there are, read or not.
    """
    worker = consumer()
    write(redis, queue)
    take(worker)
    write(redis, queue)

    before = client.stats().raw
    adopt(worker, *take(worker))

    assert (2, 0) == (before, client.stats().raw)


def test_two_workers_share_the_stream(consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    An entry is in one living worker's hands.
    """
    one, two = consumer(), consumer()
    write(redis, queue)

    assert (1, 0, 1) == (len(take(one)), len(take(two)), len(take(one)))


def test_entries_of_a_dead_reader_are_taken_over(consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    When a reader's heartbeat is gone, its entries are the next one's at once; late, it adopts nothing.
    """
    dead, heir = consumer(), consumer()
    write(redis, queue)
    held = take(dead)
    redis.delete(dead.consumer.keys.worker(dead.worker_id))

    assert held == take(heir)
    assert isinstance(adopt(heir, *held)[0], Accepted)
    assert [None] == adopt(dead, *held)
    assert 1 == len(heir.pull())


def test_two_that_hold_an_entry_make_one_job(consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    A worker that was paused and taken for dead may adopt first: the heir finds the entry gone.
    """
    paused, heir = consumer(), consumer()
    write(redis, queue)
    held = take(paused)
    redis.delete(paused.consumer.keys.worker(paused.worker_id))
    take(heir)

    assert isinstance(adopt(paused, *held)[0], Accepted)
    assert [None] == adopt(heir, *held)
    assert 1 == len(heir.pull())


def test_entries_deleted_behind_our_back_leave_the_pending_list(
    consumer: MakeConsumer, redis: Redis, queue: str
) -> None:
    """
    An entry without a body, one's own or a dead reader's, is dropped: 6.2 would keep it pending.
    """
    dead, worker = consumer(), consumer()
    of_the_dead = write(redis, queue)
    take(dead)
    own = write(redis, queue)
    take(worker)
    redis.delete(dead.consumer.keys.worker(dead.worker_id))
    redis.xdel(QueueKeys(queue).raw, of_the_dead, own)

    assert [] == take(worker)
    assert (0, 0) == in_stream(redis, queue)


def test_a_lost_group_is_made_again(consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    What was written before the group was lost is still read.
    """
    worker = consumer()
    take(worker)
    redis.delete(QueueKeys(queue).raw)
    entry_id = write(redis, queue)

    assert [entry_id] == [entry.entry_id for entry in take(worker)]
    adopt(worker, *take(worker))


def test_waiting_survives_a_lost_group(consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    A wait at a stream that is not there returns, and the next take makes it.
    """
    worker = consumer()

    worker.run(worker.consumer.raw.wait(0.05))
    take(worker)

    assert 1 == redis.exists(QueueKeys(queue).raw)


def test_the_same_job_twice_is_one_job(consumer: MakeConsumer, redis: Redis, queue: str, client: Client) -> None:
    """
    A program that is not sure whether its XADD arrived repeats it with the same id, or the same key.
    """
    worker = consumer()
    for _ in range(2):
        write(redis, queue, id="row-7")
        write(redis, queue, idempotency_key="night/8")

    answers = adopt(worker, *take(worker))

    assert [False, False, True, True] == [answer.duplicate for answer in answers if isinstance(answer, Accepted)]
    assert (0, 0) == in_stream(redis, queue)
    assert 2 == len(worker.pull())
    assert 2 == client.stats().totals["accepted"]


def test_a_job_of_the_client_and_the_same_raw_one_are_one(
    client: Client, consumer: MakeConsumer, redis: Redis, queue: str
) -> None:
    """
    It does not matter by which way a job comes the second time.
    """
    worker = consumer()
    client.submit(a_job(id="both"))
    write(redis, queue, a_job(id="both").payload())

    [answer] = adopt(worker, *take(worker))

    assert Accepted("both", "queued", duplicate=True) == answer


def test_another_job_under_the_same_id_is_a_conflict(consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    The entry stays, for it has to be refused with its bytes.
    """
    worker = consumer()
    write(redis, queue, id="row-7")
    write(redis, queue, id="row-7", tenant="other")

    first, second = adopt(worker, *take(worker))

    assert (True, True) == (isinstance(first, Accepted), isinstance(second, Conflict))
    assert (1, 1) == in_stream(redis, queue)


def test_what_the_queue_has_no_room_for_stays(consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    Above the limit of waiting tokens an entry is left where it is, and adopted when there is room.
    """
    worker = consumer()
    write(redis, queue, options={"max_tokens": 100})
    write(redis, queue, options={"max_tokens": 100})

    first, second = adopt(worker, *take(worker), limit=150)
    worker.finish(*worker.pull())

    assert (True, True) == (isinstance(first, Accepted), isinstance(second, Busy))
    assert isinstance(adopt(worker, *take(worker), limit=150)[0], Accepted)
    worker.finish(*worker.pull())


def test_a_full_server_keeps_the_entries(consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    Without memory for the job there is no adoption, and no loss.
    """
    worker = consumer()
    write(redis, queue)
    entries = take(worker)
    redis.config_set("maxmemory", "100kb")
    try:
        [answer] = adopt(worker, *entries)
    finally:
        redis.config_set("maxmemory", "0")

    assert isinstance(answer, Busy)
    assert entries == take(worker)
    assert isinstance(adopt(worker, *entries)[0], Accepted)


def test_one_call_takes_a_bounded_number(consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    A call stops after so many entries, and after so many bytes.
    """
    worker = consumer()
    take(worker)
    for _ in range(TAKE_LOOKS + 1):
        write(redis, queue)
    many = take(worker)
    adopt(worker, *many)
    adopt(worker, *take(worker))
    for _ in range(4):
        write(redis, queue, prompt="x" * (MAX_PAYLOAD_BYTES * 3 // 8))

    assert (TAKE_LOOKS, 3) == (len(many), len(take(worker)))
    while entries := take(worker):
        adopt(worker, *entries)


def test_what_waits_in_hand_is_looked_at_by_turns(consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    However much waits for room, each call brings new entries too, and each waiting one has its turn.
    """
    worker = consumer()
    take(worker)
    waiting = {write(redis, queue) for _ in range(2 * TAKE_LOOKS)}
    while in_stream(redis, queue)[1] < len(waiting):
        assert take(worker)
    late = write(redis, queue)

    first = worker.run(worker.consumer.raw.take())
    seen = {entry.entry_id for _ in range(5) for entry in take(worker)}

    assert (late, 1) == (first.entries[-1].entry_id, first.num_new)
    assert waiting | {late} == seen
    while entries := take(worker):
        adopt(worker, *entries)


def test_new_entries_can_be_left_alone(consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    While there is no room for anybody, nothing more is taken into one's hands.
    """
    worker = consumer()
    write(redis, queue)
    held = take(worker)
    write(redis, queue)

    assert Taken(held, 0) == worker.run(worker.consumer.raw.take(with_new=False))
    assert (2, 1) == in_stream(redis, queue)
    adopt(worker, *take(worker))


def test_the_job_may_be_named_beside_it(consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    A second field gives the id of a job that says none; one that is no name is as none.
    """
    worker = consumer()
    named, unnamed = (
        redis.xadd(QueueKeys(queue).raw, {"d": b'{"prompt": "x"}', "id": name}).decode() for name in ("row-7", "a b")
    )

    entries = take(worker)

    assert [(named, "row-7"), (unnamed, f"raw-{unnamed}")] == [(entry.entry_id, entry.job_id) for entry in entries]
    adopt(worker, *entries)


def test_readers_that_left_are_removed(consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    The sweep forgets consumers that hold nothing, and keeps those that hold entries.
    """
    gone, holding, sweeper = consumer(lease_ms=100), consumer(lease_ms=100), consumer(lease_ms=100)
    take(gone)
    write(redis, queue)
    take(holding)

    def readers() -> list[str]:
        sweeper.run(sweeper.consumer.sweep())
        return [row["name"].decode() for row in redis.xinfo_consumers(QueueKeys(queue).raw, "workers")]

    wait_for(lambda: [holding.worker_id] == readers())
    adopt(holding, *take(holding))


def test_a_wait_ends_with_the_entry(consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    Whoever waits hears of an entry at once, and what woke it is not lost.
    """
    worker = consumer()
    take(worker)
    timer = threading.Timer(0.1, write, (redis, queue))
    timer.start()
    started = time.monotonic()

    worker.run(worker.consumer.raw.wait(10.0))

    assert time.monotonic() - started < 5
    assert 1 == len(take(worker))
    adopt(worker, *take(worker))
