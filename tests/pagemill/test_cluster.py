"""A cluster of three nodes: queues on all of them, slots that move, a node that dies."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pagemill.async_client import AsyncClient
from pagemill.client import Client
from pagemill.errors import ServerAway, SettingsError
from pagemill.ids import uuid7
from pagemill.keys import MODELS, QueueKeys
from tests.support.outages import Traffic, Waiters
from tests.support.servers import a_job, leaked_keys, wait_for
from tests.support.services import RunningService, worker_process
from tests.support.topologies import Cluster, Node
from worker.fake_engine import FakeEngine


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def queue(cluster: Cluster) -> Iterator[str]:
    """A queue's name; no key of it may be left for ever."""
    name = f"test-{uuid7()}"
    yield name
    assert [] == leaked_keys(cluster.owner(QueueKeys(name).base).client, name)


def node_of(cluster: Cluster, queue: str) -> Node:
    return cluster.owner(QueueKeys(queue).base)


def other_node(cluster: Cluster, queue: str) -> Node:
    return next(node for node in cluster.nodes if node is not node_of(cluster, queue))


def test_a_queue_works_as_on_one_server(cluster: Cluster, queue: str) -> None:
    """
    Submits, waits, streams, batches, counters and cancels go to the node of the queue's slot.
    """
    with RunningService(cluster.url, queue), Client(cluster.url, queue=queue) as client:
        batch = client.create_batch()
        jobs = [a_job(f"{number}", batch=batch.batch_id, stream=True) for number in range(20)]
        accepted = [one.job_id for one in client.submit_many(jobs)]
        client.seal_batch(batch.batch_id)

        assert "done" == client.result(accepted[0], wait_s=20).status
        assert client.text(accepted[0]) == "".join(delta.text for delta in client.stream(accepted[0], wait_s=20))
        assert sorted(accepted) == sorted(result.job_id for result in client.finished(accepted, wait_s=20))
        assert 20 == client.wait_batch(batch.batch_id, 20).done
        assert "done" == client.cancel(accepted[3])
        assert 20 == client.stats().totals["done"]
        assert 0 == client.purge_dead(older_than_s=0)
        assert 1 == len(client.workers())
    assert node_of(cluster, queue).client.exists(QueueKeys(queue).result(accepted[0]))


def test_one_client_reaches_queues_on_all_nodes(cluster: Cluster) -> None:
    """
    Models whose queues live on different nodes are served through one client, in one call too; the
    table of models is on a fourth slot.
    """
    queues = {f"model-{n}": cluster.key_at(node, f"q{n}-%d-{uuid7()}") for n, node in enumerate(cluster.nodes)}
    jobs = [a_job(f"{number}", model=f"model-{number % 3}", stream=True) for number in range(30)]

    async def scenario() -> tuple[list[str], list[str], list[str]]:
        async with AsyncClient(cluster.url, queue=queues["model-0"]) as client:
            accepted = [one.job_id for one in await client.submit_many(jobs, wait_s=20)]
            ends = [result async for result in client.finished(accepted, wait_s=30)]
            streamed = ["".join([delta.text async for delta in client.stream(one)]) for one in accepted[:6]]
            return accepted, [result.job_id for result in ends], streamed

    with ExitStack() as stack:
        for model, queue in queues.items():
            stack.enter_context(RunningService(cluster.url, queue, engine=FakeEngine(model_name=model)))
        # by name and queue: the table also holds what the cluster's earlier tests registered
        routes = {(model.encode(), queue.encode()) for model, queue in queues.items()}
        wait_for(lambda: routes <= cluster.owner(MODELS).client.hgetall(MODELS).items())
        with Client(cluster.url, queue=queues["model-1"]) as client:
            accepted, ended, streamed = asyncio.run(scenario())

            assert [job.id for job in jobs] == accepted
            assert sorted(accepted) == sorted(ended)
            assert streamed == [client.text(job_id) for job_id in accepted[:6]]
    for queue, node in zip(queues.values(), cluster.nodes, strict=True):
        assert 10 == sum(1 for _ in node.client.scan_iter(match=f"{QueueKeys(queue).base}:r:*", count=1000))


