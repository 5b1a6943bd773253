"""
A server that moves: the master behind Sentinel, or the owner of a slot of a cluster.

Each connection looks for it when it is made: sentinels or nodes of the cluster say where it is. A
server that says it is not (any more) the one ends the connection, and the command is sent again
on a new one, as after any other loss. So all that is built on a connection works: pipelines,
subscriptions, and commands that must be sent once only.

While a slot is moved key by key, both its nodes refuse what they have not, and nobody is sent on
to the other: a script that ran there would find half of the queue. Moved as a whole, it is away
for a moment.
"""

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from redis import Connection, SSLConnection
from redis.asyncio.connection import Connection as AsyncConnection
from redis.asyncio.connection import SSLConnection as AsyncSSLConnection
from redis.crc import key_slot
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MovedError, ReadOnlyError, RedisError, ResponseError

from pagemill.server_url import Address, ServerUrl

# so long what was found counts for other connections too; they come in hundreds
FRESH_S = 1.0

# what one guide may take: the next one is asked then
ASK_S = 2.0

# nodes of a cluster that are remembered
MAX_GUIDES = 64

_MOVED = re.compile(r"MOVED \d+ (.*):(\d+)")


class Place:
    """
    Where the server is, as far as is known.

    Args:
        guides: Who to ask, the last one that knew first; a cluster's places share the list.
        question: The command for them.
        read: The server's address in the answer, and further guides; None where they do not know.
        options: What connections to them are made with.
        what: The server, in words.
    """

    def __init__(
        self,
        guides: list[Address],
        question: Sequence[str],
        read: Callable[[Any], tuple[Address | None, list[Address]]],
        options: Mapping[str, Any],
        what: str,
    ) -> None:
        self._guides = guides
        self._question = question
        self._read = read
        self._options = dict(options)
        self._what = what
        self._found: tuple[float, Address] | None = None
        # so that many who look at once ask once
        self._asking: asyncio.Lock | None = None

    def find(self) -> Address:
        """
        Raises:
            RedisError: nobody who was asked knows.
        """
        fresh = self._fresh()
        if fresh is not None:
            return fresh
        faults: list[RedisError | OSError] = []
        for guide in tuple(self._guides):
            try:
                address = self._learn(guide, self._ask(guide))
            except (RedisError, OSError) as error:
                faults.append(error)
                continue
            if address is not None:
                return address
        raise self._nowhere(faults)

    async def find_async(self) -> Address:
        """As `find`."""
        if self._asking is None:
            self._asking = asyncio.Lock()
        async with self._asking:
            fresh = self._fresh()
            if fresh is not None:
                return fresh
            faults: list[RedisError | OSError] = []
            for guide in tuple(self._guides):
                try:
                    address = self._learn(guide, await self._ask_async(guide))
                except (RedisError, OSError) as error:
                    faults.append(error)
                    continue
                if address is not None:
                    return address
            raise self._nowhere(faults)

    def forget(self) -> None:
        """It is not there, or nobody answers."""
        self._found = None

    def has_moved(self, error: ResponseError) -> bool:
        """Whether a server says by this that it is not the one; it may say which one is."""
        # redis-py, of late, cuts the first word off
        said = _MOVED.match(f"MOVED {error}" if isinstance(error, MovedError) else str(error))
        if said is None and not isinstance(error, ReadOnlyError):
            return False
        self._found = (time.monotonic(), (said[1], int(said[2]))) if said and said[1] else None
        return True

    def _fresh(self) -> Address | None:
        found = self._found
        return found[1] if found and time.monotonic() - found[0] < FRESH_S else None

    def _learn(self, guide: Address, answer: Any) -> Address | None:
        address, others = self._read(answer)
        # nodes that do not know their own name mean: where you asked
        others = [(host or guide[0], port) for host, port in others]
        known = [guide, *(one for one in self._guides if one != guide)]
        known += [one for one in dict.fromkeys(others) if one not in known]
        self._guides[:] = known[:MAX_GUIDES]
        if address is None:
            return None
        address = (address[0] or guide[0], address[1])
        self._found = (time.monotonic(), address)
        return address

    def _nowhere(self, faults: Sequence[RedisError | OSError]) -> RedisError:
        names = ", ".join(f"{host}:{port}" for host, port in self._guides)
        refused = [error for error in faults if isinstance(error, ResponseError)]
        if len(refused) == len(self._guides):
            # not one of them is what the URL takes them for
            return ResponseError(f"{names} cannot say where {self._what} is: {refused[-1]}")
        why = str(faults[-1]) if faults else "they do not know it"
        return RedisConnectionError(f"nobody at {names} says where {self._what} is: {why}")

    def _ask(self, guide: Address) -> Any:
        kind = SSLConnection if self._options.get("ssl") else Connection
        connection: Any = kind(host=guide[0], port=guide[1], **self._plain())
        try:
            connection.connect()
            connection.send_command(*self._question)
            return connection.read_response()
        finally:
            connection.disconnect()

    async def _ask_async(self, guide: Address) -> Any:
        kind = AsyncSSLConnection if self._options.get("ssl") else AsyncConnection
        connection: Any = kind(host=guide[0], port=guide[1], **self._plain())
        try:
            await connection.connect()
            await connection.send_command(*self._question)
            return await connection.read_response()
        finally:
            await connection.disconnect(nowait=True)

    def _plain(self) -> dict[str, Any]:
        return {name: value for name, value in self._options.items() if name != "ssl"}


