"""Many waits on one connection: none misses its end, whatever happens to that connection."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from redis import Redis

from pagemill.async_client import AsyncClient
from pagemill.client_base import MAX_UNDER_WAY
from pagemill.connection import AsyncServers
from pagemill.errors import QueueUnavailable
from pagemill.keys import QueueKeys
from pagemill.schema import ResultStatus
from pagemill.subscriber import Ear, Subscriber
from tests.support.servers import BlockingConsumer, MakeConsumer, a_job, result_of, wait_for
from tests.support.tcp_proxy import TcpProxy


@pytest.fixture
def server_url(newest_server: str) -> str:
    return newest_server


async def until(condition: Callable[[], Any]) -> None:
    await asyncio.to_thread(wait_for, condition)


def channels(redis: Redis) -> set[str]:
    return {name.decode() for name in redis.pubsub_channels()}


def connections(redis: Redis) -> int:
    # this one apart
    return len(redis.client_list()) - 1


def test_a_thousand_waits_share_one_connection(server_url: str, queue: str, redis: Redis) -> None:
    """
    All results come, and the server never saw more connections than commands may be under way.
    """
    jobs = [a_job(f"{number}") for number in range(1000)]

    async def scenario() -> tuple[int, int, list[str]]:
        async with AsyncClient(server_url, queue=queue) as client:
            ids = [one.job_id for one in await client.submit_many(jobs)]
            waits = asyncio.gather(*(client.result(job_id, wait_s=60) for job_id in ids))
            await until(lambda: len(channels(redis)) == 1000)
            listening = len([row for row in redis.client_list() if int(row["sub"])])
            await asyncio.to_thread(answer, server_url, queue)
            results = await waits
            return listening, connections(redis), [result.job_id for result in results]

    before = connections(redis)
    listening, most, answered = asyncio.run(scenario())

    assert 1 == listening
    # commands, the one that listens, and the worker's
    assert most - before <= MAX_UNDER_WAY + 2
    assert [job.id for job in jobs] == answered


def answer(url: str, queue: str) -> None:
    worker = BlockingConsumer(url, queue)
    while jobs := worker.pull(256):
        worker.finish(*jobs)
    worker.close()


def test_nothing_is_listened_to_that_nobody_awaits(
    server_url: str, queue: str, redis: Redis, consumer: MakeConsumer
) -> None:
    """
    A wait that ended, was given up or timed out takes its channel along, and not those of others.
    """

    async def scenario() -> list[set[str]]:
        seen = []
        async with AsyncClient(server_url, queue=queue) as client:
            ids = [one.job_id for one in await client.submit_many([a_job(f"{n}") for n in range(4)])]
            names = [client._directory.own.channel(job_id) for job_id in ids]
            waits = [asyncio.ensure_future(client.result(job_id, wait_s=30)) for job_id in ids]
            others = asyncio.ensure_future(client.result(ids[3], wait_s=30))
            await until(lambda: channels(redis) == set(names))
            for given_up in (waits[0], waits[3]):
                while not given_up.done():
                    # Python 3.11 can swallow the first, in the middle of a command
                    given_up.cancel()
                    await asyncio.wait([given_up], timeout=0.1)
            await until(lambda: channels(redis) == set(names[1:]))
            worker = await asyncio.to_thread(consumer)
            await asyncio.to_thread(lambda: worker.finish(*worker.pull()))
            await asyncio.gather(waits[1], waits[2], others)
            await until(lambda: channels(redis) == set())
            seen.append(channels(redis))
        return seen

    assert [set()] == asyncio.run(scenario())


@pytest.fixture
def no_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait that misses its end hangs."""
    monkeypatch.setattr("pagemill.async_client.SHARED_POLL_S", 600.0)


async def wait_through(proxy: TcpProxy, queue: str, redis: Redis, fault: Callable[[], None]) -> ResultStatus:
    """The end of a job that comes while something happens to the connection."""
    async with AsyncClient(proxy.url, queue=queue) as client, asyncio.timeout(40):
        job_id = (await client.submit(a_job())).job_id
        wait = asyncio.ensure_future(client.result(job_id))
        await until(lambda: channels(redis))
        await asyncio.to_thread(fault)
        return (await wait).status


