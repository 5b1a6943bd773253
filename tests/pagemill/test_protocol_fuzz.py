"""Whatever several workers do to a queue, every accepted job has exactly one result."""

import random
from collections.abc import Callable

import pytest
from redis import Redis

from pagemill.client import Client
from pagemill.keys import QueueKeys
from pagemill.messages import Checkpoint, Delivery
from tests.support.servers import BlockingConsumer, a_job, wait_for

MakeConsumer = Callable[..., BlockingConsumer]
NUM_TURNS = 250
LEASE_MS = 30


class Fleet:
    """Workers that pull, renew, finish, hand back, put off, fall silent and come back too late."""

    def __init__(self, rng: random.Random, client: Client, make: MakeConsumer) -> None:
        self.rng = rng
        self.client = client
        self.make = make
        self.accepted: list[str] = []
        self.published: list[str] = []
        self.workers = [(make(lease_ms=LEASE_MS), list[Delivery]()) for _ in range(3)]

    def submit(self) -> None:
        jobs = [
            a_job(
                f"{len(self.accepted)}-{number}",
                lane=self.rng.choice(["interactive", "standard", "bulk"]),
                tenant=self.rng.choice(["a", "b", "c"]),
                timeout_s=self.rng.choice([None, None, None, 0.02, 5]),
                stream=self.rng.random() < 0.2,
                idempotency_key=f"{len(self.accepted)}-{number}" if self.rng.random() < 0.2 else None,
            )
            for number in range(self.rng.randint(1, 6))
        ]
        accepted = self.client.submit_many(jobs + self.rng.sample(jobs, 1))
        self.accepted += [one.job_id for one in accepted if not one.duplicate]

    def cancel(self) -> None:
        if self.accepted:
            self.client.cancel(self.rng.choice(self.accepted))

    def act(self) -> None:
        """One worker does one thing with some of what it believes to hold."""
        worker, held = self.rng.choice(self.workers)
        some = self.rng.sample(held, self.rng.randint(0, min(4, len(held))))
        action = self.rng.choice(["pull", "pull", "finish", "finish", "renew", "release", "retry", "beat", "sweep"])
        if action == "pull":
            held += worker.pull(max_jobs=self.rng.randint(1, 8), max_tokens=self.rng.choice([30, 200, 1000]))
        elif action == "finish":
            self.finish(worker, held, some)
        elif action == "renew":
            self.renew(worker, held)
        elif action == "release":
            worker.run(worker.consumer.release(some))
            self.drop(held, some)
        elif action == "retry" and some:
            worker.run(worker.consumer.retry(some[0], delay_ms=self.rng.choice([0, 20]), why="fuzz"))
            self.drop(held, some[:1])
        elif action == "beat":
            worker.run(worker.consumer.heartbeat({}))
        elif action == "sweep":
            worker.run(worker.consumer.sweep())

    def finish(self, worker: BlockingConsumer, held: list[Delivery], some: list[Delivery]) -> None:
        outcomes = worker.finish(*some) if some else []
        self.published += [job.job_id for job, outcome in zip(some, outcomes, strict=True) if outcome == "done"]
        # a worker that forgets what it has published tries again: nothing may come of it
        if self.rng.random() < 0.8:
            self.drop(held, some)

    def renew(self, worker: BlockingConsumer, held: list[Delivery]) -> None:
        saved = {job.job_id: Checkpoint(0, b"\0\0\0\0", "m") for job in held if self.rng.random() < 0.3}
        renewal = worker.run(worker.consumer.renew(held, saved))
        over = renewal.cancelled | renewal.expired
        ended = [job for job in held if job.job_id in over]
        self.finish(worker, held, ended)
        # a zombie does not listen
        if self.rng.random() < 0.7:
            self.drop(held, [job for job in held if job.job_id in renewal.lost])

    @staticmethod
    def drop(held: list[Delivery], some: list[Delivery]) -> None:
        gone = {job.entry_id for job in some}
        held[:] = [job for job in held if job.entry_id not in gone]

    def die(self) -> None:
        """A worker is killed with all that it holds; another starts."""
        place = self.rng.randrange(len(self.workers))
        self.workers[place] = (self.make(lease_ms=LEASE_MS), [])

    def drain(self) -> None:
        """Work until every job has ended and every stream is empty."""
        last = self.make(lease_ms=LEASE_MS)

        def turn() -> bool:
            last.run(last.consumer.sweep())
            held = last.pull()
            self.finish(last, [], held)
            stats = self.client.stats()
            return not held and not stats.running and not stats.delayed and not sum(stats.queued.values())

        wait_for(turn, timeout_s=30)


@pytest.mark.parametrize("seed", range(4))
def test_exactly_one_result(seed: int, client: Client, consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    After random submits, cancels, faults and deaths: one result and one event a job, no entry, no lease.
    """
    rng = random.Random(seed)
    fleet = Fleet(rng, client, consumer)
    for _ in range(NUM_TURNS):
        rng.choices([fleet.submit, fleet.cancel, fleet.act, fleet.die], weights=[10, 3, 84, 3])[0]()
    fleet.drain()

    keys = QueueKeys(queue)
    events = [fields[b"j"].decode() for _, fields in redis.xrange(keys.events)]
    results = [client.result(job_id, wait_s=0) for job_id in fleet.accepted]
    assert sorted(fleet.accepted) == sorted(events)
    assert len(set(fleet.published)) == len(fleet.published)
    assert {"done"} == {result.status for result in results if result.job_id in fleet.published}
    streams = redis.keys(f"{keys.base}:s:*")
    assert [0] * len(streams) == [redis.xlen(stream) for stream in streams]
    assert [0] * len(streams) == [redis.xpending(stream, "workers")["pending"] for stream in streams]
    stats = client.stats()
    assert {0} == {*stats.queued.values(), *stats.queued_tokens.values(), stats.running, stats.delayed}
    assert len(fleet.accepted) == sum(stats.totals.get(name, 0) for name in ("done", "failed", "cancelled", "expired"))
