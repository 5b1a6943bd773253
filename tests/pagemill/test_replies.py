"""Replies: each end that somebody asked to be told of is told, once, and stays until it was dealt with."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from redis import Redis

from pagemill.client import Client
from pagemill.connection import connect_briefly
from pagemill.errors import InvalidJob, QueueUnavailable
from pagemill.keys import QueueKeys
from pagemill.replies import Replies, Reply
from pagemill.reply_fields import MAX_CONTEXT_BYTES
from pagemill.schema import Job
from tests.support.raw_entries import adopt, refuse, take, write
from tests.support.redis_process import RedisProcess
from tests.support.servers import BlockingConsumer, MakeConsumer, a_job, wait_for

Told = tuple[str, str, str]
Ending = Callable[[Client, BlockingConsumer, str], Any]


@pytest.fixture
def replies(redis: Redis, queue: str) -> Replies:
    return Replies(redis, queue, "inbox", block_s=0.01)


def told(reader: Replies, number: int = 1) -> list[Told]:
    """What so many replies say; they are acknowledged, and no others are there."""
    found: list[Reply] = []
    wait_for(lambda: found.extend(reader.take()) or len(found) >= number)
    reader.ack(found)
    assert [] == reader.take()
    return [(reply.job_id or reply.batch_id, reply.status, reply.context) for reply in found]


def asking(client: Client, context: str = "c", **fields: Any) -> str:
    """A job that asks for a reply, in the queue."""
    return client.submit(a_job(reply_to="inbox", reply_context=context, **fields)).job_id


def _finished(_: Client, worker: BlockingConsumer, __: str) -> None:
    worker.finish(*worker.pull())


def _failed(_: Client, worker: BlockingConsumer, __: str) -> None:
    worker.finish(*worker.pull(), status="failed")


def _buried(_: Client, worker: BlockingConsumer, __: str) -> None:
    [job] = worker.pull()
    worker.run(worker.consumer.bury(job, why="retries", message="8 attempts failed"))


def _cancelled(client: Client, _: BlockingConsumer, job_id: str) -> None:
    client.cancel(job_id)


def _cancelled_while_it_ran(client: Client, worker: BlockingConsumer, job_id: str) -> None:
    [job] = worker.pull()
    client.cancel(job_id)
    worker.run(worker.consumer.release([job]))


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (_finished, "done"),
        (_failed, "failed"),
        (_buried, "failed"),
        (_cancelled, "cancelled"),
        (_cancelled_while_it_ran, "cancelled"),
    ],
)
def test_every_end_is_told_once(
    client: Client, consumer: MakeConsumer, replies: Replies, redis: Redis, queue: str, end: Ending, status: str
) -> None:
    """
    However a job ends, its reply has the id, the status and the context, which the hash then gives up.
    """
    worker = consumer()
    context = json.dumps({"chord": "é\x00"})
    job_id = asking(client, context)

    end(client, worker, job_id)

    assert [(job_id, status, context)] == told(replies)
    assert [None, None] == redis.hmget(QueueKeys(queue).job(job_id), "reply", "context")
    assert 0 == redis.xlen(QueueKeys(queue).replies("inbox"))


def test_a_deadline_is_told(client: Client, consumer: MakeConsumer, replies: Replies) -> None:
    """
    The sweeper that ends a job tells of it too.
    """
    worker = consumer()
    job_id = asking(client, timeout_s=0.01)

    wait_for(lambda: worker.run(worker.consumer.sweep()) and client.status(job_id).ended)

    assert [(job_id, "expired", "c")] == told(replies)


def test_a_second_finish_tells_nothing(client: Client, consumer: MakeConsumer, replies: Replies) -> None:
    """
    A finish whose reply was lost is sent again, and so is a submit: there is one end.
    """
    worker = consumer()
    job = a_job(reply_to="inbox", reply_context="c")
    client.submit(job)
    jobs = worker.pull()
    assert ["done"] == worker.finish(*jobs)
    assert ["duplicate"] == worker.finish(*jobs)
    assert client.submit(job).duplicate

    assert [(job.id, "done", "c")] == told(replies)


def test_nobody_is_told_who_did_not_ask(client: Client, consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    A job without `reply_to` writes no reply.
    """
    worker = consumer()
    client.submit(a_job())
    worker.finish(*worker.pull())

    assert [] == list(redis.scan_iter(match=f"{QueueKeys(queue).base}:reply:*"))


def test_a_requeued_dead_letter_tells_its_new_end(client: Client, consumer: MakeConsumer, replies: Replies) -> None:
    """
    The letter keeps whom to tell and the context: the job's failure is told, and later its answer.
    """
    worker = consumer()
    job_id = asking(client)
    _buried(client, worker, job_id)
    [letter] = client.dead_letters()

    client.requeue_dead(letter.entry_id)
    worker.finish(*worker.pull())

    assert [(job_id, "failed", "c"), (job_id, "done", "c")] == told(replies, 2)


def test_a_raw_entry_can_ask(consumer: MakeConsumer, replies: Replies, redis: Redis, queue: str) -> None:
    """
    Any program may ask for a reply in the JSON of its job; what is no job tells nobody.
    """
    worker = consumer()
    write(redis, queue, reply_to="inbox", reply_context="raw")
    [entry] = take(worker)
    adopt(worker, entry)
    worker.finish(*worker.pull())
    write(redis, queue, reply_to="inbox", prompt=7)
    [garbage] = take(worker)
    refuse(worker, garbage, garbage.job_id)

    assert [(entry.job_id, "done", "raw")] == told(replies)


