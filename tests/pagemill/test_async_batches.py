"""Batches on a loop: the same verbs, while the loop goes on."""

import asyncio

import pytest

from pagemill.async_client import AsyncClient
from pagemill.connection import connect_async
from pagemill.consumer import Consumer
from pagemill.errors import BatchClosed, BatchNotFound, WaitTimeout
from pagemill.messages import BatchStatus, Finished, Room
from tests.support.servers import a_job, result_of


def test_a_batch_from_its_opening_to_its_end(server_url: str, queue: str) -> None:
    """
    Opened, filled, sealed, watched while a worker on the same loop answers it, and listed.
    """

    async def answer(num_jobs: int) -> None:
        redis = connect_async(server_url)
        async with Consumer(redis, queue, worker_id="answerer", lease_ms=30_000) as worker:
            while num_jobs:
                held = await worker.pull(rooms=[Room(2, 1_000_000)] * 3)
                await worker.finish([Finished(job, result_of(job)) for job in held])
                num_jobs -= len(held)
        await redis.aclose()

    async def scenario() -> tuple[list[BatchStatus], BatchStatus, list[BatchStatus]]:
        async with AsyncClient(server_url, queue=queue) as client:
            batch_id = (await client.create_batch(metadata={"a": "b"})).batch_id
            await client.submit_many([a_job(f"{number}", batch=batch_id) for number in range(6)])
            assert "sealed" == (await client.seal_batch(batch_id)).state
            with pytest.raises(WaitTimeout):
                await client.wait_batch(batch_id, wait_s=0.01)
            worker = asyncio.create_task(answer(6))
            seen = [status async for status in client.watch_batch(batch_id, wait_s=30)]
            await worker
            return seen, await client.wait_batch(batch_id), await client.list_batches()

    seen, ended, listed = asyncio.run(scenario())

    assert ("ended", 6, {"a": "b"}) == (ended.state, ended.done, ended.metadata)
    assert sorted({status.done for status in seen}) == [status.done for status in seen]
    assert [ended] == listed == [seen[-1]]


def test_a_cancelled_batch_ends(server_url: str, queue: str) -> None:
    """
    Its jobs are ended, none joins it, and an unknown batch is told in words.
    """

    async def scenario() -> BatchStatus:
        async with AsyncClient(server_url, queue=queue) as client:
            batch_id = (await client.create_batch()).batch_id
            await client.submit(a_job(batch=batch_id))
            await client.cancel_batch(batch_id)
            with pytest.raises(BatchClosed):
                await client.submit(a_job(batch=batch_id))
            with pytest.raises(BatchNotFound):
                await client.batch_status("none")
            return await client.batch_status(batch_id)

    status = asyncio.run(scenario())

    assert ("ended", 1) == (status.state, status.cancelled)
