"""
Connections to the server, or to that of a key in a cluster, with time-outs that suit a queue.

redis-py's own defaults do not: a command whose reply was lost is sent again up to ten times,
which is right for our scripts that may be repeated and wrong for a PULL, whose first sending may
have claimed jobs. Such commands go through `send_once`.
"""

import asyncio
from typing import Any

from redis import Connection, ConnectionPool, Redis, SSLConnection, UnixDomainSocketConnection
from redis.asyncio import ConnectionPool as AsyncConnectionPool
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio.connection import Connection as AsyncConnection
from redis.asyncio.connection import SSLConnection as AsyncSSLConnection
from redis.asyncio.connection import UnixDomainSocketConnection as AsyncUnixDomainSocketConnection
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from pagemill.errors import SettingsError
from pagemill.moving_server import (
    ASK_S,
    AsyncMovingConnection,
    AsyncMovingSSLConnection,
    MovingConnection,
    MovingSSLConnection,
    Place,
    master_place,
    slot_of,
    slot_place,
)
from pagemill.retries import AsyncRetry, Retry
from pagemill.scripts import is_not_ready
from pagemill.server_url import parse_server_url

SOCKET_TIMEOUT_S = 10.0
RETRIES = 5

_BACKOFF = ExponentialWithJitterBackoff(base=0.05, cap=1.0)

# RESP2: replies have the same shape on every server and in every redis-py. Each stream that is read has a
# connection, and redis-py's own limit is 100
_OPTIONS: dict[str, Any] = {
    "protocol": 2,
    "socket_keepalive": True,
    "health_check_interval": 15,
    "max_connections": 10_000,
}


def connect(url: str, *, key: str = "", timeout_s: float = SOCKET_TIMEOUT_S) -> Redis:
    """
    A client whose commands are repeated when the connection breaks; opens nothing yet.

    Args:
        key: What is asked for is in this key's slot, where the URL is a cluster's.
        timeout_s: How long a reply may take, or a connection; one that has died in silence holds
            a call up for that long.

    Raises:
        SettingsError: the URL is not one of a server.
    """
    return Servers(url, timeout_s=timeout_s).at(key)


def connect_async(url: str, *, key: str = "", timeout_s: float = SOCKET_TIMEOUT_S) -> AsyncRedis:
    """As `connect`."""
    return AsyncServers(url, timeout_s=timeout_s).at(key)


def connect_briefly(url: str, *, key: str = "", timeout_s: float = 2.0) -> Redis:
    """
    As `connect`, for a caller that repeats its commands itself and has other things to see to: they fail soon.
    """
    return Servers(url, timeout_s=timeout_s, retries=0).at(key)


def timeout_of_a_lease(lease_s: float) -> float:
    """
    How long a worker's calls may take.

    Leases are renewed every third of a lease: a connection that has died in silence must be given
    up, and the call made again, before the rest is over.
    """
    return min(SOCKET_TIMEOUT_S, max(lease_s / 4, min(1.0, lease_s / 2)))


class _AnyServers:
    """What a URL leads to: the same server for all keys, or that of their slot."""

    def __init__(self, url: str, *, timeout_s: float = SOCKET_TIMEOUT_S, retries: int = RETRIES) -> None:
        self._url = parse_server_url(url)
        self._retries = retries
        times = {"socket_timeout": timeout_s, "socket_connect_timeout": min(5.0, timeout_s)}
        self._options = _OPTIONS | times | self._url.options
        # a cluster's slots share them, and learn of the others from each
        self._guides = list(self._url.hosts)

    @property
    def is_cluster(self) -> bool:
        return self._url.kind == "cluster"

    def _slot(self, key: str) -> int:
        """
        Raises:
            SettingsError: there is no key, and the servers are a cluster's.
        """
        if not self.is_cluster:
            return 0
        if not key:
            raise SettingsError(
                "the server's URL is a cluster's, and it takes a key to tell which of its nodes is meant"
            )
        return slot_of(key)

    def _place(self, slot: int) -> Place | None:
        if self._url.kind == "single":
            return None
        asks_s = min(ASK_S, self._options["socket_timeout"])
        times = {"protocol": 2, "socket_timeout": asks_s, "socket_connect_timeout": asks_s}
        if self._url.kind == "sentinel":
            return master_place(self._url, times | self._url.guide_options)
        login = {name: value for name, value in self._url.options.items() if name not in ("db", "client_name")}
        return slot_place(self._guides, slot, times | login | self._url.guide_options)

    def _where(self, slot: int) -> dict[str, Any]:
        """What a pool of connections is made with, besides their kind."""
        place = self._place(slot)
        if place is not None:
            return {"place": place}
        if self._url.path:
            return {"path": self._url.path}
        host, port = self._url.hosts[0]
        return {"host": host, "port": port}


class Servers(_AnyServers):
    """Clients for threads, one for each slot that is asked for; opens nothing by itself."""

    def __init__(self, url: str, *, timeout_s: float = SOCKET_TIMEOUT_S, retries: int = RETRIES) -> None:
        super().__init__(url, timeout_s=timeout_s, retries=retries)
        self._clients: dict[int, Redis] = {}

    def at(self, key: str) -> Redis:
        """The server that has this key."""
        slot = self._slot(key)
        client = self._clients.get(slot)
        # two threads may both make one: the first that is kept counts
        return client if client is not None else self._clients.setdefault(slot, self._make(slot))

    def close(self) -> None:
        """Close all connections; a later call opens new ones."""
        for client in tuple(self._clients.values()):
            client.close()

    def _make(self, slot: int) -> Redis:
        where, tls = self._where(slot), self._url.tls
        kind: type[Any] = SSLConnection if tls else Connection
        if "path" in where:
            kind = UnixDomainSocketConnection
        elif "place" in where:
            kind = MovingSSLConnection if tls else MovingConnection
        retry = Retry(_BACKOFF if self._retries else NoBackoff(), self._retries)
        return Redis.from_pool(ConnectionPool(connection_class=kind, retry=retry, **where, **self._options))


class AsyncServers(_AnyServers):
    """As Servers, for one event loop."""

    def __init__(self, url: str, *, timeout_s: float = SOCKET_TIMEOUT_S, retries: int = RETRIES) -> None:
        super().__init__(url, timeout_s=timeout_s, retries=retries)
        self._clients: dict[int, AsyncRedis] = {}

    def at(self, key: str) -> AsyncRedis:
        """The server that has this key."""
        slot = self._slot(key)
        if slot not in self._clients:
            self._clients[slot] = self._make(slot)
        return self._clients[slot]

    async def close(self) -> None:
        """Close all connections; a later call opens new ones."""
        for client in tuple(self._clients.values()):
            await client.aclose()

    def _make(self, slot: int) -> AsyncRedis:
        where, tls = self._where(slot), self._url.tls
        kind: type[Any] = AsyncSSLConnection if tls else AsyncConnection
        if "path" in where:
            kind = AsyncUnixDomainSocketConnection
        elif "place" in where:
            kind = AsyncMovingSSLConnection if tls else AsyncMovingConnection
        retry = AsyncRetry(_BACKOFF if self._retries else NoBackoff(), self._retries)
        return AsyncRedis.from_pool(AsyncConnectionPool(connection_class=kind, retry=retry, **where, **self._options))


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
