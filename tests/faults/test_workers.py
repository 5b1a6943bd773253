"""Rows of the failure catalogue: workers that are slow, frozen, dead, cut off, or have a full disk."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from redis import Redis

from pagemill.client import Client
from pagemill.keys import QueueKeys
from pagemill.schema import Job
from tests.support.jobs import expected_texts, submitted
from tests.support.servers import wait_for
from tests.support.services import RunningService, WorkerProcess, worker_process
from tests.support.tcp_proxy import TcpProxy
from worker.fake_engine import FakeEngine

LEASE_S = 1.0
FLAGS = ("--engine", "fake", "--no-supervisor", "--fake-tokens-per-s", "60", "--drain-s", "1")


def service(url: str, queue: str, *, tokens_per_s: float = 2000.0, lease_s: float = LEASE_S) -> RunningService:
    return RunningService(url, queue, engine=FakeEngine(tokens_per_s=tokens_per_s), lease_s=lease_s)


@contextmanager
def process(log: Path, url: str, queue: str, lease_s: float = LEASE_S) -> Iterator[WorkerProcess]:
    flags = (*FLAGS, "--redis-url", url, "--queue", queue, "--lease-s", str(lease_s))
    with worker_process(log, *flags) as worker:
        yield worker


def assert_answered(client: Client, jobs: list[Job], *, lapses: int) -> None:
    """Each has its text, published once; so many of them had been taken from a worker."""
    results = [client.result(job.id, wait_s=20) for job in jobs]

    assert expected_texts(jobs) == [result.text for result in results]
    totals = client.stats().totals
    assert (len(jobs), lapses) == (totals["done"], totals.get("reclaimed", 0))


def idle_ms(redis: Redis, queue: str) -> int:
    """How long ago the leases of what runs were extended."""
    entries = redis.xpending_range(f"{QueueKeys(queue).base}:s:standard:default", "workers", "-", "+", 10)
    return max(int(entry["time_since_delivered"]) for entry in entries)


def test_row_03_a_long_job_is_not_redelivered_while_its_worker_lives(
    server_url: str, queue: str, client: Client
) -> None:
    """
    Over several leases, with an idle peer that sweeps: one worker computes it, once.
    """
    with service(server_url, queue, tokens_per_s=40.0) as one, service(server_url, queue, tokens_per_s=40.0) as other:
        jobs = submitted(client, 1, max_tokens=140)
        assert_answered(client, jobs, lapses=0)

    assert [0, 140] == sorted(running.engine.stats().generated_tokens for running in (one, other))


def test_row_04_a_zombie_publishes_nothing(server_url: str, queue: str, client: Client, tmp_path: Path) -> None:
    """
    A worker that was frozen for three leases drops what became another's, and goes on with new jobs.
    """
    lease_s = 0.7
    with process(tmp_path / "log", server_url, queue, lease_s) as zombie:
        jobs = submitted(client, 3, max_tokens=50)
        wait_for(lambda: client.stats().running == 3)
        zombie.send(signal.SIGSTOP)
        with service(server_url, queue, lease_s=lease_s):
            time.sleep(3 * lease_s)
            zombie.send(signal.SIGCONT)
            assert_answered(client, jobs, lapses=3)
        # the peer is gone: the zombie must be of use again
        assert_answered(client, jobs + submitted(client, 2, max_tokens=5), lapses=3)


def test_row_06_the_jobs_of_a_killed_worker_run_elsewhere_in_time(
    server_url: str, queue: str, client: Client, redis: Redis, tmp_path: Path
) -> None:
    """
    Without a supervisor that could tell: within one and a quarter of a lease.
    """
    lease_s = 4.0
    with process(tmp_path / "log", server_url, queue, lease_s) as dying:
        jobs = submitted(client, 4, max_tokens=100)
        wait_for(lambda: client.stats().running == 4)
        with service(server_url, queue, lease_s=lease_s):
            wait_for(lambda: len(client.workers()) == 2)
            # in the middle between two renewals: the slowest sweep leaves half a second of the time promised
            wait_for(lambda: 500 <= idle_ms(redis, queue) < 800, 20)
            killed_at = time.monotonic()
            dying.kill()
            keys = QueueKeys(queue)
            wait_for(lambda: all(redis.hget(keys.job(job.id), "lapses") for job in jobs), 20)
            took_s = time.monotonic() - killed_at
            assert_answered(client, jobs, lapses=4)

    assert took_s < 1.25 * lease_s


def test_row_11_a_connection_that_died_in_silence_costs_no_lease(server_url: str, queue: str, client: Client) -> None:
    """
    All connections of a worker are open and dead: it makes new ones before a peer takes its jobs.
    """
    with TcpProxy(server_url) as proxy:
        with service(proxy.url, queue, tokens_per_s=60.0, lease_s=3.0) as far:
            jobs = submitted(client, 8, max_tokens=30)
            wait_for(lambda: far.engine.stats().num_running == 8)
            with service(server_url, queue, lease_s=3.0):
                proxy.strand()
                assert_answered(client, jobs, lapses=0)
        proxy.heal()


def test_row_11_a_worker_that_is_cut_off_loses_its_jobs_and_nothing_else(
    server_url: str, queue: str, client: Client
) -> None:
    """
    A network that is away for longer than a lease makes a zombie of a worker: what it computed is dropped.
    """
    with TcpProxy(server_url) as proxy, service(proxy.url, queue, tokens_per_s=60.0) as far:
        jobs = submitted(client, 3, max_tokens=50)
        wait_for(lambda: far.engine.stats().num_running == 3)
        with proxy.holding(), service(server_url, queue):
            assert_answered(client, jobs, lapses=3)
        wait_for(lambda: far.engine.stats().num_running == 0)
        assert_answered(client, jobs + submitted(client, 2, max_tokens=5), lapses=3)


def test_row_11_a_slow_network_is_only_slow(server_url: str, queue: str, client: Client) -> None:
    """
    Every packet takes a tenth of a lease in each direction, and no job of several leases is lost to a near peer.
    """
    lease_s = 1.5
    with TcpProxy(server_url) as proxy:
        proxy.delay(lease_s / 10)
        with service(proxy.url, queue, tokens_per_s=60.0, lease_s=lease_s) as far:
            jobs = submitted(client, 12, max_tokens=30)
            wait_for(lambda: far.engine.stats().num_running == 12, 20)
            with service(server_url, queue, lease_s=lease_s) as near:
                assert_answered(client, jobs, lapses=0)
        proxy.heal()

    assert 0 == near.engine.stats().generated_tokens


def test_row_21_what_a_worker_ran_that_was_told_to_stop_runs_elsewhere_within_a_second(
    server_url: str, queue: str, client: Client, redis: Redis, tmp_path: Path
) -> None:
    """
    Without any grace time, and at the attempt at which it was.
    """
    flags = ("--engine", "fake", "--fake-tokens-per-s", "60", "--drain-s", "0", "--lease-s", "30")
    keys = QueueKeys(queue)
    with worker_process(tmp_path / "log", *flags, "--redis-url", server_url, "--queue", queue) as stopping:
        jobs = submitted(client, 4, max_tokens=100, stream=True)
        wait_for(lambda: all(redis.exists(keys.tokens(job.id)) for job in jobs), 20)
        with service(server_url, queue, lease_s=30.0) as peer:
            wait_for(lambda: len(client.workers()) == 2, 20)
            stopping.send(signal.SIGTERM)
            told_at = time.monotonic()
            wait_for(lambda: {peer.worker_id} == {client.status(job.id).worker for job in jobs}, 20)
            took_s = time.monotonic() - told_at
            assert_answered(client, jobs, lapses=0)
        assert 0 == stopping.wait()
        handed_back = [event for event in stopping.events() if event["event"] == "drain.handed_back"]

    assert took_s < 1.0
    assert [("running", 4)] == [(event["which"], event["released"]) for event in handed_back]
    assert {1} == {client.status(job.id).attempt for job in jobs}


def test_row_45_a_full_disk_stops_no_worker(server_url: str, queue: str, client: Client) -> None:
    """
    A log that takes no line costs lines: jobs are answered, and the worker drains in good order.
    """
    flags = (*FLAGS, "--redis-url", server_url, "--queue", queue)
    worker = WorkerProcess(Path("/dev/full"), *flags)
    try:
        jobs = submitted(client, 2, max_tokens=5)
        assert_answered(client, jobs, lapses=0)
        worker.send(signal.SIGTERM)
        assert 0 == worker.wait()
    finally:
        worker.process.kill()
        worker.process.wait()
