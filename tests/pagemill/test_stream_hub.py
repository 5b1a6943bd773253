"""Many callers of one loop submit and follow jobs, over few connections."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis import Redis

from pagemill.async_client import AsyncClient
from pagemill.errors import Conflict, JobNotFound, QueueUnavailable, UnknownModel, WaitTimeout
from pagemill.messages import Accepted, TokenDelta
from pagemill.object_store import FileStore
from pagemill.schema import Job, Result
from pagemill.stream_hub import MAX_APART, StreamHub, _Mailbox
from pagemill.submitter import Submitter
from tests.support.jobs import expected_texts, seeded_jobs
from tests.support.redis_process import RedisProcess
from tests.support.servers import a_job
from tests.support.services import RunningService
from worker.fake_engine import FakeEngine


@asynccontextmanager
async def hub_at(url: str, queue: str, store: FileStore | None = None) -> AsyncIterator[tuple[Submitter, StreamHub]]:
    async with AsyncClient(url, queue=queue, object_store=store) as client:
        hub = StreamHub(client)
        try:
            yield Submitter(client), hub
        finally:
            await hub.close()


async def followed(hub: StreamHub, job_id: str) -> tuple[str, list[int], Result]:
    """All text of a job, the offsets at which it came, and its result."""
    text, offsets = "", []
    async for item in hub.follow(job_id, wait_s=60):
        if isinstance(item, Result):
            return text, offsets, item
        text += item.text
        offsets.append(item.offset)
    raise AssertionError("no result")


def test_each_caller_gets_the_text_of_its_own_job(server_url: str, queue: str, redis: Redis) -> None:
    """
    Four hundred callers at once: each has each character once, before the result, and few connections carry them.
    """
    jobs = seeded_jobs(400, 40, stream=True)
    before = redis.info("clients")["connected_clients"]

    async def scenario() -> tuple[list[tuple[str, list[int], Result]], int]:
        async with hub_at(server_url, queue) as (submitter, hub):

            async def call(job: Job) -> tuple[str, list[int], Result]:
                return await followed(hub, (await submitter.submit(job)).job_id)

            calls = asyncio.gather(*map(call, jobs))
            await asyncio.sleep(0)
            answers = await calls
            return answers, redis.info("clients")["connected_clients"]

    engine = FakeEngine(tokens_per_s=20_000, max_num_seqs=64)
    with RunningService(server_url, queue, engine=engine):
        answers, connections = asyncio.run(scenario())

    assert expected_texts(jobs) == [text for text, _, _ in answers]
    assert [job.id for job in jobs] == [result.job_id for _, _, result in answers]
    assert all(len(offsets) > 1 and offsets == sorted(set(offsets)) for _, offsets, _ in answers)
    assert connections - before < 40


def test_results_alone_are_awaited_without_their_text(server_url: str, queue: str) -> None:
    """
    Jobs that do not stream are heard of by the queue's events.
    """
    jobs = seeded_jobs(50, 5)

    async def scenario() -> list[str]:
        async with hub_at(server_url, queue) as (submitter, hub):
            await asyncio.gather(*map(submitter.submit, jobs))
            results = await asyncio.gather(*(hub.result(job.id, wait_s=60) for job in jobs))
            again = await asyncio.gather(*(hub.result(job.id, wait_s=60) for job in jobs))
            assert results == again
            return [result.text for result in results]

    with RunningService(server_url, queue):
        assert expected_texts(jobs) == asyncio.run(scenario())


def test_two_callers_may_follow_one_job(server_url: str, queue: str) -> None:
    """
    One from its beginning, one that has some of it already.
    """
    [job] = seeded_jobs(1, 200, stream=True)

    async def scenario() -> tuple[str, str]:
        async with hub_at(server_url, queue) as (submitter, hub):
            await submitter.submit(job)

            async def call(have: int) -> str:
                items = hub.follow(job.id, offsets={0: have}, wait_s=60)
                return "".join([item.text async for item in items if isinstance(item, TokenDelta)])

            return await asyncio.gather(call(0), call(7))  # type: ignore[return-value]

    with RunningService(server_url, queue, engine=FakeEngine(tokens_per_s=2000)):
        whole, rest = asyncio.run(scenario())

    assert expected_texts([job]) == [whole]
    assert whole[7:] == rest


def test_refusals_reach_the_caller_whose_job_it_is(server_url: str, queue: str) -> None:
    """
    Of jobs that are sent together, one conflicts and one has no queue; the others are accepted.
    """
    good, first = a_job("good"), a_job("one", idempotency_key="k")
    bad, lost = a_job("another", idempotency_key="k"), a_job("lost", model=f"none-{queue}")

    async def scenario() -> list[Accepted | BaseException]:
        async with hub_at(server_url, queue) as (submitter, _):
            await submitter.submit(first)
            calls = (submitter.submit(job) for job in (good, bad, lost))
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            again = await submitter.submit(good)
            assert (good.id, True) == (again.job_id, again.duplicate)
            async with AsyncClient(server_url, queue=queue) as client:
                for job in (first, good):
                    await client.cancel(job.id)
            return outcomes

    outcomes = asyncio.run(scenario())

    assert [Accepted, Conflict, UnknownModel] == [type(one) for one in outcomes]


def test_waits_end(server_url: str, queue: str) -> None:
    """
    A job that does not end in time, and one that never was.
    """

    async def scenario() -> None:
        async with hub_at(server_url, queue) as (submitter, hub):
            accepted = await submitter.submit(a_job())
            with pytest.raises(WaitTimeout):
                await hub.result(accepted.job_id, wait_s=0.05)
            with pytest.raises(JobNotFound):
                await hub.result("nobody", wait_s=30)
            with pytest.raises(JobNotFound):
                async for _ in hub.follow("nobody", wait_s=30):
                    pass
            async with AsyncClient(server_url, queue=queue) as client:
                await client.cancel(accepted.job_id)
            assert "cancelled" == (await hub.result(accepted.job_id, wait_s=30)).status

    asyncio.run(scenario())


def test_large_payloads_go_through_the_store(server_url: str, queue: str, tmp_path: Path) -> None:
    """
    As with the client itself; nothing of them is left when the jobs have ended.
    """
    store = FileStore(tmp_path)
    job = a_job("x" * 100_000, max_tokens=3)

    async def scenario() -> Result:
        async with hub_at(server_url, queue, store) as (submitter, hub):
            await submitter.submit(job)
            return await hub.result(job.id, wait_s=60)

    engine = FakeEngine(max_model_len=200_000, kv_tokens=400_000)
    with RunningService(server_url, queue, engine=engine, store=store):
        assert "done" == asyncio.run(scenario()).status

    assert [] == [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_server_that_comes_back_costs_no_text(tmp_path: Path) -> None:
    """
    Those who follow are not told of a restart.
    """
    jobs = seeded_jobs(8, 2000, stream=True)

    async def scenario(server: RedisProcess) -> list[tuple[str, list[int], Result]]:
        async with hub_at(server.url, "q") as (submitter, hub):
            await asyncio.gather(*map(submitter.submit, jobs))
            begun = asyncio.Event()

            async def call(job: Job) -> tuple[str, list[int], Result]:
                text, offsets = "", []
                async for item in hub.follow(job.id, wait_s=60):
                    if isinstance(item, Result):
                        return text, offsets, item
                    text += item.text
                    offsets.append(item.offset)
                    begun.set()
                raise AssertionError("no result")

            calls = asyncio.gather(*map(call, jobs))
            await begun.wait()
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            return await calls

    with RedisProcess(tmp_path) as server, RunningService(server.url, "q", engine=FakeEngine(tokens_per_s=8000)):
        answers = asyncio.run(scenario(server))

    assert expected_texts(jobs) == [text for text, _, _ in answers]
    assert {"done"} == {result.status for _, _, result in answers}


def test_a_server_that_stays_away_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Those who follow get an error after a while, and do not wait for ever.
    """
    monkeypatch.setattr("pagemill.stream_hub.AWAY_S", 0.2)

    async def scenario(server: RedisProcess) -> None:
        async with hub_at(server.url, "q") as (submitter, hub):
            accepted = await submitter.submit(a_job(stream=True))
            call = asyncio.create_task(followed(hub, accepted.job_id))
            await asyncio.sleep(0.1)
            await asyncio.to_thread(server.kill)
            with pytest.raises(QueueUnavailable):
                await call

    with RedisProcess(tmp_path) as server:
        asyncio.run(scenario(server))


