"""Cancelling batches, and races: each job is counted once, as what its result says."""

import random
import threading
from collections.abc import Sequence

import pytest
from redis import Redis

from pagemill.batches import CANCEL_LOOKS
from pagemill.client import Client
from pagemill.errors import BatchClosed
from pagemill.keys import QueueKeys
from pagemill.messages import Delivery, HookDelivery
from pagemill.obituary import report_death
from producers.local_redis import local_redis
from tests.support.batches import batch_events, batch_of, counts
from tests.support.servers import BlockingConsumer, MakeConsumer, a_job, wait_for


def test_cancelling_a_batch_ends_it(client: Client, consumer: MakeConsumer, redis: Redis) -> None:
    """
    What waits ends at once, what runs is told with the next renewal and keeps its text; nothing joins.
    """
    batch_id, _ = batch_of(client, 6, sealed=False)
    worker = consumer()
    running = worker.pull(max_jobs=2)
    worker.run(worker.consumer.retry(running[1], delay_ms=60_000, why="test"))

    status = client.cancel_batch(batch_id)

    assert ("cancelling", (6, 0, 0, 5, 0)) == (status.state, counts(status))
    with pytest.raises(BatchClosed):
        client.submit(a_job(batch=batch_id))
    assert {running[0].job_id} == worker.run(worker.consumer.renew([running[0]])).cancelled
    worker.finish(running[0], status="cancelled", text="so f")
    ended = client.cancel_batch(batch_id)
    assert ("ended", (6, 0, 0, 6, 0), True) == (ended.state, counts(ended), ended.cancel_requested)
    assert "so f" == client.result(running[0].job_id, wait_s=0).text
    assert [] == worker.pull()
    assert 0 == redis.xlen(running[0].stream)
    assert (0, 0) == (client.stats().queued["standard"], client.stats().running)


def test_cancelling_an_ended_batch_changes_nothing(client: Client, consumer: MakeConsumer) -> None:
    """
    An end is sticky.
    """
    batch_id, _ = batch_of(client, 1)
    worker = consumer()
    worker.finish(*worker.pull())
    ended = client.batch_status(batch_id)

    assert ended == client.cancel_batch(batch_id)


