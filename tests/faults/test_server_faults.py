"""
A server that stops, loads, freezes, loses its master's place or its memory, while workers work.

Each test has a server of its own; workers are threads with the fake engine, whose counters show
whether anything was computed twice.
"""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from redis.exceptions import BusyLoadingError

from pagemill import calls
from pagemill.async_client import AsyncClient
from pagemill.client import Client
from pagemill.connection import connect
from pagemill.errors import Busy, JobNotFound, QueueUnavailable, ServerAway
from pagemill.keys import QueueKeys
from pagemill.schema import Job
from pagemill.scripts import run
from tests.support.jobs import expected_texts, submitted
from tests.support.redis_process import RedisProcess
from tests.support.servers import BlockingConsumer, a_job, wait_for
from tests.support.services import RunningService
from tests.support.tcp_proxy import TcpProxy
from worker.fake_engine import FakeEngine

QUEUE = "faults"
LEASE_S = 0.8


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisProcess]:
    with RedisProcess(tmp_path / "first") as server:
        yield server


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[RedisProcess]:
    with RedisProcess(tmp_path / "second") as server:
        yield server


@pytest.fixture
def client(server: RedisProcess) -> Iterator[Client]:
    with Client(server.url, queue=QUEUE) as client:
        yield client


def worker(url: str, *, tokens_per_s: float = 200.0, lease_s: float = LEASE_S) -> RunningService:
    return RunningService(url, QUEUE, engine=FakeEngine(tokens_per_s=tokens_per_s), lease_s=lease_s)


def wait_until_running(number: int, *workers: RunningService) -> None:
    """Until the engines have the jobs: the server calls them running before the worker has heard of them."""
    wait_for(lambda: sum(one.engine.stats().num_running for one in workers) == number)


def assert_answered_once(client: Client, jobs: list[Job], *workers: RunningService) -> None:
    """Every job has the text of an undisturbed run, at its first attempt, and no token was computed twice."""
    results = [client.result(job.id, wait_s=20) for job in jobs]

    assert expected_texts(jobs) == [result.text for result in results]
    assert {("done", 1)} == {(result.status, result.attempt) for result in results}
    totals = client.stats().totals
    assert (len(jobs), 0) == (totals["done"], totals.get("reclaimed", 0))
    generated = sum(one.engine.stats().generated_tokens for one in workers)
    assert sum(job.options.max_tokens for job in jobs) == generated


def test_a_worker_goes_on_generating_while_the_server_is_away(server: RedisProcess, client: Client) -> None:
    """
    Down for longer than two leases and started from its append-only file: the answers are written then.
    """
    with worker(server.url, tokens_per_s=400.0) as first, worker(server.url, tokens_per_s=400.0) as second:
        jobs = submitted(client, 8, max_tokens=150)
        wait_until_running(8, first, second)
        server.kill()
        before = first.engine.stats().generated_tokens + second.engine.stats().generated_tokens
        time.sleep(2.2 * LEASE_S)
        meanwhile = first.engine.stats().generated_tokens + second.engine.stats().generated_tokens - before
        server.start()
        assert_answered_once(client, jobs, first, second)

    assert meanwhile > 100


def test_a_frozen_server_costs_nobody_his_lease(server: RedisProcess, client: Client) -> None:
    """
    All heartbeats run out while it does nothing, and nothing is taken from anybody when it wakes.
    """
    with worker(server.url, tokens_per_s=400.0) as first, worker(server.url, tokens_per_s=400.0) as second:
        jobs = submitted(client, 8, max_tokens=150)
        wait_until_running(8, first, second)
        server.pause()
        time.sleep(2.5 * LEASE_S)
        server.resume()
        assert_answered_once(client, jobs, first, second)


def test_a_sweep_that_a_frozen_server_kept_takes_nothing(server: RedisProcess, client: Client) -> None:
    """
    It was asked for when all was well, and comes to pass when the server wakes, before any owner's renewal.
    """
    lease_ms, keys = 400, QueueKeys(QUEUE)
    owner = BlockingConsumer(server.url, QUEUE, lease_ms=lease_ms)
    submitted(client, 2, max_tokens=10)
    held = owner.pull()
    with connect(server.url) as redis, ThreadPoolExecutor(1) as pool:
        seen_ms = run(redis, calls.lock(keys, "sweeper", hold_ms=50))
        server.pause()
        kept = pool.submit(run, redis, calls.reclaim(keys, lease_ms=lease_ms, limit=9, cursor="0", seen_ms=seen_ms))
        time.sleep(3 * lease_ms / 1000)
        server.resume()
        assert ("0", 0) == kept.result(20)

    assert ["done", "done"] == owner.finish(*held)
    owner.close()


