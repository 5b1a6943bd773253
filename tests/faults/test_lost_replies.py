"""
The server carries a script out and its reply never arrives: nothing is lost, nothing is doubled.

Each script in turn, through a proxy that cuts the connection between the command and its reply.
"""

from typing import Any

import pytest
from redis import Redis

from pagemill.calls import PULL_LOOKS
from pagemill.client import Client
from pagemill.errors import QueueUnavailable
from pagemill.keys import QueueKeys
from pagemill.messages import Checkpoint, Renewal, TokenDelta
from tests.support.servers import MakeConsumer, a_job, num_entries, wait_for
from tests.support.tcp_proxy import TcpProxy, lose_replies_of

pytestmark = pytest.mark.usefixtures("known_scripts")


def test_a_submit_without_a_reply_is_one_job(proxy: TcpProxy, far_client: Client, redis: Redis, queue: str) -> None:
    """
    The client sends it again by itself, and one job is in the queue.
    """
    lose_replies_of(proxy, "submit")
    accepted = far_client.submit(a_job())

    assert (True, 1, 1) == (accepted.duplicate, num_entries(redis, queue), proxy.num_replies_lost)
    assert 1 == far_client.stats().queued["standard"]


def test_a_pipeline_without_a_reply_is_each_job_once(
    proxy: TcpProxy, far_client: Client, redis: Redis, queue: str
) -> None:
    """
    Of a pipeline the whole is sent again.
    """
    jobs = [a_job(f"{number}") for number in range(100)]
    lose_replies_of(proxy, "submit")
    accepted = far_client.submit_many(jobs)

    assert ([job.id for job in jobs], 100) == ([one.job_id for one in accepted], num_entries(redis, queue))
    assert 1 == proxy.num_replies_lost


def test_a_pull_without_a_reply_is_handed_back(proxy: TcpProxy, far_consumer: MakeConsumer, client: Client) -> None:
    """
    The call fails; what it had claimed is handed back by the next one, costs no attempt, and nothing else is.
    """
    client.submit(a_job("known"))
    worker = far_consumer()
    [known] = worker.pull()
    job_id = client.submit(a_job()).job_id
    lose_replies_of(proxy, "pull")
    with pytest.raises(QueueUnavailable):
        worker.pull()
    assert "running" == client.status(job_id).state

    lose_replies_of(proxy, "disown")
    [job] = worker.pull()

    assert (job_id, 1, 2) == (job.job_id, job.attempt, proxy.num_replies_lost)
    assert 2 == client.stats().running
    assert Renewal() == worker.run(worker.consumer.renew([known, job]))


def test_a_pull_on_a_dead_connection_is_given_up(proxy: TcpProxy, far_consumer: MakeConsumer, client: Client) -> None:
    """
    A connection that stays open and dead is given up after the time-out.
    """
    job_id = client.submit(a_job()).job_id
    worker = far_consumer(timeout_s=1.5)
    lose_replies_of(proxy, "pull", silently=True)
    with pytest.raises(QueueUnavailable, match=r"1\.5 s"):
        worker.pull()

    assert [(job_id, 1)] == [(job.job_id, job.attempt) for job in worker.pull()]


def test_a_pull_that_arrives_late_claims_nothing(proxy: TcpProxy, far_consumer: MakeConsumer, client: Client) -> None:
    """
    A call that was given up, and reaches the server after the next one, claims nothing.
    """
    worker = far_consumer(timeout_s=1.5)
    proxy.strand()
    with pytest.raises(QueueUnavailable):
        worker.pull()
    assert [] == worker.pull()
    client.submit(a_job())

    proxy.heal()
    wait_for(lambda: "1 open" in repr(proxy))

    assert 0 == client.stats().running
    assert 1 == len(worker.pull())