def test_a_store_that_hangs_holds_up_no_other_caller(
    server_url: str, queue: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Results that are in the queue's server come while another one is still being read.
    """
    store = FileStore(tmp_path)
    hanging = threading.Event()
    large, small = a_job("large", max_tokens=80_000), a_job("small", max_tokens=3)

    async def scenario() -> tuple[Result, Result]:
        async with hub_at(server_url, queue, store) as (submitter, hub):
            await submitter.submit(large)
            slow = asyncio.create_task(hub.result(large.id, wait_s=60))
            assert await asyncio.to_thread(asked.wait, 60)
            await submitter.submit(small)
            quick = await hub.result(small.id, wait_s=20)
            assert not slow.done()
            hanging.set()
            return quick, await slow

    asked, get = threading.Event(), FileStore.get

    def slowly(self: FileStore, url: str) -> bytes:
        asked.set()
        hanging.wait(60)
        return get(self, url)

    monkeypatch.setattr(FileStore, "get", slowly)
    engine = FakeEngine(max_model_len=200_000, kv_tokens=400_000, tokens_per_s=200_000)
    with RunningService(server_url, queue, engine=engine, store=store):
        results = asyncio.run(scenario())

    assert ["done", "done"] == [result.status for result in results]


def test_a_caller_who_does_not_read_costs_the_text_alone() -> None:
    """
    Texts of an answer are joined when many wait; none is lost, and the order of each answer stays.
    """
    box, number = _Mailbox(), 10_000

    async def scenario() -> list[TokenDelta]:
        for place in range(number):
            box.put(TokenDelta(place % 3, place // 3, str(place % 10), place // 3 + 1))
        return [item for item in await box.take() if isinstance(item, TokenDelta)]

    items = asyncio.run(scenario())

    assert MAX_APART == len(items)
    for index in range(3):
        mine = [item for item in items if item.index == index]
        assert "".join(str(place % 10) for place in range(index, number, 3)) == "".join(item.text for item in mine)
        assert all(item.offset == sum(len(one.text) for one in mine[:at]) for at, item in enumerate(mine))