def test_after_an_outage_dead_workers_lose_their_jobs_all_the_same(server: RedisProcess, client: Client) -> None:
    """
    One lease later than else: a worker that died during the outage is not waited for any longer.
    """
    dead = BlockingConsumer(server.url, QUEUE, lease_ms=round(LEASE_S * 1000))
    jobs = submitted(client, 3, max_tokens=10)
    assert 3 == len(dead.pull())
    with worker(server.url):
        server.kill()
        time.sleep(1.5 * LEASE_S)
        started_at = time.monotonic()
        server.start()
        back_at = time.monotonic()
        assert {"done"} == {client.result(job.id, wait_s=20).status for job in jobs}
        done_at = time.monotonic()
    dead.close()

    # it was back at some time between the two
    assert done_at - started_at > LEASE_S * 0.9
    assert done_at - back_at < 6 * LEASE_S


def test_loading(server: RedisProcess, client: Client) -> None:
    """
    A server that loads its file refuses everything, and that passes: workers and clients wait for it.
    """
    with server.client.pipeline() as pipeline:
        for number in range(1500):
            pipeline.set(f"ballast:{number}", "x" * 1000)
        pipeline.execute()
    with worker(server.url) as only:
        jobs = submitted(client, 6, max_tokens=60)
        wait_until_running(6, only)
        server.client.bgrewriteaof()
        wait_for(lambda: not server.client.info("persistence")["aof_rewrite_in_progress"])
        server.kill()
        server.start("--key-load-delay", "700", "--loading-process-events-interval-bytes", "1024", ready=False)
        with pytest.raises(BusyLoadingError):
            server.client.ping()
        more = Job.build(id="meanwhile", prompt="meanwhile", options={"max_tokens": 5, "seed": 5})
        wait_for(lambda: _submitted(client, more))
        assert_answered_once(client, [*jobs, more], only)


def _submitted(client: Client, job: Job) -> bool:
    try:
        return bool(client.submit(job))
    except ServerAway:
        return False


def test_a_demoted_master(server: RedisProcess, client: Client) -> None:
    """
    A server that is a replica now refuses writes: `ServerAway` for clients, and workers wait.
    """
    with worker(server.url) as only:
        jobs = submitted(client, 6, max_tokens=60)
        wait_until_running(6, only)
        # of a master that is not there, so that it keeps what it has
        server.client.execute_command("REPLICAOF", "127.0.0.1", "1")
        with pytest.raises(ServerAway, match="read only"):
            client.submit(a_job("meanwhile"))
        time.sleep(1.5 * LEASE_S)
        server.lead()
        assert_answered_once(client, jobs, only)


def test_too_few_replicas(server: RedisProcess, client: Client) -> None:
    """
    A master that has lost its replicas may refuse writes for a while: that is no loss either.
    """
    with worker(server.url) as only:
        jobs = submitted(client, 4, max_tokens=60)
        wait_until_running(4, only)
        server.client.config_set("min-replicas-to-write", 1)
        with pytest.raises(ServerAway, match=r"(?i)replicas"):
            client.submit(a_job("meanwhile"))
        time.sleep(1.2 * LEASE_S)
        server.client.config_set("min-replicas-to-write", 0)
        assert_answered_once(client, jobs, only)


def test_failover_to_a_replica_behind_a_name(server: RedisProcess, replica: RedisProcess) -> None:
    """
    The name leads to the replica, the old master stays and refuses writes: everybody finds the new one.
    """
    replica.follow(server)
    with TcpProxy(server.url) as name, Client(name.url, queue=QUEUE) as far, worker(name.url) as only:
        jobs = submitted(far, 6, max_tokens=100)
        wait_until_running(6, only)
        server.client.execute_command("WAIT", 1, 2000)
        # without a cut: connections to the old one stay open, and say READONLY
        replica.lead()
        name.point_at(replica.url, cut=False)
        server.client.execute_command("REPLICAOF", "127.0.0.1", str(replica.port))
        with pytest.raises(ServerAway):
            far.submit(a_job("first try"))
        second = Job.build(prompt="second try", options={"max_tokens": 5, "seed": 5})
        assert not far.submit(second).duplicate
        with Client(replica.url, queue=QUEUE) as new:
            assert_answered_once(new, [*jobs, second], only)


