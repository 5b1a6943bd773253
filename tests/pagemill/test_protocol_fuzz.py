"""Whatever several workers do to a queue, every accepted job has exactly one result."""

import random
from collections import Counter
from typing import Literal

import pytest
from redis import Redis

from pagemill.client import Client
from pagemill.keys import QueueKeys
from pagemill.messages import Checkpoint, Delivery
from pagemill.obituary import report_death
from pagemill.schema import LANES
from tests.support.servers import BlockingConsumer, MakeConsumer, a_job, wait_for

NUM_TURNS = 250
LEASE_MS = 30
ACTIONS = ("pull", "pull", "pull", "finish", "finish", "renew", "release", "retry", "bury", "beat", "sweep")


class Fleet:
    """Workers that pull, renew, finish, hand back, put off, bury, crash, fall silent and come back too late."""

    def __init__(self, rng: random.Random, client: Client, make: MakeConsumer, redis: Redis, queue: str) -> None:
        self.rng = rng
        self.client = client
        self.make = make
        self.redis = redis
        self.queue = queue
        self.accepted: list[str] = []
        self.requeued: list[str] = []
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
        action = self.rng.choice(ACTIONS)
        if action == "pull" and not held and self.rng.random() < 0.5:
            held += worker.run(worker.consumer.take_suspects())
        elif action == "pull":
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
        elif action == "bury" and some:
            worker.run(worker.consumer.bury(some[0], why="retries", message="fuzz"))
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
        """A worker is killed with all that it holds, and somebody may know why; another starts."""
        place = self.rng.randrange(len(self.workers))
        self.report(self.workers[place][0], self.rng.choice([None, "lapse", "crash", "crash"]))
        self.workers[place] = (self.make(lease_ms=LEASE_MS), [])

    def accuse(self) -> None:
        """A worker is reported by mistake, and goes on with what it believes to hold."""
        self.report(self.rng.choice(self.workers)[0], self.rng.choice(["lapse", "crash"]))

    def report(self, worker: BlockingConsumer, cause: Literal["lapse", "crash"] | None) -> None:
        if cause is not None:
            report_death(self.client._redis, self.queue, worker.worker_id, cause=cause, why="fuzz")

    def revive(self) -> None:
        """The operator has a dead letter run again."""
        letters = self.client.dead_letters()
        if letters:
            self.requeued.append(self.client.requeue_dead(self.rng.choice(letters).entry_id).job_id)

    def check_counters(self) -> None:
        """The queue's counters are those of the jobs' own states."""
        keys, stats = QueueKeys(self.queue), self.client.stats()
        states = Counter(self.redis.hget(keys.job(job_id), "st") for job_id in self.accepted)
        counted = (sum(stats.queued.values()), stats.running, stats.suspects, stats.delayed)
        assert tuple(states[name] for name in (b"queued", b"running", b"suspect", b"delayed")) == counted
        # the same tokens by tenant
        by_tenant = {lane: self.redis.hvals(keys.waiting(lane)) for lane in LANES}
        assert stats.queued_tokens == {lane: sum(map(int, tokens)) for lane, tokens in by_tenant.items()}

    def drain(self) -> None:
        """Work until every job has ended and every stream is empty."""
        last = self.make(lease_ms=LEASE_MS)

        def turn() -> bool:
            last.run(last.consumer.sweep())
            held = last.run(last.consumer.take_suspects()) or last.pull()
            self.finish(last, [], held)
            stats = self.client.stats()
            return not held and not any((stats.running, stats.delayed, stats.suspects, *stats.queued.values()))

        wait_for(turn, timeout_s=30)


@pytest.mark.parametrize("seed", range(4))
def test_exactly_one_result(seed: int, client: Client, consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    After random submits, cancels, faults, deaths and accusations: one result and one event a run of a job,
    no entry, no lease, and what was given up is among the dead.
    """
    rng = random.Random(seed)
    fleet = Fleet(rng, client, consumer, redis, queue)
    deeds = [fleet.submit, fleet.cancel, fleet.act, fleet.die, fleet.accuse, fleet.revive]
    for turn in range(NUM_TURNS):
        rng.choices(deeds, weights=[10, 3, 80, 4, 1, 2])[0]()
        if turn % 10 == 0:
            fleet.check_counters()
    fleet.drain()

    keys = QueueKeys(queue)
    events = [fields[b"j"].decode() for _, fields in redis.xrange(keys.events)]
    results = [client.result(job_id, wait_s=0) for job_id in fleet.accepted]
    assert sorted(fleet.accepted + fleet.requeued) == sorted(events)
    assert len(set(fleet.published)) == len(fleet.published)
    assert {"done"} == {result.status for result in results if result.job_id in fleet.published}
    streams = redis.keys(f"{keys.base}:s:*")
    assert [0] * len(streams) == [redis.xlen(stream) for stream in streams]
    assert [0] * len(streams) == [redis.xpending(stream, "workers")["pending"] for stream in streams]
    stats = client.stats()
    assert {0} == {*stats.queued.values(), *stats.queued_tokens.values(), stats.running, stats.delayed, stats.suspects}
    ends = sum(stats.totals.get(name, 0) for name in ("done", "failed", "cancelled", "expired"))
    assert len(fleet.accepted) + len(fleet.requeued) == ends
    failed = {result.job_id for result in results if result.status == "failed"}
    assert failed == {letter.job_id for letter in client.dead_letters(1000)}