def test_a_large_batch_is_cancelled_in_steps(client: Client, consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    5,000 jobs that wait and 50 that run: no call looks at more than a page, and all of them end.
    """
    batch_id, _ = batch_of(client, 5050)
    worker, peer = consumer(), consumer()
    running = worker.pull(max_jobs=50)

    steps = [client.cancel_batch(batch_id).cancelled]
    # meanwhile nothing of it starts any more, and who runs hears of it
    assert [] == peer.pull(max_jobs=1)
    renewal = worker.run(worker.consumer.renew(running))
    while (report := worker.run(worker.consumer.sweep())).cancelling:
        steps.append(report.cancelled)
    worker.finish(*running, status="cancelled")

    status = client.batch_status(batch_id)
    assert {job.job_id for job in running} == renewal.cancelled
    # a page of a hash table is about as long as asked for
    assert max(steps) <= CANCEL_LOOKS + 64
    assert ("ended", (5050, 0, 0, 5050, 0)) == (status.state, counts(status))
    assert not redis.exists(f"{QueueKeys(queue).base}:cancelling")


def test_a_handed_back_job_of_a_cancelled_batch_ends(client: Client, consumer: MakeConsumer) -> None:
    """
    It does not wait for the next pull.
    """
    batch_id, _ = batch_of(client, 1)
    worker = consumer()
    jobs = worker.pull()
    client.cancel_batch(batch_id)

    worker.run(worker.consumer.release(jobs))

    assert (1, 0, 0, 1, 0) == counts(client.batch_status(batch_id))


def test_a_batch_is_cancelled_although_the_server_is_full() -> None:
    """
    Out of memory, a batch can be sealed or cancelled, its jobs give theirs back, and its end is told.
    """
    with local_redis() as url, Client(url) as client, Redis.from_url(url) as redis:
        sealed, _ = batch_of(client, 1, sealed=False, webhook="https://example.org/")
        cancelled, jobs = batch_of(client, 600)
        worker = BlockingConsumer(url, "default")
        redis.config_set("maxmemory", "100kb")

        client.seal_batch(sealed)
        client.cancel_batch(cancelled)
        while worker.run(worker.consumer.sweep()).cancelling:
            pass
        worker.finish(*worker.pull())

        assert (600, 1) == (client.batch_status(cancelled).cancelled, client.batch_status(sealed).done)
        assert not redis.exists(f"{QueueKeys('default').base}:d:{jobs[0].id}")
        [due] = worker.run(worker.consumer.take_hooks(8, hold_ms=60_000))
        assert (sealed, "delivered") == (
            due.batch_id,
            worker.run(worker.consumer.settle_hook(sealed, HookDelivery("delivered"))),
        )
        worker.close()


def test_a_suspect_of_a_cancelled_batch_ends(client: Client, consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    What waits to run apart from others is cancelled as what waits in its lane.
    """
    batch_id, _ = batch_of(client, 4)
    crashed = consumer()
    crashed.pull()
    report_death(redis, queue, crashed.worker_id, cause="crash", why="test")
    assert 4 == client.stats().suspects

    client.cancel_batch(batch_id)

    assert ("ended", (4, 0, 0, 4, 0)) == ((ended := client.batch_status(batch_id)).state, counts(ended))
    assert 0 == client.stats().suspects


def test_a_dead_letter_that_is_requeued_joins_its_batch_again(
    client: Client, consumer: MakeConsumer, redis: Redis, queue: str
) -> None:
    """
    While the batch waits for others it waits for this one too; once it has ended its counts stay.
    """
    batch_id, jobs = batch_of(client, 3)
    worker = consumer()
    held = worker.pull()
    for job in held[:2]:
        worker.run(worker.consumer.bury(job, why="retries", message="test"))
    first, second = client.dead_letters()

    client.requeue_dead(first.entry_id)

    assert ((3, 0, 1, 0, 0), 2) == (counts(status := client.batch_status(batch_id)), status.num_open)
    worker.finish(held[2])
    worker.finish(*worker.pull())
    client.requeue_dead(second.entry_id)
    worker.finish(*worker.pull())
    assert ("ended", (3, 2, 1, 0, 0)) == ((ended := client.batch_status(batch_id)).state, counts(ended))
    assert {"done"} == {client.result(job.id, wait_s=0).status for job in jobs}
    assert [(3, 3)] == batch_events(redis, queue, "ended")


def test_cancels_and_finishes_race_to_one_result(
    client: Client, consumer: MakeConsumer, server_url: str, queue: str
) -> None:
    """
    In 1,000 races of a cancel with a finish each job ends once, as one of the two, and is counted as that.
    """
    batch_id, jobs = batch_of(client, 1000)
    worker = consumer()
    rng = random.Random(5)
    pulled: list[Delivery] = []
    while more := worker.pull(max_jobs=64, max_tokens=10_000_000):
        pulled += more
    rng.shuffle(pulled)
    groups = [pulled[start : start + 8] for start in range(0, 1000, 8)]
    # both sides begin each group together
    gate = threading.Barrier(2, timeout=30)
    racer = threading.Thread(target=_cancel_all, args=(server_url, queue, groups, gate))
    racer.start()
    for some in groups:
        gate.wait()
        told = worker.run(worker.consumer.renew(some)).cancelled
        worker.finish(*(job for job in some if job.job_id not in told))
        worker.finish(*(job for job in some if job.job_id in told), status="cancelled")
    racer.join(60)

    status = client.batch_status(batch_id)
    results = [client.result(job.id, wait_s=0).status for job in jobs]
    assert ("ended", 1000) == (status.state, status.done + status.cancelled)
    assert (status.done, status.cancelled) == (results.count("done"), results.count("cancelled"))
    # else it was no race
    assert 0 < min(status.done, status.cancelled)


def _cancel_all(url: str, queue: str, groups: Sequence[Sequence[Delivery]], gate: threading.Barrier) -> None:
    with Client(url, queue=queue) as other:
        for some in groups:
            gate.wait()
            for job in some:
                other.cancel(job.job_id)


class Races:
    """Everything that can happen to the jobs of a batch, in an order drawn from a seed."""

    def __init__(self, seed: int, client: Client, make: MakeConsumer, redis: Redis, queue: str) -> None:
        self.rng = random.Random(seed)
        self.client = client
        self.make = make
        self.redis, self.queue = redis, queue
        self.batch_id = client.create_batch().batch_id
        self.ids: list[str] = []
        self.workers = [(make(lease_ms=20), list[Delivery]()) for _ in range(3)]

    def submit(self) -> None:
        jobs = [
            a_job(f"{len(self.ids)}-{n}", batch=self.batch_id, timeout_s=self.rng.choice([None, None, 0.02]))
            for n in range(self.rng.randint(1, 8))
        ]
        try:
            self.client.submit_many(jobs + self.rng.sample(jobs, 1))
        except BatchClosed:
            return
        self.ids += [job.id for job in jobs]

    def act(self) -> None:
        worker, held = self.rng.choice(self.workers)
        some = self.rng.sample(held, min(4, len(held)))
        action = self.rng.choice(["pull", "finish", "finish", "release", "retry", "renew", "sweep", "bury", "die"])
        if action == "pull":
            held += worker.pull(max_jobs=self.rng.randint(1, 8))
            held += [] if held else worker.run(worker.consumer.take_suspects())
            return
        if action == "finish" and some:
            worker.finish(*some, status=self.rng.choice(["done", "done", "failed", "cancelled"]))
        elif action == "release":
            worker.run(worker.consumer.release(some))
        elif action == "retry" and some:
            worker.run(worker.consumer.retry(some[0], delay_ms=5, why="race"))
        elif action == "renew":
            worker.run(worker.consumer.renew(held))
        elif action == "sweep":
            worker.run(worker.consumer.sweep())
        elif action == "bury" and some:
            worker.run(worker.consumer.bury(some[0], why="retries", message="race"))
        elif action == "die" and self.rng.random() < 0.4:
            self.die()
            return
        if self.rng.random() < 0.7:
            held[:] = [job for job in held if job not in some]

    def die(self) -> None:
        """A worker is gone: its peers find out by its lease, or its supervisor tells."""
        place = self.rng.randrange(3)
        worker, _ = self.workers[place]
        if self.rng.random() < 0.7:
            report_death(self.redis, self.queue, worker.worker_id, cause="crash", why="race")
        self.workers[place] = (self.make(lease_ms=20), [])

    def requeue(self) -> None:
        letters = self.client.dead_letters()
        if letters and not self.client.batch_status(self.batch_id).cancel_requested:
            self.client.requeue_dead(self.rng.choice(letters).entry_id)

    def cancel_one(self) -> None:
        if self.ids:
            self.client.cancel(self.rng.choice(self.ids))

    def drain(self) -> None:
        last = self.make(lease_ms=20)

        def turn() -> bool:
            last.run(last.consumer.sweep())
            last.finish(*last.pull(), *last.run(last.consumer.take_suspects()))
            return self.client.batch_status(self.batch_id).ended

        wait_for(turn, timeout_s=30)


@pytest.mark.parametrize("seed", range(6))
def test_counts_always_add_up(seed: int, client: Client, consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    After random races of finish, cancel, expiry, retry, hand-back, reclaim, crash, burial and requeue,
    of single jobs and of the batch, each job is counted once, as what its result says, and the batch
    has ended once.
    """
    races = Races(seed, client, consumer, redis, queue)
    for turn in range(150):
        races.rng.choices([races.submit, races.act, races.requeue, races.cancel_one], weights=[6, 24, 2, 1])[0]()
        status = client.batch_status(races.batch_id)
        assert 0 <= status.num_open <= status.total == len(races.ids)
        if turn == 120:
            (client.cancel_batch if seed % 2 else client.seal_batch)(races.batch_id)
    races.drain()

    status = client.batch_status(races.batch_id)
    results = [client.result(job_id, wait_s=0).status for job_id in races.ids]
    words = ("done", "failed", "cancelled", "expired")
    assert [results.count(word) for word in words] == [getattr(status, word) for word in words]
    assert [(len(races.ids), len(races.ids))] == batch_events(redis, queue, "ended")
