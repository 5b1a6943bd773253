"""FINISH, RETRY, CANCEL, EXPIRE: how a job ends, once."""

import json
from pathlib import Path

import pytest
from redis import Redis

from pagemill.client import Client
from pagemill.errors import Busy, QueueUnavailable
from pagemill.keys import QueueKeys
from pagemill.messages import Finished
from pagemill.object_store import FileStore
from producers.local_redis import local_redis
from tests.support.servers import BlockingConsumer, MakeConsumer, a_job, result_of, wait_for


def test_a_result_is_what_the_worker_wrote(client: Client, consumer: MakeConsumer) -> None:
    """
    The result comes back whole, and nothing of the job waits any more.
    """
    job_id = client.submit(a_job()).job_id
    worker = consumer()
    [job] = worker.pull()

    outcomes = worker.finish(job, text="blue")

    assert (["done"], result_of(job, text="blue")) == (outcomes, client.result(job_id, wait_s=0))
    stats = client.stats()
    assert (0, 0, 0) == (stats.running, stats.queued["standard"], stats.queued_tokens["standard"])
    assert (1, 3, 2) == tuple(stats.totals[name] for name in ("done", "prompt_tokens", "completion_tokens"))


def test_stream_and_pending_list_are_empty_afterwards(client: Client, consumer: MakeConsumer, redis: Redis) -> None:
    """
    A finished job leaves neither entry nor lease.
    """
    client.submit_many([a_job(f"{number}") for number in range(70)])
    worker = consumer()
    jobs = worker.pull(max_jobs=70)

    assert {"done"} == set(worker.finish(*jobs))

    assert (0, 0) == (redis.xlen(jobs[0].stream), redis.xpending(jobs[0].stream, "workers")["pending"])