def master_place(url: ServerUrl, options: Mapping[str, Any]) -> Place:
    """The master that sentinels call `url.service`."""

    def read(answer: Any) -> tuple[Address | None, list[Address]]:
        return (_address(answer[0], answer[1]) if answer else None), []

    question = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", url.service)
    return Place(list(url.hosts), question, read, options, f"the master {url.service!r}")


def slot_place(guides: list[Address], slot: int, options: Mapping[str, Any]) -> Place:
    """The master of a cluster's slot."""

    def read(answer: Any) -> tuple[Address | None, list[Address]]:
        others = [_address(*node[:2]) for _, _, *nodes in answer for node in nodes]
        owners = [_address(*nodes[0][:2]) for first, last, *nodes in answer if first <= slot <= last]
        return (owners[0] if owners else None), others

    return Place(guides, ("CLUSTER", "SLOTS"), read, options, f"slot {slot}")


def slot_of(key: str) -> int:
    """The slot of a key; of its hash tag, where it has one."""
    return int(key_slot(key.encode()))


def _address(host: bytes | None, port: bytes | int) -> Address:
    return (host or b"").decode(), int(port)


class MovingConnection(Connection):
    """A connection to wherever the server is when it is made."""

    def __init__(self, *, place: Place, **options: Any) -> None:
        super().__init__(**options)  # type: ignore[no-untyped-call]
        self._place = place

    def _connect(self) -> Any:
        self.host, self.port = self._place.find()
        try:
            return super()._connect()  # type: ignore[no-untyped-call]
        except BaseException:
            self._place.forget()
            raise

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return super().read_response(*args, **options)
        except ResponseError as error:
            if not self._place.has_moved(error):
                raise
            self.disconnect()  # type: ignore[no-untyped-call]
            raise RedisConnectionError(f"the server has moved: {error}") from error


class MovingSSLConnection(MovingConnection, SSLConnection):
    """As MovingConnection, with TLS."""


class AsyncMovingConnection(AsyncConnection):
    """As MovingConnection, for one event loop."""

    def __init__(self, *, place: Place, **options: Any) -> None:
        super().__init__(**options)
        self._place = place

    async def _connect(self) -> None:
        self.host, self.port = await self._place.find_async()
        try:
            await super()._connect()  # type: ignore[no-untyped-call]
        except BaseException:
            self._place.forget()
            raise

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)
        except ResponseError as error:
            if not self._place.has_moved(error):
                raise
            await self.disconnect(nowait=True)
            raise RedisConnectionError(f"the server has moved: {error}") from error


class AsyncMovingSSLConnection(AsyncMovingConnection, AsyncSSLConnection):
    """As AsyncMovingConnection, with TLS."""