@pytest.mark.parametrize("heard_of_sweeps", [True, False])
def test_failover_to_an_old_replica(
    server: RedisProcess, replica: RedisProcess, client: Client, heard_of_sweeps: bool
) -> None:
    """
    A replica that lacks the last moments: what ended then is written again and not run again, and a
    submit that was lost is sent again under its id.

    Also where it lacks all from a worker's first sweep on, which notes whose leases are to be believed.
    """
    replica.follow(server)
    with TcpProxy(server.url) as name, worker(name.url, tokens_per_s=300.0) as only:
        jobs = submitted(client, 6, max_tokens=100)
        wait_until_running(6, only)
        server.client.execute_command("WAIT", 1, 2000)
        noted = f"{QueueKeys(QUEUE).base}:server"
        wait_for(lambda: replica.client.exists(noted), 20)
        # from here on it hears nothing any more
        replica.lead()
        if not heard_of_sweeps:
            replica.client.delete(noted)
        for job in jobs:
            client.result(job.id, wait_s=20)
        lost = Job.build(prompt="lost", options={"max_tokens": 4, "seed": 1})
        client.submit(lost)
        client.result(lost.id, wait_s=20)
        server.kill()
        with Client(replica.url, queue=QUEUE) as old:
            # before the worker can tell it of the ends
            assert 6 == old.stats().running
        name.point_at(replica.url)

        with Client(name.url, queue=QUEUE) as new:
            wait_for(lambda: new.stats().totals.get("done") == 6)
            with pytest.raises(JobNotFound):
                new.status(lost.id)
            assert not new.submit(lost).duplicate
            again = new.result(lost.id, wait_s=20)
            results = [new.result(job.id, wait_s=0) for job in jobs]
            totals = new.stats().totals

    assert expected_texts(jobs) == [result.text for result in results]
    assert ("done", 7) == (again.status, totals["done"])
    # the lost submit alone was computed again
    assert 6 * 100 + 2 * 4 == only.engine.stats().generated_tokens


def test_a_job_that_a_replica_calls_ours_is_handed_back(
    server: RedisProcess, replica: RedisProcess, client: Client
) -> None:
    """
    What a worker had finished, and cannot write again, does not stay in its hands for ever.
    """
    replica.follow(server)
    with TcpProxy(server.url) as name:
        consumer = BlockingConsumer(name.url, QUEUE, lease_ms=60_000)
        [job] = submitted(client, 1, max_tokens=4)
        held = consumer.pull()
        server.client.execute_command("WAIT", 1, 2000)
        replica.lead()
        assert ["done"] == consumer.finish(*held)
        server.kill()
        name.point_at(replica.url)

        assert wait_for(lambda: _heartbeat(consumer))
        assert [] == consumer.pull()
        consumer.consumer.doubt()
        [again] = consumer.pull()
        assert (job.id, 1) == (again.job_id, again.attempt)
        assert ["done"] == consumer.finish(again)
        consumer.close()


def _heartbeat(consumer: BlockingConsumer) -> bool:
    """Whether the server is another one."""
    try:
        return bool(consumer.run(consumer.consumer.heartbeat({})))
    except QueueUnavailable:
        return False


def test_an_entry_of_an_ended_job_is_acked(server: RedisProcess, client: Client) -> None:
    """
    A pointer that a failover or an operator brought back costs no computation.
    """
    with worker(server.url) as only:
        [job] = submitted(client, 1, max_tokens=4)
        client.result(job.id, wait_s=20)
        stream = f"{QueueKeys(QUEUE).base}:s:standard:default"
        server.client.xadd(stream, {"j": job.id, "tok": 4})
        client.submit(a_job("rings the bell", max_tokens=4))
        wait_for(lambda: client.stats().totals.get("done") == 2 and not server.client.xlen(stream))

    assert 8 == only.engine.stats().generated_tokens


