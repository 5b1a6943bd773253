"""A master behind three sentinels, and one that takes its place."""

import asyncio
from collections.abc import Iterator

import pytest

from pagemill.async_client import AsyncClient
from pagemill.client import Client
from pagemill.errors import QueueUnavailable
from pagemill.ids import uuid7
from pagemill.keys import QueueKeys
from tests.support.outages import Traffic, Waiters
from tests.support.servers import a_job, leaked_keys, wait_for
from tests.support.services import RunningService
from tests.support.topologies import SentinelTrio
from worker.fake_engine import FakeEngine


@pytest.fixture(scope="module")
def sentinels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SentinelTrio]:
    with SentinelTrio(tmp_path_factory.mktemp("sentinels")) as trio:
        yield trio


def test_clients_and_workers_ask_the_sentinels(sentinels: SentinelTrio) -> None:
    """
    The URL names sentinels and the master's name: all find it, and the queue is there.
    """
    queue = f"test-{uuid7()}"

    async def ask() -> str:
        async with AsyncClient(sentinels.url, queue=queue) as client:
            return await client.text((await client.submit(a_job("asyncio"))).job_id, wait_s=20)

    with RunningService(sentinels.url, queue), Client(sentinels.url, queue=queue) as client:
        assert asyncio.run(ask())
        job_id = client.submit(a_job("threads")).job_id
        assert "done" == client.result(job_id, wait_s=20).status

    assert sentinels.master.client.exists(QueueKeys(queue).result(job_id))
    assert [] == leaked_keys(sentinels.master.client, queue)


def test_a_name_that_no_sentinel_knows(sentinels: SentinelTrio) -> None:
    """
    The message has the name and who was asked.
    """
    with (
        Client(sentinels.url.replace("/mymaster/", "/yours/")) as client,
        pytest.raises(QueueUnavailable, match=rf"{sentinels.sentinels[0].address}.*'yours'"),
    ):
        client.stats()


def test_a_server_that_is_no_sentinel(sentinels: SentinelTrio) -> None:
    """
    A URL that leads to the servers themselves is refused, and not tried for ever.
    """
    url = f"redis+sentinel://{sentinels.nodes[0].address}/mymaster/0"
    with Client(url) as client, pytest.raises(QueueUnavailable, match=r"cannot say where.*unknown command"):
        client.stats()


def test_sentinels_with_a_login_of_their_own(sentinels: SentinelTrio) -> None:
    """
    Their user may do one thing; the login before the hosts is not for them.
    """
    guard = ("guard", "on", ">word", "-@all", "+sentinel|get-master-addr-by-name")
    for sentinel in sentinels.sentinels:
        sentinel.client.execute_command("ACL", "SETUSER", *guard)
    sentinels.master.client.execute_command(
        "ACL", "SETUSER", "app", "on", ">p@ss", "~*", "resetchannels", "&*", "+@all"
    )
    login = sentinels.url.replace("://", "://app:p%40ss@")
    try:
        with Client(f"{login}?sentinel_username=guard&sentinel_password=word") as client:
            assert {} == client.stats().totals
        with (
            Client(f"{login}?sentinel_username=guard&sentinel_password=wrong") as client,
            pytest.raises(QueueUnavailable),
        ):
            client.stats()
    finally:
        sentinels.master.client.execute_command("ACL", "DELUSER", "app")


def test_the_master_dies(sentinels: SentinelTrio) -> None:
    """
    A replica takes its place: submits with patience go through, all who wait hear the end, the worker
    goes on with what it has. What was accepted and had not reached a replica comes by the same submit
    again, which makes no second job of the others.
    """
    queue = f"test-{uuid7()}"
    master = sentinels.master
    with (
        RunningService(sentinels.url, queue, engine=FakeEngine(tokens_per_s=4000)) as service,
        Client(sentinels.url, queue=queue) as client,
        Traffic(sentinels.url, queue) as traffic,
    ):
        batch = client.create_batch().batch_id
        awaited = client.submit(a_job("awaited", max_tokens=6000, stream=True, batch=batch)).job_id
        client.seal_batch(batch)
        with Waiters(sentinels.url, queue, awaited, batch) as waiters:
            waiters.wait_until_they_wait(master.client)
            wait_for(lambda: master.client.execute_command("WAIT", 2, 1000) == 2)

            master.kill()

            traffic.goes_on()
        again = client.submit_many(traffic.jobs, wait_s=20)
        results = list(client.finished([one.job_id for one in again], wait_s=60))
        text = client.text(awaited)
    assert service.error is None
    # the one that is asked here may hear of it last
    wait_for(lambda: sentinels.master is not master)
    assert {"done"} == {result.status for result in results}
    assert len(again) == len({result.job_id for result in results})
    assert {text, 1} == set(waiters.heard.values())
    assert 8 == len(waiters.heard)
