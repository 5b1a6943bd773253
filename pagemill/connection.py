"""
Connections to the server, with time-outs that suit a queue, and a look at its settings.

redis-py's own defaults do not: a command whose reply was lost is sent again up to ten times,
which is right for our scripts that may be repeated and wrong for a PULL, whose first sending may
have claimed jobs. Such commands go through `send_once`.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from pagemill.errors import SettingsError, UnsafeServer
from pagemill.scripts import is_not_ready, translated

SOCKET_TIMEOUT_S = 10.0
MIN_VERSION = (6, 2)

_BACKOFF = ExponentialWithJitterBackoff(base=0.05, cap=1.0)

# RESP2: replies have the same shape on every server and in every redis-py
_OPTIONS: dict[str, Any] = {"protocol": 2, "socket_keepalive": True, "health_check_interval": 15}


def connect(url: str) -> Redis:
    """
    A client whose commands are repeated when the connection breaks; opens nothing yet.

    Raises:
        SettingsError: the URL is not one of a server.
    """
    try:
        return Redis.from_url(url, retry=Retry(_BACKOFF, 5), **_OPTIONS, **_timeouts(SOCKET_TIMEOUT_S))
    except ValueError as error:
        raise _bad_url(url, error) from None


def connect_async(url: str, *, timeout_s: float = SOCKET_TIMEOUT_S) -> AsyncRedis:
    """
    As `connect`.

    Args:
        timeout_s: How long a reply may take, or a connection; one that has died in silence holds
            a call up for that long.
    """
    try:
        return AsyncRedis.from_url(url, retry=AsyncRetry(_BACKOFF, 5), **_OPTIONS, **_timeouts(timeout_s))
    except ValueError as error:
        raise _bad_url(url, error) from None


def timeout_of_a_lease(lease_s: float) -> float:
    """
    How long a worker's calls may take.

    Leases are renewed every third of a lease: a connection that has died in silence must be given
    up, and the call made again, before the rest is over.
    """
    return min(SOCKET_TIMEOUT_S, max(lease_s / 4, min(1.0, lease_s / 2)))


def _timeouts(timeout_s: float) -> dict[str, Any]:
    return {"socket_timeout": timeout_s, "socket_connect_timeout": min(5.0, timeout_s)}


def connect_briefly(url: str, *, timeout_s: float = 2.0) -> Redis:
    """
    As `connect`, for a caller that repeats its commands itself and has other things to see to: they fail soon.
    """
    try:
        return Redis.from_url(url, retry=Retry(NoBackoff(), 0), **_OPTIONS, **_timeouts(timeout_s))
    except ValueError as error:
        raise _bad_url(url, error) from None


def _bad_url(url: str, error: ValueError) -> SettingsError:
    # a URL may hold a password: only its scheme is shown
    scheme = url.partition("://")[0] if "://" in url else ""
    hint = "want redis://host:port/0, rediss://... or unix:///path/to/socket"
    return SettingsError(f"the server's URL ({scheme or 'no scheme'}) cannot be used: {error}; {hint}")


async def send_once(redis: AsyncRedis, *command: Any, timeout_s: float | None = None) -> Any:
    """
    Send a command and read its reply, once, whatever happens.

    After a failure or a cancellation the connection is closed, so that no late reply is taken
    for another command's.

    Args:
        timeout_s: How long the reply may take; else what the client was made with.

    Raises:
        RedisError: as the server or the connection gives it.
    """
    pool = redis.connection_pool
    if timeout_s is None:
        timeout_s = float(pool.connection_kwargs["socket_timeout"])
    connection = await pool.get_connection()
    try:
        async with asyncio.timeout(timeout_s):
            await connection.send_command(*command)
            # its own time-out, which must not come first, would give None and keep the connection
            return await connection.read_response(timeout=timeout_s + 60)
    except ResponseError as error:
        # the server's own words: the connection is in step, if it leads to the right one
        if is_not_ready(error):
            await connection.disconnect(nowait=True)
        raise
    except TimeoutError:
        await connection.disconnect(nowait=True)
        raise RedisTimeoutError(f"no reply within {timeout_s:g} s") from None
    except BaseException:
        await connection.disconnect(nowait=True)
        raise
    finally:
        await pool.release(connection)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the server says of itself; None where it does not say."""

    version: str | None = None
    policy: str | None = None
    append_only: bool | None = None
    saves: bool | None = None
    refused: tuple[str, ...] = field(default=())


