"""The throughput of the last hour: a ring of minutes that FINISH writes."""

import time

import pytest
from redis import Redis

from pagemill.cli_status import look
from pagemill.client import Client
from pagemill.keys import QueueKeys
from pagemill.survey import NUM_MINUTES, Minute, read_minutes
from tests.support.servers import MakeConsumer, a_job, wait_for

# what 21:00 on some day is in minutes, and in milliseconds
MINUTE = 29_933_160
NOW_MS = MINUTE * 60_000


@pytest.fixture(params=["newest", "oldest"])
def server_url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{request.param}_server"))


def in_one_minute() -> None:
    """Waits until the minute has some seconds left."""
    wait_for(lambda: time.time() % 60 < 55, 10)


def of_last_minutes(url: str, queue: str) -> tuple[int, int, int]:
    """Jobs, prompt tokens and generated tokens of this minute and the one before."""
    minutes = look(url, queue).minutes[-2:]
    return tuple(sum(getattr(one, name) for one in minutes) for name in ("jobs", "prompt_tokens", "completion_tokens"))  # type: ignore[return-value]


def test_what_ends_is_counted_in_its_minute(
    server_url: str, queue: str, client: Client, consumer: MakeConsumer
) -> None:
    """
    Jobs of one call and of several add up, whatever they ended as; each of them has 3 and 2 tokens here.
    """
    client.submit_many([a_job(f"{number}") for number in range(5)])
    worker = consumer()
    first, second, *others = worker.pull()
    worker.finish(*others)
    worker.finish(first, status="failed")
    worker.finish(second)

    assert (5, 15, 10) == of_last_minutes(server_url, queue)


def test_an_end_that_does_not_count_is_not_counted(
    server_url: str, queue: str, client: Client, consumer: MakeConsumer
) -> None:
    """
    Neither a finish that came twice, nor one of a job that is another worker's, nor a job that nobody ran.
    """
    client.submit_many([a_job("a"), a_job("b")])
    worker, other = consumer(), consumer()
    held = worker.pull()
    worker.finish(held[0])
    assert ["duplicate"] == worker.finish(held[0])
    assert ["fenced"] == other.finish(held[1])
    client.cancel(client.submit(a_job("c")).job_id)

    assert (1, 3, 2) == of_last_minutes(server_url, queue)


def test_a_field_of_an_earlier_hour_is_begun_anew(
    server_url: str, queue: str, redis: Redis, client: Client, consumer: MakeConsumer
) -> None:
    """
    The ring comes round after 64 minutes: what stood there then is not added to.
    """
    in_one_minute()
    keys, minute = QueueKeys(queue), int(time.time()) // 60
    for one in (minute, minute + 1):
        redis.hset(keys.minutes, str(one % 64), f"{one - 64} 900 900 900")
    client.submit(a_job())
    worker = consumer()
    worker.finish(*worker.pull())

    assert (1, 3, 2) == of_last_minutes(server_url, queue)


def test_the_ring_is_forgotten_when_nothing_ends(
    queue: str, redis: Redis, client: Client, consumer: MakeConsumer
) -> None:
    """
    It expires two hours after the minute that was begun last.
    """
    client.submit(a_job())
    worker = consumer()
    worker.finish(*worker.pull())

    assert 7100 < redis.ttl(QueueKeys(queue).minutes) <= 7200


def test_the_last_hour_is_whole() -> None:
    """
    Sixty minutes and the running one, oldest first, also those in which nothing ended.
    """
    found = read_minutes([f"{MINUTE - 1} 6 30 12".encode(), f"{MINUTE} 2 8 4".encode()], NOW_MS + 15_000)

    assert NUM_MINUTES + 1 == len(found)
    assert [(MINUTE - NUM_MINUTES + place) * 60_000 for place in range(NUM_MINUTES + 1)] == [one.at_ms for one in found]
    assert (Minute(NOW_MS - 60_000, 60.0, 6, 30, 12), Minute(NOW_MS, 15.0, 2, 8, 4)) == found[-2:]
    assert {(0, 0, 0)} == {(one.jobs, one.prompt_tokens, one.completion_tokens) for one in found[:-2]}


def test_what_is_older_or_ahead_does_not_count() -> None:
    """
    A field that nobody has written anew for an hour, and one from before the clock was set back.
    """
    fields = [f"{MINUTE - NUM_MINUTES - 1} 9 9 9".encode(), f"{MINUTE + 1} 9 9 9".encode()]

    assert 0 == sum(one.jobs for one in read_minutes(fields, NOW_MS))