def test_a_slot_that_moves_key_by_key(cluster: Cluster, queue: str) -> None:
    """
    The queue stands still while its keys are on two nodes, and goes on at the new one: all jobs end,
    each once, and those who wait never notice.
    """
    base = QueueKeys(queue).base
    source, target = node_of(cluster, queue), other_node(cluster, queue)
    masters = cluster.nodes[:3]
    with (
        RunningService(cluster.url, queue, engine=FakeEngine(tokens_per_s=4_000)) as service,
        Client(cluster.url, queue=queue) as client,
    ):
        with Traffic(cluster.url, queue) as traffic:
            long = client.submit(a_job("long", max_tokens=4000, stream=True)).job_id
            wait_for(lambda: client.status(long).state == "running")
            cluster.set_slot(base, "IMPORTING", cluster.id_of(source), nodes=[target])
            cluster.set_slot(base, "MIGRATING", cluster.id_of(target), nodes=[source])
            assert cluster.move_keys(base, source, target, most=20) > 0

            # half of the queue is here and half is there: nobody may touch it
            with pytest.raises(ServerAway, match=r"not ready|moved"):
                client.submit(a_job("in between"))

            while cluster.move_keys(base, source, target):
                pass
            cluster.set_slot(base, "NODE", cluster.id_of(target), nodes=[target, source, *masters])
            traffic.goes_on()
        assert "done" == client.result(long, wait_s=60).status
        ids = [job.id for job in traffic.jobs]
        assert {"done"} == {result.status for result in client.finished(ids, wait_s=60)}
        # one more: the submit that was refused reached nobody
        assert len(traffic.jobs) + 1 == client.stats().totals["done"]
        assert 1 == client.status(long).attempt
    assert service.error is None
    assert node_of(cluster, queue) is target


def test_a_slot_that_moves_as_a_whole(cluster: Cluster, queue: str) -> None:
    """
    Where the server can do that, the queue is away for a moment, and nothing is lost.
    """
    source, target = node_of(cluster, queue), other_node(cluster, queue)
    if "migrateslots" not in str(source.client.execute_command("COMMAND", "INFO", "CLUSTER|MIGRATESLOTS")):
        pytest.skip("the server moves slots key by key alone")
    slot = str(source.client.execute_command("CLUSTER", "KEYSLOT", QueueKeys(queue).base))
    with RunningService(cluster.url, queue), Client(cluster.url, queue=queue) as client:
        with Traffic(cluster.url, queue) as traffic:
            source.client.execute_command(
                "CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", cluster.id_of(target)
            )
            wait_for(lambda: node_of(cluster, queue) is target, 30)
            traffic.goes_on()
        ids = [job.id for job in traffic.jobs]
        assert {"done"} == {result.status for result in client.finished(ids, wait_s=60)}
        assert len(traffic.jobs) == client.stats().totals["done"]


def test_a_node_that_dies(tmp_path: Path) -> None:
    """
    Its replica takes over: submits with patience go through, all who wait hear the end, the worker
    goes on with what it has.
    """
    with Cluster(tmp_path, replicas=1) as cluster:
        master, replica = cluster.nodes[0], cluster.nodes[3]
        queue = cluster.key_at(master, "mortal-%d")
        with (
            RunningService(cluster.url, queue, engine=FakeEngine(tokens_per_s=1500)) as service,
            Client(cluster.url, queue=queue) as client,
        ):
            batch = client.create_batch().batch_id
            awaited = client.submit(a_job("awaited", max_tokens=6000, stream=True, batch=batch)).job_id
            client.seal_batch(batch)
            with Waiters(cluster.url, queue, awaited, batch) as waiters:
                waiters.wait_until_they_wait(master.client)
                wait_for(lambda: master.client.execute_command("WAIT", 1, 1000) == 1)

                master.kill()

                later = client.submit(a_job("later"), wait_s=40).job_id
                assert "done" == client.result(later, wait_s=40).status
            text = client.text(awaited)
        assert service.error is None
        assert {text, 1} == set(waiters.heard.values())
        assert 8 == len(waiters.heard)
        assert replica.client.exists(QueueKeys(queue).result(later))


@pytest.mark.slow
def test_a_worker_process_serves_a_cluster(cluster: Cluster, queue: str, tmp_path: Path) -> None:
    """
    The command line takes the URL: the worker serves, and its supervisor reports a death there.
    """
    flags = ("--redis-url", cluster.url, "--queue", queue, "--engine", "fake", "--fake-tokens-per-s", "100")
    with worker_process(tmp_path / "log", *flags) as worker, Client(cluster.url, queue=queue) as client:
        job_id = client.submit(a_job(max_tokens=400)).job_id
        wait_for(lambda: client.status(job_id).state == "running")
        worker.send_worker(9)
        assert "done" == client.result(job_id, wait_s=60).status
        assert any(entry["event"] == "supervisor.reported" for entry in worker.events())


def test_a_cluster_is_asked_for_a_key(cluster: Cluster) -> None:
    """
    There is no server of a cluster as such.
    """
    from pagemill.connection import connect

    with pytest.raises(SettingsError, match="takes a key"):
        connect(cluster.url)
