"""Running scripts: known by hash, sent again where they are not."""

import asyncio

import pytest
from redis import Redis
from redis.exceptions import TimeoutError as RedisTimeoutError

from pagemill import calls
from pagemill.client import Client
from pagemill.client_core import prepare
from pagemill.connection import connect, connect_async, send_once
from pagemill.errors import QueueUnavailable
from pagemill.keys import QueueKeys
from pagemill.messages import Accepted
from pagemill.scripts import Call, Script, load, run, run_many, run_many_async
from tests.support.servers import BlockingConsumer, a_job


def test_a_flushed_server_gets_the_scripts_again(client: Client, server_url: str, queue: str, redis: Redis) -> None:
    """
    After SCRIPT FLUSH single calls, pipelines and PULL work as before.
    """
    worker = BlockingConsumer(server_url, queue)
    for _ in range(2):
        redis.script_flush()
        client.submit_many([a_job(f"{number}") for number in range(40)])
        redis.script_flush()
        held = worker.pull()
        redis.script_flush()
        assert {"done"} == set(worker.finish(*held))
    worker.close()


def test_replies_keep_their_order_when_a_script_is_new(server_url: str, queue: str, redis: Redis) -> None:
    """
    In a pipeline of known and unknown scripts each call gets its own reply.
    """
    redis.script_flush()
    keys = QueueKeys(queue)
    client = connect(server_url)
    run(client, calls.submit(keys, [prepare(a_job(id="a"))], 0))

    replies = run_many(client, [calls.cancel(keys, "a"), calls.cancel(keys, "b"), calls.cancel(keys, "a")])

    assert ["cancelled", None, "cancelled"] == replies
    client.close()


def test_a_faulty_script_is_a_typed_error(server_url: str, queue: str) -> None:
    """
    What the server refuses is QueueUnavailable, from a single call and from a pipeline.
    """
    client = connect(server_url)
    faulty: Call[object] = Call(Script(b"return redis.call('NOPE')", "0" * 40), QueueKeys(queue).base, [], lambda x: x)

    with pytest.raises(QueueUnavailable):
        run(client, faulty)
    with pytest.raises(QueueUnavailable):
        run_many(client, [faulty, faulty])
    client.close()


def test_pipelines_work_on_a_loop(server_url: str, queue: str) -> None:
    """
    The asyncio twin of the pipeline gives the same replies.
    """
    keys = QueueKeys(queue)

    async def scenario() -> list[list[calls.Answer]]:
        redis = connect_async(server_url)
        submits = [calls.submit(keys, [prepare(a_job(id=name))], 0) for name in ("a", "b")]
        replies = await run_many_async(redis, submits)
        await redis.aclose()
        return replies

    assert [[Accepted("a", "queued", duplicate=False)], [Accepted("b", "queued", duplicate=False)]] == asyncio.run(
        scenario()
    )


def test_a_command_sent_once_is_not_repeated(server_url: str, redis: Redis) -> None:
    """
    A command whose reply does not come in time has run once, and the connection is not used again.
    """

    async def scenario() -> int:
        client = connect_async(server_url)
        with pytest.raises(RedisTimeoutError, match=r"no reply within 0\.02 s"):
            await send_once(client, "BLPOP", "nothing", 0.2, timeout_s=0.02)
        count = await send_once(client, "INCR", "counted")
        await client.aclose()
        return int(count)

    assert 1 == asyncio.run(scenario())
    assert b"1" == redis.get("counted")
    redis.delete("counted")


def test_scripts_are_read_once() -> None:
    """
    The same script is the same object, and only those that end jobs carry the code for it.
    """
    assert load("submit") is load("submit")
    assert b"local function settle(" in load("finish").source
    assert b"local function settle(" not in load("submit").source
