"""Users with few rights: the rules of docs/client.md suffice, and hold nothing too much."""

import asyncio
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from pagemill.async_client import AsyncClient
from pagemill.client import Client
from pagemill.connection import connect_async
from pagemill.errors import NotPermitted
from pagemill.keys import QueueKeys
from pagemill.overview import Overview, read_overview
from pagemill.schema import Job
from pagemill.scripts import load
from producers.gateway.api_keys import ApiKey
from producers.gateway.limits import Limiter
from producers.local_redis import local_redis
from tests.support.servers import a_job, is_routed, wait_for
from tests.support.services import RunningService
from tests.support.topologies import Cluster
from worker.fake_engine import FakeEngine

ROOT = Path(__file__).resolve().parents[2]
PRODUCERS_SCRIPTS = (
    *("submit", "cancel", "forget", "create_batch", "seal_batch", "cancel_batches", "requeue", "purge"),
    *("lease", "claim_replies", "ack_replies", "survey", "letters"),
)
PRODUCERS_FILES = (
    *("client", "client_base", "async_client", "dead_verbs", "batch_verbs", "async_batch_verbs", "shares"),
    *("calls", "subscriber", "dead_letters", "bulk_client", "gathering", "replies", "stream_hub", "submitter"),
    *("survey", "overview"),
)
WORKERS_FILES = ("consumer", "raw", "server_facts", "shown_tokenizer", "survey")

# words in the source that look as if they were commands
NO_COMMANDS = {"block", "nogroup"}

# what redis-py sends by itself, and how scripts are called
ALWAYS = {"ping", "eval", "evalsha"}


