"""The asyncio client: the same verbs, on a loop that goes on meanwhile."""

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest
from redis import Redis

from pagemill.async_client import AsyncClient
from pagemill.client_core import CHUNK
from pagemill.connection import connect_async
from pagemill.consumer import Consumer
from pagemill.errors import Busy, Conflict, JobNotFound, QueueUnavailable, WaitTimeout
from pagemill.messages import Finished, Room, TokenDelta
from pagemill.object_store import FileStore
from producers.local_redis import local_redis
from tests.support.servers import MakeConsumer, a_job, result_of, wait_for


async def answer_all(url: str, queue: str, num_jobs: int) -> None:
    """A worker that answers so many jobs, on the caller's loop."""
    redis = connect_async(url)
    async with Consumer(redis, queue, worker_id="answerer", lease_ms=30_000) as worker:
        while num_jobs:
            held = await worker.pull(rooms=[Room(16, 1_000_000)] * 3)
            await worker.finish([Finished(job, result_of(job)) for job in held])
            num_jobs -= len(held)
            if not held:
                await worker.wait_for_work(0.05)
    await redis.aclose()


def test_submit_and_wait(server_url: str, queue: str) -> None:
    """
    Many waiters on one loop get their answers from a worker on the same loop.
    """

    async def scenario() -> list[str]:
        async with AsyncClient(server_url, queue=queue) as client:
            jobs = [(await client.submit(a_job(f"{number}"))).job_id for number in range(20)]
            waiters = [asyncio.create_task(client.text(job_id, wait_s=30)) for job_id in jobs]
            await answer_all(server_url, queue, 20)
            return list(await asyncio.gather(*waiters))

    assert ["answer"] * 20 == asyncio.run(scenario())


def test_many_jobs_and_their_results(server_url: str, queue: str) -> None:
    """
    More than a chunk of jobs is accepted in order, and each result comes once.
    """
    jobs = [a_job(f"{number}") for number in range(CHUNK + 10)]

    async def scenario() -> tuple[list[str], list[str]]:
        async with AsyncClient(server_url, queue=queue) as client:
            accepted = [one.job_id for one in await client.submit_many(jobs)]
            worker = asyncio.create_task(answer_all(server_url, queue, len(jobs)))
            results = [result.job_id async for result in client.finished(accepted, wait_s=60)]
            await worker
            return accepted, results

    accepted, results = asyncio.run(scenario())

    assert [job.id for job in jobs] == accepted
    assert sorted(accepted) == sorted(results)


def test_a_busy_queue_is_waited_for(
    server_url: str, queue: str, monkeypatch: pytest.MonkeyPatch, consumer: MakeConsumer
) -> None:
    """
    With patience, a batch goes in as room is made; without, Busy is raised.
    """
    jobs = [a_job(f"{number}") for number in range(4)]
    worker = consumer()
    slept: list[float] = []

    async def scenario() -> None:
        async with AsyncClient(server_url, queue=queue, max_queued_tokens=25) as client:
            with pytest.raises(Busy):
                await client.submit_many(jobs)

            async def make_room(delay_s: float) -> None:
                slept.append(delay_s)
                held = await asyncio.to_thread(worker.pull)
                assert {"done"} == set(await asyncio.to_thread(worker.finish, *held))

            with monkeypatch.context() as patch:
                patch.setattr("pagemill.async_client.asyncio.sleep", make_room)
                await client.submit_many(jobs, wait_s=3600)

    asyncio.run(scenario())

    assert slept
    worker.pull()