def test_all_of_a_job_expires_with_its_result(client: Client, consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    Result and job last for the time that the job asked for; the payload goes at once.
    """
    job_id = client.submit(a_job(result_ttl_s=77)).job_id
    keys = QueueKeys(queue)
    worker = consumer()
    worker.finish(*worker.pull())

    assert all(70 < redis.ttl(key) <= 77 for key in (keys.job(job_id), keys.result(job_id)))
    assert 0 == redis.exists(f"{keys.base}:d:{job_id}")


def test_finishing_twice_publishes_once(client: Client, consumer: MakeConsumer) -> None:
    """
    A finish whose reply was lost can be sent again: the first result stays.
    """
    job_id = client.submit(a_job()).job_id
    worker = consumer()
    [job] = worker.pull()

    outcomes = worker.finish(job, text="first") + worker.finish(job, text="second")

    assert (["done", "duplicate"], "first") == (outcomes, client.text(job_id, wait_s=0))
    assert 1 == client.stats().totals["done"]


def test_a_late_finish_is_fenced(client: Client, consumer: MakeConsumer) -> None:
    """
    A worker that lost its lease publishes nothing; its successor does.
    """
    job_id = client.submit(a_job()).job_id
    zombie, peer = consumer(lease_ms=20), consumer(lease_ms=20)
    [old] = zombie.pull()
    wait_for(lambda: peer.run(peer.consumer.sweep()).reclaimed)

    early = zombie.finish(old, text="zombie")
    [new] = peer.pull()
    outcomes = zombie.finish(old, text="zombie") + peer.finish(new, text="peer")

    assert (["fenced"], ["fenced", "done"], "peer") == (early, outcomes, client.text(job_id, wait_s=0))
    assert 2 == client.stats().totals["fenced"]


def test_a_forgotten_job_is_gone(client: Client, consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    A worker that finishes what the queue lost hears so.
    """
    job_id = client.submit(a_job()).job_id
    worker = consumer()
    [job] = worker.pull()
    keys = QueueKeys(queue)
    redis.delete(keys.job(job_id), f"{keys.base}:d:{job_id}")

    assert ["gone"] == worker.finish(job)


def test_a_reference_stands_for_a_large_result(
    client: Client, consumer: MakeConsumer, redis: Redis, queue: str
) -> None:
    """
    A result in the object store is written as where it is.
    """
    job_id = client.submit(a_job()).job_id
    worker = consumer()
    [job] = worker.pull()
    worker.run(worker.consumer.finish([Finished(job, result_of(job), ref="s3://bucket/r.json")]))

    record = redis.get(QueueKeys(queue).result(job_id))

    assert {"ref": "s3://bucket/r.json"} == json.loads(record or b"{}")


def test_a_full_server_still_takes_results() -> None:
    """
    Out of memory, submits are busy, yet running jobs are finished: their entries go first.
    """
    with local_redis() as url, Client(url) as client, Redis.from_url(url) as redis:
        jobs = [a_job("x" * 200, id=f"job-{number}") for number in range(20)]
        client.submit_many(jobs)
        worker = BlockingConsumer(url, "default")
        held = worker.pull()
        redis.config_set("maxmemory", "100kb")

        with pytest.raises(Busy):
            client.submit(a_job())
        assert {"done"} == set(worker.finish(*held))

        assert ["answer"] * 20 == [client.text(job.id, wait_s=0) for job in jobs]
        worker.close()


def test_a_job_that_a_full_server_refuses_leaves_no_object(tmp_path: Path) -> None:
    """
    Out of memory, no job goes in, and its payload does not stay in the store.
    """
    store = FileStore(tmp_path)
    with local_redis() as url, Redis.from_url(url) as redis, Client(url, object_store=store) as client:
        client.submit(a_job())
        redis.config_set("maxmemory", "100kb")
        with pytest.raises(Busy, match="its server"):
            client.submit(a_job("long " * 20_000))

    assert [] == list(tmp_path.rglob("*.json"))


def test_a_full_server_is_unavailable_to_workers() -> None:
    """
    Out of memory, a worker lives on, sweeps and empties the queue; what cannot be done is QueueUnavailable.
    """
    with local_redis() as url, Client(url) as client, Redis.from_url(url) as redis:
        client.submit_many([a_job(f"{number}") for number in range(3)])
        worker = BlockingConsumer(url, "default")
        redis.config_set("maxmemory", "100kb")

        worker.run(worker.consumer.heartbeat({"running": 0}))
        assert worker.run(worker.consumer.sweep()).swept
        with pytest.raises(QueueUnavailable, match="out of memory"):
            worker.run(worker.consumer.register_model("tiny"))

        assert ["done"] * 3 == worker.finish(*worker.pull())
        worker.close()


def test_over_four_fifths_of_memory_is_busy(queue: str) -> None:
    """
    Submits stop before the server is full, so that results still have room.
    """
    with local_redis() as url, Client(url, queue=queue) as client, Redis.from_url(url) as redis:
        redis.config_set("maxmemory", int(redis.info("memory")["used_memory"] * 1.1))

        with pytest.raises(Busy, match="80 %"):
            client.submit(a_job())


def test_a_retry_waits_and_comes_back(client: Client, consumer: MakeConsumer) -> None:
    """
    A job put off is nobody's until it is due; then any worker gets it, as a further attempt.
    """
    job_id = client.submit(a_job()).job_id
    worker = consumer()
    [job] = worker.pull()

    outcome = worker.run(worker.consumer.retry(job, delay_ms=60_000, why="store is down"))

    status = client.status(job_id)
    assert ("done", "delayed", "store is down") == (outcome, status.state, status.reason)
    assert (1, 0) == (client.stats().delayed, client.stats().running)
    assert "cancelled" == client.cancel(job_id)


def test_a_due_job_is_promoted(client: Client, consumer: MakeConsumer) -> None:
    """
    The sweep brings due jobs back.
    """
    job_id = client.submit(a_job()).job_id
    worker = consumer()
    worker.run(worker.consumer.retry(worker.pull()[0], delay_ms=0, why="again"))

    assert 1 == worker.run(worker.consumer.sweep()).promoted
    assert [(job_id, 2)] == [(job.job_id, job.attempt) for job in worker.pull()]


def test_a_delivery_tells_how_often_it_was_put_off(client: Client, consumer: MakeConsumer) -> None:
    """
    Times in a row for the same kind of fault; another kind begins anew.
    """
    client.submit(a_job())
    worker = consumer()
    seen = []
    for fault in ("store", "store", "engine"):
        [job] = worker.pull()
        seen.append((job.fault, job.num_faults))
        worker.run(worker.consumer.retry(job, delay_ms=0, why="", fault=fault))
        worker.run(worker.consumer.sweep())
    [job] = worker.pull()

    assert [("", 0), ("store", 1), ("store", 2), ("engine", 1)] == [*seen, (job.fault, job.num_faults)]


def test_a_try_that_was_none_does_not_count(client: Client, consumer: MakeConsumer) -> None:
    """
    A job that could not even be started is put off without an attempt.
    """
    client.submit(a_job())
    worker = consumer()
    for counts in (False, False, True):
        [job] = worker.pull()
        worker.run(worker.consumer.retry(job, delay_ms=0, why="", counts=counts))
        worker.run(worker.consumer.sweep())

    assert 2 == worker.pull()[0].attempt


def test_the_servers_clock_says_when_a_job_is_due(client: Client, consumer: MakeConsumer, redis: Redis) -> None:
    """
    A job is due so long after the server's now, whatever the worker's clock says.
    """
    job_id = client.submit(a_job()).job_id
    worker = consumer()
    [job] = worker.pull()

    before = redis.time()
    worker.run(worker.consumer.retry(job, delay_ms=1500, why=""))
    after = redis.time()

    due = redis.zscore(worker.consumer.keys.delayed, job_id)
    first, last = (seconds * 1000 + micros / 1000 + 1500 for seconds, micros in (before, after))
    assert first - 1 <= due <= last + 1
    assert "cancelled" == client.cancel(job_id)


def test_only_the_owner_puts_off(client: Client, consumer: MakeConsumer) -> None:
    """
    A retry after the job was handed back is fenced; a repeated one is a duplicate.
    """
    client.submit(a_job())
    worker = consumer()
    [old] = worker.pull()
    worker.run(worker.consumer.release([old]))
    fenced = worker.run(worker.consumer.retry(old, delay_ms=0, why=""))
    [job] = worker.pull()
    first = worker.run(worker.consumer.retry(job, delay_ms=0, why=""))
    second = worker.run(worker.consumer.retry(job, delay_ms=0, why=""))

    assert ("fenced", "done", "duplicate") == (fenced, first, second)


def test_a_waiting_job_is_cancelled_at_once(client: Client, consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    The result is there with the cancel; the unread entry stays until a worker skips it.
    """
    job_id = client.submit(a_job(metadata={"row": "7"})).job_id

    state = client.cancel(job_id)

    result = client.result(job_id, wait_s=0)
    assert ("cancelled", "cancelled", {"row": "7"}) == (state, result.status, result.metadata)
    assert 1 == redis.xlen(f"{QueueKeys(queue).base}:s:standard:default")
    assert (0, 0) == (client.stats().queued["standard"], client.stats().queued_tokens["standard"])
    assert [] == consumer().pull()
    assert 0 == redis.xlen(f"{QueueKeys(queue).base}:s:standard:default")


def test_a_running_job_keeps_its_text_when_cancelled(client: Client, consumer: MakeConsumer) -> None:
    """
    The worker of a cancelled job ends it with what it has.
    """
    job_id = client.submit(a_job()).job_id
    worker = consumer()
    [job] = worker.pull()

    assert "running" == client.cancel(job_id)
    assert client.status(job_id).cancel_requested
    worker.finish(job, status="cancelled", text="so far")

    result = client.result(job_id, wait_s=0)
    assert ("cancelled", "so far") == (result.status, result.text)


def test_the_end_is_the_end(client: Client, consumer: MakeConsumer) -> None:
    """
    A cancel after the end changes nothing.
    """
    job_id = client.submit(a_job()).job_id
    worker = consumer()
    worker.finish(*worker.pull())

    assert ("done", "done") == (client.cancel(job_id), client.result(job_id, wait_s=0).status)


def test_a_waiting_job_expires_in_the_sweep(client: Client, consumer: MakeConsumer) -> None:
    """
    A deadline is kept although no worker reaches the job.
    """
    job_id = client.submit(a_job(timeout_s=0.001)).job_id
    worker = consumer()

    wait_for(lambda: worker.run(worker.consumer.sweep()).expired)

    assert "expired" == client.result(job_id, wait_s=0).status
    assert [] == worker.pull()


def test_a_delayed_job_expires_in_the_sweep(client: Client, consumer: MakeConsumer) -> None:
    """
    A job put off past its deadline ends there.
    """
    job_id = client.submit(a_job(timeout_s=0.3)).job_id
    worker = consumer()
    worker.run(worker.consumer.retry(worker.pull()[0], delay_ms=3_600_000, why="later"))

    wait_for(lambda: worker.run(worker.consumer.sweep()).expired)

    assert ("expired", 0) == (client.result(job_id, wait_s=0).status, client.stats().delayed)


def test_a_server_that_is_away_is_unavailable(queue: str) -> None:
    """
    A server that cannot be reached is one typed error, for clients and consumers.
    """
    with local_redis() as url:
        worker = BlockingConsumer(url, queue)
        client = Client(url, queue=queue)
    with pytest.raises(QueueUnavailable):
        client.submit(a_job())
    with pytest.raises(QueueUnavailable):
        worker.pull()
    client.close()
    worker.close()