def test_a_flushed_server(server: RedisProcess, client: Client) -> None:
    """
    FLUSHALL takes the jobs; workers drop theirs, make their groups anew and answer what is sent again.
    """
    with worker(server.url) as only:
        jobs = submitted(client, 4, max_tokens=400)
        wait_until_running(4, only)
        server.client.flushall()
        wait_for(lambda: only.engine.stats().num_running == 0)
        again = submitted(client, 4, max_tokens=10)

        assert {"done"} == {client.result(job.id, wait_s=20).status for job in again}
        with pytest.raises(JobNotFound):
            client.status(jobs[0].id)
        wait_for(lambda: only.worker_id in client.workers())


def test_a_destroyed_group(server: RedisProcess, client: Client) -> None:
    """
    What runs ends once, what waits is delivered, and what a dead worker had is taken over.
    """
    dead = BlockingConsumer(server.url, QUEUE, lease_ms=round(LEASE_S * 1000))
    jobs = submitted(client, 2, max_tokens=60)
    [orphan] = dead.pull(max_jobs=1)
    with worker(server.url, tokens_per_s=100.0) as only:
        wait_until_running(1, only)
        server.client.xgroup_destroy(orphan.stream, "workers")
        more = submitted(client, 2, max_tokens=10)
        results = [client.result(job.id, wait_s=20) for job in jobs + more]
    dead.close()

    assert {("done", 1)} == {(result.status, result.attempt) for result in results}
    assert (4, 1) == tuple(client.stats().totals[name] for name in ("done", "reclaimed"))
    assert 2 * 60 + 2 * 10 == only.engine.stats().generated_tokens


def test_a_full_server_refuses_jobs_and_takes_answers(server: RedisProcess, client: Client) -> None:
    """
    Out of memory: submits are busy, and every job that runs is answered once, in its stream as in its result.
    """
    with worker(server.url) as only:
        jobs = submitted(client, 4, max_tokens=60, stream=True)
        wait_until_running(4, only)
        server.client.config_set("maxmemory", "100kb")
        with pytest.raises(Busy):
            client.submit(a_job("meanwhile"))
        assert_answered_once(client, jobs, only)
        text = "".join(delta.text for delta in client.stream(jobs[0].id, wait_s=5))

    assert client.text(jobs[0].id) == text


def test_a_client_waits_through_a_restart(server: RedisProcess, client: Client) -> None:
    """
    Whoever waits for a result, in either client, when the server is restarted gets it.
    """

    async def wait_for_result() -> str:
        async with AsyncClient(server.url, queue=QUEUE) as other:
            return (await other.result(job.id, wait_s=20)).status

    with worker(server.url, tokens_per_s=60.0) as only, ThreadPoolExecutor() as pool:
        [job] = submitted(client, 1, max_tokens=180)
        wait_until_running(1, only)
        waiting = [
            pool.submit(lambda: client.result(job.id, wait_s=20).status),
            pool.submit(lambda: asyncio.run(wait_for_result())),
        ]
        channel = QueueKeys(QUEUE).channel(job.id)
        wait_for(lambda: server.client.pubsub_numsub(channel) == [(channel.encode(), 2)], 20)
        assert "running" == client.status(job.id).state
        server.stop()
        time.sleep(0.3)
        server.start()

        assert ["done", "done"] == [one.result(20) for one in waiting]


def test_a_follower_of_all_results_goes_on_after_a_restart(server: RedisProcess, client: Client) -> None:
    """
    `finished` and a stream of text go on where they were.
    """
    ended: list[str] = []
    shown: list[str] = []

    def follow() -> None:
        ended.extend(one.job_id for one in client.finished([job.id for job in jobs], wait_s=20))

    def read() -> None:
        shown.extend(delta.text for delta in client.stream(jobs[0].id, wait_s=20))

    with worker(server.url, tokens_per_s=60.0) as only, ThreadPoolExecutor() as pool:
        jobs = submitted(client, 2, max_tokens=120, stream=True)
        wait_until_running(2, only)
        # one that has ended shows that the follower is at work
        jobs += submitted(client, 1, max_tokens=1, first=2)
        following = [pool.submit(follow), pool.submit(read)]
        wait_for(lambda: ended == [jobs[2].id] and shown, 20)
        assert ["running", "running"] == [client.status(job.id).state for job in jobs[:2]]
        server.stop()
        server.start()
        for one in following:
            one.result(30)

    assert (jobs[2].id, {job.id for job in jobs}, 3) == (ended[0], set(ended), len(ended))
    assert expected_texts(jobs[:1]) == ["".join(shown)]
