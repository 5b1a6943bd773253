"""
Hears of many ends on one connection: what all the waits of an asyncio client share.

A wait looks again when its channel speaks, and when the connection was lost and is there again, for
messages that came in between are gone. Publishing reaches all nodes of a cluster: one connection,
wherever it leads, is enough for all queues.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from pagemill.calls import in_chunks
from pagemill.connection import AsyncServers
from pagemill.scripts import is_not_ready, translated

# channels that one command names
CHANNELS_A_COMMAND = 256

# so long nothing is heard, and the server is asked whether it is there; then it has that long again
SILENCE_S = 10.0

# between two tries to connect
MIN_PAUSE_S = 0.05
MAX_PAUSE_S = 2.0


class Ear:
    """What one wait has heard; names of channels, each once until they are taken."""

    def __init__(self) -> None:
        # something may have been missed: what is awaited is to be looked at, all of it
        self.missed = True
        self._heard: dict[str, None] = {}
        self._rang = asyncio.Event()

    def ring(self, channel: str | None = None) -> None:
        if channel is None:
            self.missed = True
        else:
            self._heard[channel] = None
        self._rang.set()

    async def wait(self, timeout_s: float) -> None:
        """Return when there is cause to look, and after `timeout_s` at the latest."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._rang.wait()
        self._rang.clear()

    def take(self) -> list[str]:
        """What was heard since the last time, in that order."""
        heard = list(self._heard)
        self._heard.clear()
        self.missed = False
        return heard


class Subscriber:
    """
    One connection that listens, while anybody waits.

    Args:
        key: Leads to the server that it listens at.
    """

    def __init__(self, servers: AsyncServers, key: str) -> None:
        self._servers = servers
        self._key = key
        self._task: asyncio.Task[None] | None = None
        self._sending = asyncio.Lock()

        # who waits for what, and what of it the server has confirmed
        self._ears: dict[str, set[Ear]] = {}
        self._confirmed: set[str] = set()
        self._changed = asyncio.Event()

        # None before the first connection, and after a loss, which `_away` tells apart
        self._connection: Any = None
        self._away = False
        self._refusal: ResponseError | None = None

    @property
    def num_channels(self) -> int:
        return len(self._ears)

    @asynccontextmanager
    async def listen(self, channels: Iterable[str]) -> AsyncIterator[Ear]:
        """
        Hear these channels; begins when the server has confirmed that, or is away: then the ear rings
        when it is back.

        Raises:
            NotPermitted: the server does not let this user listen.
        """
        ear, names = Ear(), list(channels)
        for name in names:
            self._ears.setdefault(name, set()).add(ear)
        try:
            await self._subscribe(names)
            yield ear
        finally:
            await self._unsubscribe(ear, names)

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _subscribe(self, names: Sequence[str]) -> None:
        if self._task is None or self._task.done():
            self._away, self._refusal = False, None
            self._task = asyncio.create_task(self._run())
        await self._send("SUBSCRIBE", [name for name in names if name not in self._confirmed])
        with suppress(TimeoutError):
            async with asyncio.timeout(SILENCE_S):
                while not (self._away or self._refusal or self._confirmed.issuperset(names)):
                    await self._changed.wait()
        if self._refusal is not None:
            with translated():
                raise self._refusal

    async def _unsubscribe(self, ear: Ear, names: Sequence[str]) -> None:
        for name in names:
            self._ears[name].discard(ear)
        unheard = [name for name in names if not self._ears[name]]
        for name in unheard:
            del self._ears[name]
        self._confirmed.difference_update(unheard)
        await self._send("UNSUBSCRIBE", unheard)

    async def _send(self, command: str, names: Sequence[str]) -> None:
        async with self._sending:
            # a loss is the reader's to see: it connects again, and subscribes to all that is awaited then
            with suppress(RedisError, OSError):
                for part in in_chunks(names, CHANNELS_A_COMMAND):
                    if self._connection is not None:
                        await self._connection.send_command(command, *part, check_health=False)

    async def _run(self) -> None:
        """Listen while anybody waits; connect again after a loss."""
        pause_s = MIN_PAUSE_S
        while self._ears:
            try:
                await self._listen()
                pause_s = MIN_PAUSE_S
            except (RedisError, OSError) as error:
                if isinstance(error, ResponseError) and not is_not_ready(error):
                    self._refusal = error
                    break
                self._away = True
                self._wake()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
        # nothing may come between the last look at who waits and this
        self._task = None
        self._wake()

    async def _listen(self) -> None:
        pool = self._servers.at(self._key).connection_pool
        connection = await pool.get_connection()
        try:
            self._connection, self._away = connection, False
            await self._send("SUBSCRIBE", list(self._ears))
            await self._read(connection)
        finally:
            self._connection = None
            self._confirmed.clear()
            await connection.disconnect(nowait=True)
            await pool.release(connection)

    async def _read(self, connection: Any) -> None:
        asked = False
        while True:
            reply = await connection.read_response(timeout=SILENCE_S)
            if reply is not None:
                asked = False
                self._hear(reply)
            elif asked:
                raise RedisTimeoutError(f"no reply within {SILENCE_S:g} s")
            elif not self._ears:
                return
            else:
                asked = True
                async with self._sending:
                    await connection.send_command("PING", check_health=False)

    def _hear(self, reply: Any) -> None:
        # without any channel, a PING is answered as anywhere
        kind, channel = (reply[0], (reply[1] or b"").decode()) if isinstance(reply, list) else (b"pong", "")
        if kind == b"message":
            for ear in self._ears.get(channel, ()):
                ear.ring(channel)
        elif kind == b"subscribe" and channel in self._ears:
            self._confirmed.add(channel)
            # what was said before this is missed
            for ear in self._ears[channel]:
                ear.ring()
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