@pytest.mark.usefixtures("no_poll")
def test_an_end_while_the_connection_was_lost(
    server_url: str, queue: str, redis: Redis, consumer: MakeConsumer
) -> None:
    """
    Whoever waits looks again once the connection is back.
    """
    worker = consumer()
    with TcpProxy(server_url) as proxy:

        def end_unheard() -> None:
            proxy.strand()
            worker.finish(*worker.pull())
            proxy.cut()

        assert "done" == asyncio.run(wait_through(proxy, queue, redis, end_unheard))


@pytest.mark.usefixtures("no_poll")
def test_a_connection_that_is_silent_and_dead(
    server_url: str, queue: str, redis: Redis, consumer: MakeConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    It is asked whether it is there, and replaced.
    """
    monkeypatch.setattr("pagemill.subscriber.SILENCE_S", 0.3)
    monkeypatch.setattr("pagemill.client_base.AsyncServers", partial(AsyncServers, timeout_s=0.5))
    worker = consumer()
    with TcpProxy(server_url) as proxy:

        def end_unheard() -> None:
            proxy.strand()
            worker.finish(*worker.pull())

        assert "done" == asyncio.run(wait_through(proxy, queue, redis, end_unheard))


def test_an_end_that_was_not_published(
    server_url: str, queue: str, redis: Redis, consumer: MakeConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    The slow poll finds it.
    """
    monkeypatch.setattr("pagemill.async_client.SHARED_POLL_S", 0.2)
    worker = consumer()
    with TcpProxy(server_url) as proxy:

        def end_in_silence() -> None:
            [job] = worker.pull()
            redis.set(QueueKeys(queue).result(job.job_id), result_of(job).payload())
            wait_for(lambda: not channels(redis))
            worker.finish(job)

        assert "done" == asyncio.run(wait_through(proxy, queue, redis, end_in_silence))


@pytest.mark.usefixtures("no_poll")
def test_results_are_heard_in_the_order_of_their_ends(
    server_url: str, queue: str, redis: Redis, consumer: MakeConsumer
) -> None:
    """
    `finished` of many jobs listens to all of them, and gives each once.
    """
    jobs = [a_job(f"{number}") for number in range(300)]
    worker = consumer()

    async def scenario() -> list[str]:
        async with AsyncClient(server_url, queue=queue) as client, asyncio.timeout(40):
            ids = [one.job_id for one in await client.submit_many(jobs)]
            results = client.finished(ids)
            first = asyncio.ensure_future(anext(results))
            await until(lambda: len(channels(redis)) == 300)
            held = await asyncio.to_thread(lambda: worker.pull(300))
            heard = []
            for job in reversed(held):
                await asyncio.to_thread(worker.finish, job)
                heard.append((await (first if not heard else anext(results))).job_id)
            assert [] == [one async for one in results]
            return heard

    assert [job.id for job in reversed(jobs)] == asyncio.run(scenario())


def test_an_ear_hears_each_channel_once() -> None:
    """
    What rang twice before it was taken is one, in the order of the first.
    """
    ear = Ear()
    for name in ("b", "a", "b"):
        ear.ring(name)

    assert (["b", "a"], []) == (ear.take(), ear.take())


def test_listening_again_after_silence(server_url: str, redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    The connection goes when nobody listens for a while, and is there for the next who does.
    """
    monkeypatch.setattr("pagemill.subscriber.SILENCE_S", 0.05)

    async def scenario() -> list[str]:
        servers = AsyncServers(server_url)
        subscriber = Subscriber(servers, "any")
        async with subscriber.listen(["first"]):
            assert {"first"} == channels(redis)
        await until(lambda: subscriber._task is None)
        async with subscriber.listen(["second"]) as ear:
            ear.take()
            redis.publish("second", "")
            await ear.wait(10)
            heard = ear.take()
        await subscriber.close()
        await servers.close()
        return heard

    assert ["second"] == asyncio.run(scenario())


def test_no_server_at_all() -> None:
    """
    The wait ends with the one typed error.
    """

    async def scenario() -> None:
        async with AsyncClient("redis://127.0.0.1:1") as client:
            await client.result("any", wait_s=1)

    with pytest.raises(QueueUnavailable):
        asyncio.run(scenario())