async def read_facts(redis: AsyncRedis) -> ServerFacts:
    """
    Ask the server for its version, eviction policy and persistence.

    Managed servers and access lists refuse some of it; that is noted, not raised.

    Raises:
        QueueUnavailable: the server cannot be reached.
    """
    with translated():
        await redis.execute_command("PING")
    refused: list[str] = []
    info: dict[str, str] = {}
    for section in ("server", "memory", "persistence"):
        text = await _ask(redis, refused, "INFO", section)
        info |= _info_lines(text)
    settings: dict[str, str] = {}
    for name in ("maxmemory-policy", "save"):
        pair = await _ask(redis, refused, "CONFIG", "GET", name)
        settings |= _config_pair(pair)
    return facts_of(info, settings, tuple(refused))


async def _ask(redis: AsyncRedis, refused: list[str], *command: str) -> Any:
    try:
        return await redis.execute_command(*command)
    except RedisError:
        refused.append(" ".join(command))
        return None


def _info_lines(reply: Any) -> dict[str, str]:
    # redis-py parses INFO for us, into whatever types it likes
    return {str(name): str(value) for name, value in reply.items()} if isinstance(reply, dict) else {}


def _config_pair(reply: Any) -> dict[str, str]:
    def text(value: Any) -> str:
        return value.decode() if isinstance(value, bytes) else str(value)

    return {text(name): text(value) for name, value in reply.items()} if isinstance(reply, dict) else {}


def facts_of(info: Mapping[str, str], settings: Mapping[str, str], refused: tuple[str, ...] = ()) -> ServerFacts:
    """Pick what matters out of INFO and CONFIG GET."""
    appends = info.get("aof_enabled")
    return ServerFacts(
        version=info.get("redis_version"),
        policy=settings.get("maxmemory-policy") or info.get("maxmemory_policy"),
        append_only=None if appends is None else appends == "1",
        saves=None if "save" not in settings else bool(settings["save"]),
        refused=refused,
    )


def judge(facts: ServerFacts, *, allow_unsafe: bool) -> list[str]:
    """
    What an operator should know of this server, a sentence each.

    Raises:
        UnsafeServer: its version is too old, or it may evict jobs; the latter is a warning
            where `allow_unsafe`.
    """
    version = _version(facts.version)
    if version is not None and version < MIN_VERSION:
        raise UnsafeServer(f"the server is Redis {facts.version}: Pagemill needs 6.2 or newer, or Valkey")
    warnings = []
    if facts.policy is None:
        warnings.append("the server does not say its eviction policy: make sure that it is noeviction")
    elif facts.policy != "noeviction":
        message = (
            f"the server's eviction policy is {facts.policy}: when its memory is full it deletes jobs and results. "
            "Set it with `CONFIG SET maxmemory-policy noeviction`"
        )
        if not allow_unsafe:
            raise UnsafeServer(f"{message}, or start with allow_unsafe_redis to take the risk")
        warnings.append(message)
    if facts.append_only is False:
        what = "keeps no append-only file"
        what += ", only snapshots" if facts.saves else " and no snapshots" if facts.saves is False else ""
        lost = "the last jobs before it stops" if facts.saves else "all jobs when it stops"
        warnings.append(f"the server {what}: it loses {lost}. Set `appendonly yes`")
    return warnings


def _version(text: str | None) -> tuple[int, ...] | None:
    parts = (text or "").split(".")[:2]
    return tuple(map(int, parts)) if len(parts) == 2 and all(part.isdigit() for part in parts) else None
