"""RENEW, RELEASE, RECLAIM, DISOWN: who holds a job, and how it gets back."""

import asyncio
import contextlib
import time
from typing import Any

from redis import Redis

from pagemill.client import Client
from pagemill.keys import QueueKeys
from pagemill.messages import Checkpoint, Delivery, Renewal, Room
from tests.support.servers import BlockingConsumer, MakeConsumer, a_job, wait_for


def idle_ms(redis: Redis, job: Delivery) -> int:
    """How long ago the entry of a job in a worker's hands was claimed or renewed."""
    entries: Any = redis.xpending_range(job.stream, "workers", job.entry_id, job.entry_id, 1)
    return int(entries[0]["time_since_delivered"])


def claimed_ms(redis: Redis, job: Delivery) -> int:
    """When that was, by the server's clock."""
    seconds, micros = redis.time()
    return int(seconds) * 1000 + int(micros) // 1000 - idle_ms(redis, job)


def lapse(peer: BlockingConsumer) -> None:
    """Sweep until the other worker's job has come back."""
    wait_for(lambda: peer.run(peer.consumer.sweep()).reclaimed)


def test_a_renewed_lease_is_not_taken(client: Client, consumer: MakeConsumer, redis: Redis) -> None:
    """
    Renewing sets the entry's idle time back.
    """
    client.submit(a_job())
    worker = consumer()
    [job] = worker.pull()
    claimed = claimed_ms(redis, job)
    wait_for(lambda: idle_ms(redis, job) > 50)

    renewal = worker.run(worker.consumer.renew([job]))

    assert (Renewal(), True) == (renewal, claimed_ms(redis, job) > claimed + 40)


def test_a_silent_worker_loses_its_jobs(client: Client, consumer: MakeConsumer) -> None:
    """
    After a lease without renewal or heartbeat, any worker gets the job; a lapse counts, and no attempt.
    """
    job_id = client.submit(a_job()).job_id
    consumer(lease_ms=20).pull()
    peer = consumer(lease_ms=20)
    lapse(peer)

    [again] = peer.pull()

    assert (job_id, 1, 1) == (again.job_id, again.attempt, again.lapses)


def test_a_live_owner_keeps_its_jobs(client: Client, consumer: MakeConsumer, redis: Redis) -> None:
    """
    While the heartbeat lives nothing is taken, however long the entry has been idle.
    """
    client.submit(a_job())
    owner, peer = consumer(), consumer(lease_ms=1)
    [job] = owner.pull()
    wait_for(lambda: idle_ms(redis, job) > 20)

    assert 0 == peer.run(peer.consumer.sweep()).reclaimed
    assert Renewal() == owner.run(owner.consumer.renew([job]))


def test_the_living_do_not_hide_the_dead(client: Client, consumer: MakeConsumer, redis: Redis) -> None:
    """
    However many idle entries belong to workers that live, those of a dead one are found in one sweep.
    """
    client.submit_many([a_job(f"{number}") for number in range(4)])
    owner, dead, peer = consumer(), consumer(), consumer(lease_ms=1000)
    owner.pull(max_jobs=3)
    [job] = dead.pull()
    dead.run(dead.consumer.leave())
    wait_for(lambda: idle_ms(redis, job) > 1000)

    # nothing is taken within a lease of the first look at a server that has just been started
    assert 1 == wait_for(lambda: peer.run(peer.consumer.sweep(2)).reclaimed)
    assert [job.job_id] == [one.job_id for one in peer.pull()]


def test_one_sweep_looks_at_all_streams(client: Client, consumer: MakeConsumer, redis: Redis) -> None:
    """
    More tenants have jobs in the hands of a dead worker than one script looks at.
    """
    client.submit_many([a_job(tenant=f"t{number}") for number in range(600)])
    dead, peer = consumer(), consumer(lease_ms=1000)
    held = dead.pull(max_jobs=600)
    dead.run(dead.consumer.leave())
    wait_for(lambda: idle_ms(redis, held[-1]) > 1000)

    # the first sweep that takes any takes them all
    assert 600 == wait_for(lambda: peer.run(peer.consumer.sweep(1000)).reclaimed)


