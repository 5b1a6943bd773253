"""As test_lost_replies.py, for what bulk jobs, readers of replies and exporters call."""

import asyncio

import pytest
from redis import Redis

from pagemill.bulk_client import BulkClient
from pagemill.client import Client
from pagemill.connection import connect, connect_async
from pagemill.keys import QueueKeys
from pagemill.overview import read_overview
from pagemill.replies import Replies
from pagemill.shown_tokenizer import ShownTokenizer, pack
from pagemill.survey import read_survey
from tests.support.servers import MakeConsumer, a_job
from tests.support.tcp_proxy import TcpProxy, lose_replies_of

pytestmark = pytest.mark.usefixtures("known_scripts")


def test_a_lease_is_taken_and_given_back_once(proxy: TcpProxy, queue: str) -> None:
    """
    Whoever took it has it, whatever reply was lost, and nobody has it afterwards.
    """
    with BulkClient(proxy.url, queue=queue) as client:
        lose_replies_of(proxy, "lease")
        assert "me" == client.take_lease("output", "me", 60.0)[0]
        assert "me" == client.take_lease("output", "another", 60.0)[0]
        lose_replies_of(proxy, "lease")
        client.give_lease_back("output", "me")

        assert ("", 2) == (client.lease_holder("output"), proxy.num_replies_lost)


def test_a_tokenizer_is_shown(proxy: TcpProxy, queue: str, redis: Redis) -> None:
    """
    Sent again, it is what it was.
    """
    packed = pack('{"model": "x"}')
    assert packed is not None

    async def show() -> None:
        async with connect_async(proxy.url) as far:
            await ShownTokenizer(far, QueueKeys(queue)).show(packed)

    lose_replies_of(proxy, "tokenizer", "tokenizer")
    asyncio.run(show())

    assert (packed, 2) == (redis.hget(QueueKeys(queue).tokenizer, "z"), proxy.num_replies_lost)


def test_a_reply_is_told_and_acknowledged_once(
    proxy: TcpProxy, queue: str, client: Client, consumer: MakeConsumer
) -> None:
    """
    One that a dead reader had comes to another one, and goes when it was dealt with.
    """
    job_id = client.submit(a_job(reply_to="inbox")).job_id
    worker = consumer()
    worker.finish(*worker.pull())
    with connect(proxy.url) as far:
        dead, reader = (Replies(far, queue, "inbox", block_s=0.01, claim_s=0.0) for _ in range(2))
        assert [job_id] == [reply.job_id for reply in dead.take()]

        lose_replies_of(proxy, "claim_replies")
        taken = reader.take()
        assert [job_id] == [reply.job_id for reply in taken]
        lose_replies_of(proxy, "ack_replies")
        reader.ack(taken)

        assert ([], [], 2) == (reader.take(), dead.take(), proxy.num_replies_lost)


def test_a_queue_is_looked_at_again(proxy: TcpProxy, queue: str, client: Client) -> None:
    """
    A look changes nothing: the second one sees what the first one saw.
    """
    client.submit(a_job())

    async def look() -> int:
        async with connect_async(proxy.url) as far:
            return (await read_survey(far, QueueKeys(queue))).queued_tokens

    lose_replies_of(proxy, "survey")

    assert (client.stats().queued_tokens["standard"], 1) == (asyncio.run(look()), proxy.num_replies_lost)


def test_dead_letters_are_looked_at_again(proxy: TcpProxy, queue: str, client: Client, consumer: MakeConsumer) -> None:
    """
    As a queue: the letter is there, once.
    """
    job_id = client.submit(a_job()).job_id
    worker = consumer()
    [job] = worker.pull()
    worker.run(worker.consumer.bury(job, why="retries", message="why"))

    async def look() -> list[str]:
        async with connect_async(proxy.url) as far:
            found = await read_overview(far, QueueKeys(queue), max_batches=1, max_letters=5)
        return [letter.job_id for letter in found.letters]

    lose_replies_of(proxy, "letters")

    assert ([job_id], 1) == (asyncio.run(look()), proxy.num_replies_lost)