@pytest.mark.parametrize("seal_first", [True, False])
def test_a_batch_can_ask(client: Client, consumer: MakeConsumer, replies: Replies, seal_first: bool) -> None:
    """
    Its end is told once, whether it was sealed before or after its last job.
    """
    worker = consumer()
    batch_id = client.create_batch(reply_to="inbox", reply_context="b").batch_id
    client.submit(a_job(batch=batch_id))
    if seal_first:
        client.seal_batch(batch_id)
    worker.finish(*worker.pull())
    client.seal_batch(batch_id)
    client.seal_batch(batch_id)

    assert [(batch_id, "ended", "b")] == told(replies)


def test_what_a_reader_left_another_gets(client: Client, consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    A reply that was taken and not acknowledged in time comes again, to whoever asks; until then it does not.
    """
    worker = consumer()
    job_id = asking(client)
    worker.finish(*worker.pull())
    dead = Replies(redis, queue, "inbox", block_s=0.01)
    [lost] = dead.take()
    patient = Replies(redis, queue, "inbox", block_s=0.01, claim_s=600)
    assert [] == patient.take()

    heir = Replies(redis, queue, "inbox", block_s=0.01, claim_s=0.05)

    assert [(job_id, "done", "c")] == told(heir)
    dead.ack([lost])


def test_readers_share_a_stream(client: Client, consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    Each reply is one reader's.
    """
    worker = consumer()
    ids = {asking(client, prompt=f"{number}") for number in range(20)}
    worker.finish(*worker.pull())
    readers = [Replies(redis, queue, "inbox", block_s=0.01) for _ in range(3)]

    taken = [reply.job_id for _ in range(4) for reader in readers for reply in reader.take(2)]

    assert (20, ids) == (len(taken), set(taken))


def test_a_flush_does_not_stop_a_reader(client: Client, consumer: MakeConsumer, replies: Replies, redis: Redis) -> None:
    """
    A group that is gone is made anew, and has what was written meanwhile.
    """
    assert [] == replies.take()
    redis.flushdb()
    worker = consumer()
    job_id = asking(client)
    worker.finish(*worker.pull())

    assert [(job_id, "done", "c")] == told(replies)


def test_readers_that_are_gone_are_forgotten(
    redis: Redis, queue: str, client: Client, consumer: MakeConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A reader that holds nothing goes after a while; one that holds a reply stays, or that would be lost.
    """
    worker = consumer()
    asking(client, prompt="one")
    asking(client, prompt="two")
    worker.finish(*worker.pull())
    busy = Replies(redis, queue, "inbox", reader="busy", block_s=0.01)
    [held] = busy.take(1)
    idle = Replies(redis, queue, "inbox", reader="idle", block_s=0.01)
    idle.ack(idle.take())
    monkeypatch.setattr("pagemill.replies.FORGET_MS", 0)

    def names() -> set[str]:
        Replies(redis, queue, "inbox", reader="new", block_s=0.01).take()
        return {one["name"].decode() for one in redis.xinfo_consumers(QueueKeys(queue).replies("inbox"), "workers")}

    assert "idle" not in wait_for(lambda: names() if "idle" not in names() else None)
    assert "busy" in names()
    busy.ack([held])


def test_an_unreachable_server_is_said(queue: str) -> None:
    """
    A reader raises what all callers of the queue know.
    """
    with connect_briefly("redis://127.0.0.1:1/0") as away, pytest.raises(QueueUnavailable):
        Replies(away, queue, "inbox").take()


def test_a_full_server_still_tells(tmp_path: Any) -> None:
    """
    What ends while the server is out of memory is acknowledged first, and its reply is written.
    """
    with RedisProcess(tmp_path / "redis") as server, Client(server.url, queue="q") as client:
        worker = BlockingConsumer(server.url, "q")
        job_id = asking(client, "c" * 1000)
        jobs = worker.pull()
        server.client.config_set("maxmemory", "1mb")
        assert ["done"] == worker.finish(*jobs)
        worker.close()
        server.client.config_set("maxmemory", "0")

        assert [(job_id, "done", "c" * 1000)] == told(Replies(server.client, "q", "inbox", block_s=0.01))


def test_a_context_needs_a_reply() -> None:
    """
    A context that nobody would get is a mistake.
    """
    with pytest.raises(InvalidJob, match="give reply_to too"):
        a_job(reply_context="c")


def test_a_context_has_a_limit() -> None:
    """
    It lives in the queue's memory: 256 KiB are the most.
    """
    assert a_job(reply_to="inbox", reply_context="é" * (MAX_CONTEXT_BYTES // 2)).reply_context
    with pytest.raises(InvalidJob, match="262,146 bytes"):
        a_job(reply_to="inbox", reply_context="é" * (MAX_CONTEXT_BYTES // 2 + 1))


@pytest.mark.parametrize("name", ["", "a:b", "x" * 129, "a b"])
def test_a_stream_of_replies_has_a_plain_name(name: str) -> None:
    """
    The name becomes part of a key.
    """
    with pytest.raises(InvalidJob, match="reply_to"):
        a_job(reply_to=name)


def test_an_earlier_version_cannot_ask() -> None:
    """
    The fields came with version 2.
    """
    with pytest.raises(InvalidJob, match="came with version 2"):
        Job.build(version=1, prompt="a", reply_to="inbox")