def test_nothing_is_taken_before_a_new_server_was_seen_for_a_lease(
    client: Client, consumer: MakeConsumer, redis: Redis, queue: str
) -> None:
    """
    A replica that takes over has been up for long: what counts is when its run id was first seen.
    """
    client.submit(a_job())
    dead, peer = consumer(), consumer(lease_ms=400)
    dead.pull()
    dead.run(dead.consumer.leave())
    peer.run(peer.consumer.sweep())
    redis.hset(f"{QueueKeys(queue).base}:server", "run_id", "the old master")
    time.sleep(0.5)
    first = peer.run(peer.consumer.sweep()).reclaimed

    lapse(peer)

    since = int(redis.hget(f"{QueueKeys(queue).base}:server", "since"))  # type: ignore[arg-type]
    seconds, micros = redis.time()
    assert (0, True) == (first, seconds * 1000 + micros // 1000 - since >= 400)


def test_nothing_is_taken_before_the_server_was_up_for_a_lease(client: Client, consumer: MakeConsumer) -> None:
    """
    After a restart all leases look old: owners get one lease to renew them.
    """
    client.submit(a_job())
    owner = consumer()
    owner.pull()
    owner.run(owner.consumer.leave())
    peer = consumer(lease_ms=365 * 86_400_000)

    assert 0 == peer.run(peer.consumer.sweep()).reclaimed


def test_a_zombie_hears_that_it_lost(client: Client, consumer: MakeConsumer) -> None:
    """
    A worker that wakes up after its lease is told which jobs are not its any more.
    """
    job_id = client.submit(a_job()).job_id
    zombie, peer = consumer(lease_ms=20), consumer(lease_ms=20)
    [job] = zombie.pull()
    lapse(peer)
    peer.pull()

    assert {job_id} == zombie.run(zombie.consumer.renew([job])).lost


def test_a_zombie_cannot_steal_back(client: Client, consumer: MakeConsumer, redis: Redis) -> None:
    """
    Even a claim that bypasses the scripts gives a job back to nobody but its owner.
    """
    client.submit(a_job())
    zombie, peer = consumer(lease_ms=20), consumer(lease_ms=30_000)
    [old] = zombie.pull()
    sweeper = consumer(lease_ms=20)
    lapse(sweeper)
    [new] = peer.pull()
    redis.xclaim(new.stream, "workers", zombie.worker_id, 0, [new.entry_id])

    assert ["fenced"] == zombie.finish(old)
    assert ["done"] == peer.finish(new)


def test_verdicts_come_with_the_renewal(client: Client, consumer: MakeConsumer) -> None:
    """
    Cancels and passed deadlines reach the worker that runs the job.
    """
    cancelled = client.submit(a_job("one")).job_id
    expired = client.submit(a_job("two", timeout_s=0.5)).job_id
    worker = consumer()
    held = worker.pull()
    client.cancel(cancelled)

    renewal = wait_for(lambda: (found := worker.run(worker.consumer.renew(held))).expired and found)

    assert ({cancelled}, {expired}, set()) == (renewal.cancelled, renewal.expired, renewal.lost)
    worker.finish(*held, status="cancelled")


def test_checkpoints_are_appended(client: Client, consumer: MakeConsumer) -> None:
    """
    What is saved in pieces reaches the next worker in one, with the latest text beside it.
    """
    job_id = client.submit(a_job()).job_id
    worker = consumer()
    [job] = worker.pull()
    for part in (Checkpoint(0, b"\1\0\0\0", "m1"), Checkpoint(4, b"\2\0\0\0", "m2")):
        assert Renewal() == worker.run(worker.consumer.renew([job], {job_id: part}))
    worker.run(worker.consumer.release([job]))

    [again] = worker.pull()

    assert (b"\1\0\0\0\2\0\0\0", "m2") == (again.checkpoint, again.checkpoint_meta)


def test_a_repeated_checkpoint_is_saved_once(client: Client, consumer: MakeConsumer) -> None:
    """
    A renewal whose reply was lost can be sent again.
    """
    job_id = client.submit(a_job()).job_id
    worker = consumer()
    [job] = worker.pull()
    parts = [Checkpoint(0, b"aaaa", "m"), Checkpoint(4, b"bbbb", "m"), Checkpoint(4, b"bbbb", "m")]

    renewals = [worker.run(worker.consumer.renew([job], {job_id: part})) for part in parts]

    worker.run(worker.consumer.release([job]))
    assert ([Renewal()] * 3, b"aaaabbbb") == (renewals, worker.pull()[0].checkpoint)


def test_a_repeated_checkpoint_may_bring_more(client: Client, consumer: MakeConsumer) -> None:
    """
    What a renewal without a reply had saved is told from what came since; another beginning is stale.
    """
    job_id = client.submit(a_job()).job_id
    worker = consumer()
    [job] = worker.pull()
    parts = [Checkpoint(0, b"aaaa", "m"), Checkpoint(4, b"bb", "m"), Checkpoint(4, b"bbcccc", "m")]
    for part in parts:
        assert Renewal() == worker.run(worker.consumer.renew([job], {job_id: part}))

    others = [Checkpoint(4, b"bbccdddd", "m"), Checkpoint(4, b"bbc", "m")]
    stale = [worker.run(worker.consumer.renew([job], {job_id: part})).stale for part in others]

    worker.run(worker.consumer.release([job]))
    assert ([{job_id}] * 2, b"aaaabbcccc") == (stale, worker.pull()[0].checkpoint)


def test_a_checkpoint_elsewhere_is_stale(client: Client, consumer: MakeConsumer) -> None:
    """
    A piece that does not follow what is saved is refused, and sending all from 0 mends it.
    """
    job_id = client.submit(a_job()).job_id
    worker = consumer()
    [job] = worker.pull()
    worker.run(worker.consumer.renew([job], {job_id: Checkpoint(0, b"aaaa", "m")}))

    stale = worker.run(worker.consumer.renew([job], {job_id: Checkpoint(12, b"dddd", "m")})).stale
    worker.run(worker.consumer.renew([job], {job_id: Checkpoint(0, b"aaaabbbbccccdddd", "m")}))

    worker.run(worker.consumer.release([job]))
    assert ({job_id}, b"aaaabbbbccccdddd") == (stale, worker.pull()[0].checkpoint)


def test_many_leases_in_one_call(client: Client, consumer: MakeConsumer) -> None:
    """
    More jobs than one script takes are renewed all the same.
    """
    jobs = [a_job(f"{number}") for number in range(150)]
    client.submit_many(jobs)
    worker = consumer()
    held = worker.pull(max_jobs=150)
    client.cancel(jobs[0].id)
    client.cancel(jobs[-1].id)

    assert {jobs[0].id, jobs[-1].id} == worker.run(worker.consumer.renew(held)).cancelled


def test_a_released_attempt_does_not_count(client: Client, consumer: MakeConsumer) -> None:
    """
    A hand-back is at once another worker's, as if it had never been taken.
    """
    job_id = client.submit(a_job()).job_id
    first, second = consumer(), consumer()
    count = first.run(first.consumer.release(first.pull()))

    [again] = second.pull()

    assert (1, job_id, 1) == (count, again.job_id, again.attempt)


def test_only_the_owner_releases(client: Client, consumer: MakeConsumer) -> None:
    """
    A hand-back by a worker that lost the job, or a repeated one, does nothing.
    """
    client.submit(a_job())
    first, second = consumer(), consumer()
    [job] = first.pull()
    first.run(first.consumer.release([job]))
    second.pull()

    assert 0 == first.run(first.consumer.release([job]))
    assert (0, 1) == (client.stats().queued["standard"], client.stats().running)


def test_a_released_job_with_a_verdict_ends(client: Client, consumer: MakeConsumer) -> None:
    """
    A job cancelled while it ran is not queued again by a hand-back.
    """
    job_id = client.submit(a_job()).job_id
    worker = consumer()
    held = worker.pull()
    client.cancel(job_id)

    worker.run(worker.consumer.release(held))

    assert ("cancelled", []) == (client.result(job_id, wait_s=0).status, worker.pull())


def test_a_cancelled_pull_gives_the_jobs_back(client: Client, consumer: MakeConsumer) -> None:
    """
    A pull that its task gave up, at whatever moment, loses nothing either.
    """
    job_id = client.submit(a_job()).job_id
    worker = consumer()

    async def give_up(after_turns: int) -> None:
        pulling = asyncio.ensure_future(worker.consumer.pull(rooms=[Room(1, 1000)] * 3))
        for _ in range(after_turns):
            await asyncio.sleep(0)
        pulling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            # it was done already, or the cancel was lost on its way
            await worker.consumer.release(await pulling)

    for after_turns in range(25):
        worker.run(give_up(after_turns))
        [job] = wait_for(worker.pull)
        assert (job_id, 1) == (job.job_id, job.attempt)
        worker.run(worker.consumer.release([job]))