def test_a_stream_is_followed(server_url: str, queue: str) -> None:
    """
    Text deltas come while the job runs, and the iteration ends with it.
    """

    async def scenario() -> list[TokenDelta]:
        redis = connect_async(server_url)
        async with (
            AsyncClient(server_url, queue=queue) as client,
            Consumer(redis, queue, worker_id="streamer", lease_ms=30_000) as worker,
        ):
            job_id = (await client.submit(a_job(stream=True))).job_id
            [job] = await worker.pull(rooms=[Room(1, 1000)] * 3)
            await worker.publish_tokens(job, [TokenDelta(0, 0, "ans", 1)])
            deltas = client.stream(job_id, wait_s=30)
            found = [await anext(deltas)]
            await worker.publish_tokens(job, [TokenDelta(0, 3, "wer", 2)])
            await worker.finish([Finished(job, result_of(job))])
            found += [delta async for delta in deltas]
        await redis.aclose()
        return found

    assert [TokenDelta(0, 0, "ans", 1), TokenDelta(0, 3, "wer", 2)] == asyncio.run(scenario())


def test_the_other_verbs(server_url: str, queue: str) -> None:
    """
    Cancel, status, stats and forget give what the blocking client gives.
    """

    async def scenario() -> None:
        async with AsyncClient(server_url, queue=queue) as client:
            job_id = (await client.submit(a_job())).job_id
            with pytest.raises(WaitTimeout):
                await client.result(job_id, wait_s=0)
            assert "queued" == (await client.status(job_id)).state
            assert not await client.forget(job_id)
            assert "cancelled" == await client.cancel(job_id)
            assert 1 == (await client.stats()).totals["cancelled"]
            assert {} == await client.workers()
            assert await client.forget(job_id)
            with pytest.raises(JobNotFound):
                await client.status(job_id)

    asyncio.run(scenario())


def test_large_payloads_go_to_the_store(server_url: str, queue: str, consumer: MakeConsumer, tmp_path: Path) -> None:
    """
    The store is used as by the blocking client.
    """
    job = a_job("long " * 20_000)
    store = FileStore(tmp_path)

    async def scenario() -> None:
        async with AsyncClient(server_url, queue=queue, object_store=store) as client:
            await client.submit(job)
            with pytest.raises(Conflict):
                await client.submit(a_job("other " * 20_000, id=job.id))

    asyncio.run(scenario())

    assert 1 == len(list(tmp_path.rglob("*.json")))
    assert job.payload() == store.get(consumer().pull()[0].payload_ref or "")


def test_a_server_that_goes_away_while_one_waits() -> None:
    """
    Waiting for a result ends with the one typed error when the server goes, and stays away.
    """

    async def scenario(servers: ExitStack) -> None:
        url = servers.enter_context(local_redis())
        async with AsyncClient(url) as client:
            job_id = (await client.submit(a_job())).job_id
            waiting = asyncio.ensure_future(client.result(job_id, wait_s=3))
            with Redis.from_url(url) as redis:
                await asyncio.to_thread(wait_for, lambda: redis.pubsub_channels())
            await asyncio.to_thread(servers.close)
            with pytest.raises(QueueUnavailable):
                await waiting
            with pytest.raises(QueueUnavailable) as caught:
                await client.submit(a_job(id="mine"))
            assert "mine" == caught.value.job_id

    with ExitStack() as servers:
        asyncio.run(scenario(servers))


def test_shares_are_set_and_read(server_url: str, queue: str) -> None:
    """
    An operator's program sets weights and limits, and hears which of them refused a job.
    """

    async def story() -> tuple[list[tuple[str, float, int]], dict[str, int], Busy]:
        async with AsyncClient(server_url, queue=queue) as client:
            await client.set_tenant("acme", weight=2, max_queued_tokens=5)
            await client.set_lane_limit("bulk", 7)
            await client.submit(a_job(tenant="acme"))
            with pytest.raises(Busy) as caught:
                await client.submit(a_job(tenant="acme"))
            tenants = [(one.tenant, one.weight, one.max_queued_tokens) for one in await client.tenants()]
            return tenants, dict(await client.lane_limits()), caught.value

    tenants, lanes, busy = asyncio.run(story())

    assert [("acme", 2.0, 5)] == tenants
    assert {"interactive": 0, "standard": 0, "bulk": 7} == lanes
    assert ("tenant", 60.0) == (busy.reason, busy.retry_after_s)