def rules(user: str, *, oldest: bool) -> list[str]:
    """The words of a user's ACL SETUSER in the documentation, without the name."""
    text = (ROOT / "docs" / "client.md").read_text()
    block = re.search(rf"^ACL SETUSER {user} (.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    words = shlex.split(block[1].replace("\\\n", " "), comments=False)
    return [word.removeprefix("%R") if oldest else word for word in words]


def granted(user: str) -> set[str]:
    return {word[1:] for word in rules(user, oldest=False) if word.startswith("+")}


def called_by(script: str) -> set[str]:
    calls = re.findall(r"redis\.p?call\(\s*'(\w+)'(?:, '(\w+)')?", load(script).source.decode())
    return {f"{name}|{sub}".lower() if name in ("XINFO", "XGROUP") and sub else name.lower() for name, sub in calls}


def sent_by(files: tuple[str, ...]) -> set[str]:
    """Names of commands in the source: capitals in quotes, first in their call or tuple."""
    sent = set[str]()
    for file in files:
        text = (ROOT / "pagemill" / f"{file}.py").read_text()
        sent |= {name.lower() for name in re.findall(r'(?:[(]|return |redis, |[)] )"([A-Z]{3,})",', text)}
    return sent - NO_COMMANDS


def scripts() -> set[str]:
    texts = [path.read_text() for path in (ROOT / "pagemill").glob("*.py")]
    return {name for text in texts for name in re.findall(r'load\("(\w+)"\)', text)}


def test_a_producer_is_granted_what_it_calls() -> None:
    """
    Each command that its scripts and verbs call, and no other.
    """
    called = set[str]().union(*map(called_by, PRODUCERS_SCRIPTS))

    assert called | sent_by(PRODUCERS_FILES) | ALWAYS == granted("producer")


def test_a_worker_is_granted_what_it_calls() -> None:
    """
    As a producer; the scripts of producers are not its own, but for those that cancel batches and look at a queue.
    """
    own = scripts().difference(PRODUCERS_SCRIPTS) | {"cancel_batches", "survey"}
    called = set[str]().union(*map(called_by, own))

    sent = {"config|get" if name == "config" else name for name in sent_by(WORKERS_FILES)}
    assert called | sent | ALWAYS | {"info", "config|get"} == granted("worker")


@pytest.fixture(params=["newest", "oldest"])
def users(request: pytest.FixtureRequest, newest_server: str, oldest_server: str) -> Iterator[dict[str, str]]:
    """URLs of the two users, by name."""
    oldest = request.param == "oldest"
    url = oldest_server if oldest else newest_server
    with Redis.from_url(url, protocol=2) as redis:
        urls = make_users(redis, url, oldest=oldest)
        yield urls
        for name in urls:
            redis.execute_command("ACL", "DELUSER", name)
        redis.flushdb()


def make_users(redis: Redis, url: str, *, oldest: bool = False, more: tuple[str, ...] = ()) -> dict[str, str]:
    for name in ("producer", "worker"):
        redis.execute_command("ACL", "SETUSER", name, *rules(name, oldest=oldest), *more)
    return {name: url.replace("://", f"://{name}:PASSWORD@") for name in ("producer", "worker")}


async def all_async(url: str, queue: str) -> None:
    """Each verb that asks the server in its own way."""
    async with AsyncClient(url, queue=queue) as client:
        job_id = (await client.submit(a_job("a", stream=True))).job_id
        assert "done" == (await client.result(job_id, wait_s=20)).status
        assert [job_id] == [one.job_id async for one in client.finished([job_id], wait_s=20)]
        assert [] != [delta async for delta in client.stream(job_id, wait_s=20)]
        batch = (await client.create_batch()).batch_id
        await client.seal_batch(batch)
        assert (await client.wait_batch(batch, 20)).ended


async def looked_at(url: str, queue: str) -> Overview:
    async with connect_async(url) as redis:
        return await read_overview(redis, QueueKeys(queue), max_batches=10, max_letters=10)


def test_the_rules_suffice(users: dict[str, str]) -> None:
    """
    A producer with all its verbs, and a worker through taking over, failing and burying, never hear no.
    """
    queue = "restricted"
    with (
        RunningService(users["worker"], queue, engine=FakeEngine(model_name="listed")) as service,
        Client(users["producer"], queue=queue) as client,
    ):
        wait_for(lambda: is_routed(users["worker"], "listed"))
        batch = client.create_batch().batch_id
        jobs = [a_job(f"{n}", batch=batch, stream=True, timeout_s=60, metadata={"n": str(n)}) for n in range(40)]
        ids = [one.job_id for one in client.submit_many(jobs)]
        client.submit(a_job("routed", model="listed", idempotency_key="once"), wait_s=5)
        # a job that no engine can serve is refused by the worker; one that is cancelled ends here
        refused = client.submit(Job.build(prompt="x" * 40_000)).job_id
        assert client.cancel(client.submit(a_job("cancelled", max_tokens=8000)).job_id)
        client.seal_batch(batch)
        assert {"done"} == {result.status for result in client.finished(ids, wait_s=30)}
        assert 40 == client.wait_batch(batch, 20).done
        assert "failed" == client.result(refused, wait_s=20).status
        assert client.cancel_batch(batch).ended
        assert client.list_batches()
        assert client.forget(ids[0])
        client.set_tenant("default", weight=2.0, max_queued_tokens=10**9)
        client.set_lane_limit("bulk", 10**9)
        assert client.tenants()
        assert client.lane_limits()
        assert client.stats().totals["done"] >= 40
        assert client.status(ids[1]).state == "done"
        assert [] == client.dead_letters()
        assert 0 == client.purge_dead(older_than_s=0)
        asyncio.run(all_async(users["producer"], queue))
        assert 40 == asyncio.run(looked_at(users["producer"], queue)).batches[-1].done
        wait_for(lambda: service.service.ready)
    assert service.error is None


def test_a_gateway_needs_no_more_than_a_producer(users: dict[str, str]) -> None:
    """
    The counters of its callers are among the keys that a producer may use, and so are their commands.
    """
    caller = ApiKey(sha256="0" * 64, requests_per_minute=2, tokens_per_day=100)

    async def let_in() -> None:
        async with AsyncClient(users["producer"]) as client:
            limiter = Limiter(client)
            await limiter.settle(await limiter.take(caller, 5), 3)

    asyncio.run(let_in())


def test_what_is_missing_is_named(newest_server: str) -> None:
    """
    A command, a key or a channel that is not granted is NotPermitted, with what to grant.
    """
    with Redis.from_url(newest_server, protocol=2) as redis:
        urls = make_users(redis, newest_server)
        with Client(urls["producer"], queue="narrow") as client:
            job_id = client.submit(a_job()).job_id
            redis.execute_command("ACL", "SETUSER", "producer", "-zcard")
            with pytest.raises(NotPermitted, match=r"\+zcard"):
                client.stats()
            redis.execute_command("ACL", "SETUSER", "producer", "+zcard", "-zadd")
            with pytest.raises(NotPermitted, match=r"docs/client\.md"):
                client.create_batch()
            redis.execute_command("ACL", "SETUSER", "producer", "+zadd", "resetchannels")
            with pytest.raises(NotPermitted, match=r"&\{pagemill:"):
                client.result(job_id, wait_s=5)
            with pytest.raises(NotPermitted, match=r"&\{pagemill:"):
                asyncio.run(_result(urls["producer"], job_id))
            redis.execute_command("ACL", "SETUSER", "producer", "resetkeys", "~{pagemill:other}*")
            with pytest.raises(NotPermitted, match=r"~\{pagemill:"):
                client.stats()
        for name in urls:
            redis.execute_command("ACL", "DELUSER", name)
        redis.flushdb()


async def _result(url: str, job_id: str) -> None:
    async with AsyncClient(url, queue="narrow") as client:
        await client.result(job_id, wait_s=5)


def test_another_database_takes_one_more() -> None:
    """
    SELECT is for those that use one.
    """
    with local_redis() as url, Redis.from_url(url, protocol=2) as redis:
        urls = make_users(redis, url.removesuffix("/0") + "/3", more=("+select",))
        with RunningService(urls["worker"], "q"), Client(urls["producer"], queue="q") as client:
            assert client.text(client.submit(a_job()).job_id, wait_s=20)


def test_a_cluster_takes_one_more(tmp_path: Path) -> None:
    """
    The nodes are asked for the slots.
    """
    with Cluster(tmp_path) as cluster:
        for node in cluster.nodes:
            urls = make_users(node.client, cluster.url, more=("+cluster|slots",))
        with RunningService(urls["worker"], "q"), Client(urls["producer"], queue="q") as client:
            assert client.text(client.submit(a_job()).job_id, wait_s=20)
