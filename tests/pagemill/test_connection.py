"""The server's settings, and what they mean for jobs."""

import pytest
from redis import Redis

from pagemill.connection import connect
from pagemill.errors import QueueUnavailable, SettingsError, UnsafeServer
from pagemill.server_facts import ServerFacts, facts_of, judge
from producers.local_redis import local_redis
from tests.support.servers import BlockingConsumer

SAFE = ServerFacts(version="7.2.4", policy="noeviction", append_only=True, saves=False)


def check(url: str, *, allow_unsafe: bool = False) -> list[str]:
    worker = BlockingConsumer(url, "checked")
    try:
        warnings: list[str] = worker.run(worker.consumer.check_server(allow_unsafe=allow_unsafe))
        return warnings
    finally:
        worker.close()


def test_a_safe_server_gives_no_warning() -> None:
    """
    With no eviction and an append-only file there is nothing to say.
    """
    with local_redis(append_only=True) as url:
        assert [] == check(url)


def test_an_evicting_server_is_refused() -> None:
    """
    A policy that deletes jobs stops the start, unless the operator takes the risk.
    """
    with local_redis() as url, Redis.from_url(url) as redis:
        redis.config_set("maxmemory-policy", "allkeys-lru")

        with pytest.raises(UnsafeServer, match=r"allkeys-lru.*CONFIG SET maxmemory-policy noeviction"):
            check(url)
        assert any("allkeys-lru" in warning for warning in check(url, allow_unsafe=True))


def test_a_server_without_persistence_is_warned_of() -> None:
    """
    What a stop of the server would lose is said.
    """
    assert any("all jobs" in text for text in judge(ServerFacts("7.0", "noeviction", False, False), allow_unsafe=False))
    assert any("last jobs" in text for text in judge(ServerFacts("7.0", "noeviction", False, True), allow_unsafe=False))


def test_a_silent_server_is_warned_of() -> None:
    """
    A managed server that hides its settings is taken, with a warning.
    """
    assert any("does not say" in warning for warning in judge(facts_of({}, {}, ("CONFIG GET",)), allow_unsafe=False))
    assert [] == judge(SAFE, allow_unsafe=False)


def test_a_refused_config_is_no_error() -> None:
    """
    An access list that forbids CONFIG leaves what INFO says.
    """
    with local_redis() as url, Redis.from_url(url) as redis:
        redis.execute_command("ACL", "SETUSER", "app", "on", ">secret", "~*", "&*", "+@all", "-config")
        warnings = check(url.replace("redis://", "redis://app:secret@"))

        assert any("append-only" in warning for warning in warnings)


def test_an_old_server_is_refused() -> None:
    """
    A server before 6.2 is named with what is needed.
    """
    with pytest.raises(UnsafeServer, match=r"6\.0\.16.*6\.2"):
        judge(ServerFacts("6.0.16", "noeviction", True, True), allow_unsafe=True)


def test_an_unreachable_server() -> None:
    """
    A wrong password or port is QueueUnavailable.
    """
    with local_redis() as url, pytest.raises(QueueUnavailable, match=r"login|refuses"):
        check(url.replace("redis://", "redis://nobody:wrong@"))


def test_a_url_that_is_none() -> None:
    """
    The message shows no password.
    """
    with pytest.raises(SettingsError, match="want redis://") as caught:
        connect("http://user:hunter2@host")

    assert "hunter2" not in str(caught.value)