def test_a_pull_that_fails_halfway_gives_all_back(proxy: TcpProxy, far_consumer: MakeConsumer, client: Client) -> None:
    """
    Where a later script of one pull gets no reply, the next pull has also what the earlier ones had claimed.
    """
    jobs = [a_job(f"{number}") for number in range(PULL_LOOKS + 6)]
    client.submit_many(jobs)
    worker = far_consumer()
    # one script a look
    lose_replies_of(proxy, "pull", after=1)
    with pytest.raises(QueueUnavailable):
        worker.pull(max_jobs=len(jobs))
    assert len(jobs) == client.stats().running

    again = worker.pull(max_jobs=len(jobs))

    assert sorted((job.id, 1) for job in jobs) == sorted((job.job_id, job.attempt) for job in again)


def test_a_repeated_checkpoint_is_saved_once(
    proxy: TcpProxy, far_consumer: MakeConsumer, client: Client, redis: Redis, queue: str
) -> None:
    """
    A repeated checkpoint is saved once, and the leases are as after one call.
    """
    job_id = client.submit(a_job()).job_id
    worker = far_consumer()
    [job] = worker.pull()
    renewals = []
    for number, saved in enumerate((b"abcd", b"efgh", b"ijkl")):
        lose_replies_of(proxy, "renew")
        checkpoint = Checkpoint(4 * number, saved, "meta")
        renewals.append(worker.run(worker.consumer.renew([job], {job_id: checkpoint})))

    assert ([Renewal()] * 3, 3) == (renewals, proxy.num_replies_lost)
    assert b"abcdefghijkl" == redis.get(f"{QueueKeys(queue).base}:ck:{job_id}")


def test_a_finish_without_a_reply_is_one_result(
    proxy: TcpProxy, far_consumer: MakeConsumer, client: Client, redis: Redis, queue: str
) -> None:
    """
    The result is published, counted and announced once.
    """
    job_id = client.submit(a_job()).job_id
    worker = far_consumer()
    lose_replies_of(proxy, "finish")

    assert ["duplicate"] == worker.finish(*worker.pull(), text="blue")

    after = client.stats().totals
    assert "blue" == client.text(job_id, wait_s=0)
    assert [1, 2] == [after[name] for name in ("done", "completion_tokens")]
    minutes: Any = redis.hvals(QueueKeys(queue).minutes)
    assert ["1 3 2"] == [field.decode().partition(" ")[2] for field in minutes]
    events = [fields[b"j"].decode() for _, fields in redis.xrange(QueueKeys(queue).events)]
    assert 1 == events.count(job_id)


def test_a_release_without_a_reply_is_one_entry(
    proxy: TcpProxy, far_consumer: MakeConsumer, client: Client, redis: Redis, queue: str
) -> None:
    """
    The job goes back once.
    """
    job_id = client.submit(a_job()).job_id
    worker = far_consumer()
    held = worker.pull()
    lose_replies_of(proxy, "release")
    worker.run(worker.consumer.release(held))

    assert (1, 1, 0) == (num_entries(redis, queue), client.stats().queued["standard"], client.stats().running)
    assert [(job_id, 1)] == [(job.job_id, job.attempt) for job in worker.pull()]


def test_a_retry_without_a_reply_is_one_attempt(proxy: TcpProxy, far_consumer: MakeConsumer, client: Client) -> None:
    """
    The job is put off once.
    """
    client.submit(a_job())
    worker = far_consumer()
    [job] = worker.pull()
    lose_replies_of(proxy, "retry")
    outcome = worker.run(worker.consumer.retry(job, delay_ms=60_000, why="store"))

    stats = client.stats()
    assert ("duplicate", 1, 0, 1) == (outcome, stats.delayed, stats.running, stats.totals["retried"])


