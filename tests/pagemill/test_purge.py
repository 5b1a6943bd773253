"""PURGE of much, and of what is so old by the server's clock."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from redis import Redis

from pagemill.async_client import AsyncClient
from pagemill.calls import JOBS_A_CALL
from pagemill.client import Client
from pagemill.errors import JobNotFound
from pagemill.keys import QueueKeys
from producers.local_redis import local_redis

Run = Callable[..., tuple[int, str, str]]

MIB = 1 << 20
HOUR_MS = 3_600_000


@pytest.fixture(autouse=True)
def _settings(server_url: str, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_REDIS_URL", server_url)
    monkeypatch.setenv("PAGEMILL_QUEUE", queue)


def add_letters(redis: Redis, queue: str, *ages_ms: int, payload: bytes = b"{}") -> list[str]:
    """Entry ids of letters that were given up so long ago; the oldest first."""
    seconds, microseconds = redis.time()  # type: ignore[misc]
    now_ms = 1000 * seconds + microseconds // 1000
    dead = QueueKeys(queue).dead
    ids: list[Any] = [redis.xadd(dead, {"j": f"{age}", "d": payload}, id=f"{now_ms - age}-1") for age in ages_ms]
    return [entry_id.decode() for entry_id in ids]


def test_large_letters_are_not_read_all_at_once(queue: str) -> None:
    """
    A script that purges many has the memory of a few: payloads may have megabytes.
    """
    with local_redis() as url, Client(url, queue=queue) as client, Redis.from_url(url, protocol=2) as redis:
        for _ in range(JOBS_A_CALL):
            redis.xadd(QueueKeys(queue).dead, {"j": "1", "d": b"x" * MIB})
        before = redis.info("memory")["used_memory_peak"]

        assert JOBS_A_CALL == client.purge_dead(older_than_s=0)

        assert redis.info("memory")["used_memory_peak"] - before < JOBS_A_CALL * MIB / 2


def test_age_is_by_the_servers_clock(
    run: Run, client: Client, redis: Redis, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A caller whose clock is a day ahead purges no more than one whose clock is right.
    """
    add_letters(redis, queue, 3 * HOUR_MS, HOUR_MS)
    ahead = time.time() + 86_400
    monkeypatch.setattr(time, "time", lambda: ahead)

    purged = [run("dead", "purge", "--older-than-h", hours)[1] for hours in ("4", "2")]

    assert (["0 purged\n", "1 purged\n"], 1) == (purged, client.stats().dead)


def test_all_are_purged_unread(run: Run, client: Client, redis: Redis, queue: str) -> None:
    """
    `purge --all` takes what is there without fetching any of it.
    """
    add_letters(redis, queue, HOUR_MS, 1, 0, payload=b"x" * MIB)
    before = redis.info("stats")["total_net_output_bytes"]

    assert (0, "3 purged\n", "") == run("dead", "purge", "--all")

    assert redis.info("stats")["total_net_output_bytes"] - before < MIB
    assert 0 == client.stats().dead


def test_what_can_be_no_letter_purges_nothing(client: Client, redis: Redis, queue: str) -> None:
    """
    An id that no letter can have is an error before any is purged; one that is gone is none.
    """
    [letter] = add_letters(redis, queue, 0)

    with pytest.raises(JobNotFound, match="no dead letter"):
        client.purge_dead([letter, "+"])
    assert [1, 0] == [client.purge_dead([letter]) for _ in range(2)]


def test_an_event_loop_purges_by_age(client: Client, redis: Redis, queue: str, server_url: str) -> None:
    """
    The asynchronous client counts by the same clock.
    """
    add_letters(redis, queue, 3 * HOUR_MS, 1)

    async def purge(older_than_s: float) -> int:
        async with AsyncClient(server_url, queue=queue) as there:
            return await there.purge_dead(older_than_s=older_than_s)

    assert [0, 1, 1] == [asyncio.run(purge(age_s)) for age_s in (4 * 3600, 2 * 3600, 0)]
    assert 0 == client.stats().dead