def test_a_cancel_without_a_reply_is_one_end(proxy: TcpProxy, far_client: Client, far_consumer: MakeConsumer) -> None:
    """
    Of a job that waits and of one that runs: it is cancelled, once.
    """
    running = far_client.submit(a_job("runs")).job_id
    worker = far_consumer()
    held = worker.pull()
    waiting = far_client.submit(a_job("waits")).job_id
    states = []
    for job_id in (waiting, running):
        lose_replies_of(proxy, "cancel")
        states.append(far_client.cancel(job_id))
    worker.finish(*held, status="cancelled", text="so far")

    assert (["cancelled", "running"], 2) == (states, proxy.num_replies_lost)
    assert 2 == far_client.stats().totals["cancelled"]
    assert ["", "so far"] == [far_client.result(job_id, wait_s=0).text for job_id in (waiting, running)]


def test_text_that_is_published_twice_is_read_once(proxy: TcpProxy, far_consumer: MakeConsumer, client: Client) -> None:
    """
    Text that is in the stream twice is read once.
    """
    job_id = client.submit(a_job(stream=True)).job_id
    worker = far_consumer()
    [job] = worker.pull()
    for offset, text in ((0, "ans"), (3, "wer")):
        lose_replies_of(proxy, "publish")
        assert worker.run(worker.consumer.publish_tokens(job, [TokenDelta(0, offset, text, offset + 3)]))
    worker.finish(job)

    assert ["ans", "wer"] == [delta.text for delta in client.stream(job_id, wait_s=5)]


def test_a_sweep_without_replies_brings_each_job_back_once(
    proxy: TcpProxy, far_consumer: MakeConsumer, consumer: MakeConsumer, client: Client
) -> None:
    """
    What a sweep brought back is in the queue once, whichever of its replies was lost.
    """
    lapsed, due, late = (client.submit(a_job(name, **more)).job_id for name, more in (
        ("lapsed", {}), ("due", {}), ("late", {"timeout_s": 1.5}),
    ))  # fmt: skip
    dead, sweeper = consumer(lease_ms=200), far_consumer(lease_ms=200)
    held = {job.job_id: job for job in dead.pull()}
    dead.run(dead.consumer.retry(held[due], delay_ms=0, why="again"))
    dead.run(dead.consumer.retry(held[late], delay_ms=60_000, why="late"))
    lose_replies_of(proxy, "lock", "reclaim", "promote", "expire", "collect")

    def all_done() -> bool:
        sweeper.run(sweeper.consumer.sweep())
        return [client.status(name).state for name in (lapsed, due, late)] == ["queued", "queued", "expired"]

    wait_for(all_done)
    wait_for(lambda: sweeper.run(sweeper.consumer.sweep()).swept and proxy.num_replies_lost == 5)

    again = sorted((job.job_id, job.attempt, job.lapses) for job in sweeper.pull())
    assert sorted([(lapsed, 1, 1), (due, 2, 0)]) == again
    assert (2, 1, 0) == (client.stats().running, client.stats().totals["expired"], client.stats().delayed)


def test_a_heartbeat_and_a_leave_may_be_repeated(proxy: TcpProxy, far_consumer: MakeConsumer, client: Client) -> None:
    """
    A worker that says twice that it lives, or leaves, has said it.
    """
    worker = far_consumer()
    lose_replies_of(proxy, "heartbeat")
    worker.run(worker.consumer.heartbeat({"running": 1}))
    seen = set(client.workers())
    lose_replies_of(proxy, "leave")
    worker.run(worker.consumer.leave())

    assert ({worker.worker_id}, {}, 2) == (seen, client.workers(), proxy.num_replies_lost)


def test_a_job_that_a_lost_call_dropped_is_dropped(proxy: TcpProxy, far_client: Client, consumer: MakeConsumer) -> None:
    """
    A job that was dropped by the lost call counts as dropped.
    """
    job_id = far_client.submit(a_job()).job_id
    worker = consumer()
    worker.finish(*worker.pull())
    lose_replies_of(proxy, "forget")

    assert (True, 1) == (far_client.forget(job_id), proxy.num_replies_lost)
