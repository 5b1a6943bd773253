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


# the last that an outbox gets
END: tuple[str, ...] = ()

# what a connection ends with; redis-py takes the streams away from under one that writes
LOSSES = (RedisError, OSError, AttributeError)


class Ear:
    """What one wait has heard; names of channels, each once until they are taken."""

    def __init__(self, channels: Iterable[str] = ()) -> None:
        # not confirmed by the server; set when there are none, or there is no use in waiting
        self.unconfirmed = set(channels)
        self.settled = asyncio.Event()
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

    def confirm(self, channel: str) -> None:
        self.unconfirmed.discard(channel)
        if not self.unconfirmed:
            self.settled.set()

    def hush(self) -> None:
        self._rang.clear()

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
        # sent by the task: a wait that is given up must not break off in the middle of a command
        self._outbox: asyncio.Queue[tuple[str, ...]] = asyncio.Queue()

        # who waits for what, and what of it the server has confirmed
        self._ears: dict[str, set[Ear]] = {}
        self._confirmed: set[str] = set()
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
        names = list(channels)
        ear = Ear(names)
        for name in names:
            self._ears.setdefault(name, set()).add(ear)
        try:
            await self._subscribe(ear, names)
            # whoever listens looks first: what rang until now is no news
            ear.hush()
            yield ear
        finally:
            self._unsubscribe(ear, names)

    async def close(self) -> None:
        task, self._task = self._task, None
        while task is not None and not task.done():
            # once may not do: a library that it waits in can swallow that
            task.cancel()
            await asyncio.wait([task], timeout=1.0)

    async def _subscribe(self, ear: Ear, names: Sequence[str]) -> None:
        if self._task is None or self._task.done():
            self._away, self._refusal = False, None
            self._task = asyncio.create_task(self._run())
        for name in self._confirmed.intersection(names):
            ear.confirm(name)
        self._send("SUBSCRIBE", [name for name in names if name in ear.unconfirmed])
        if ear.unconfirmed and not self._away:
            with suppress(TimeoutError):
                async with asyncio.timeout(SILENCE_S):
                    await ear.settled.wait()
        if self._refusal is not None:
            with translated():
                raise self._refusal

    def _unsubscribe(self, ear: Ear, names: Sequence[str]) -> None:
        for name in names:
            self._ears[name].discard(ear)
        unheard = [name for name in names if not self._ears[name]]
        for name in unheard:
            del self._ears[name]
        self._confirmed.difference_update(unheard)
        self._send("UNSUBSCRIBE", unheard)

    def _send(self, command: str, names: Sequence[str]) -> None:
        for part in in_chunks(names, CHANNELS_A_COMMAND):
            self._outbox.put_nowait((command, *part))

    async def _run(self) -> None:
        """Listen while anybody waits; connect again after a loss."""
        pause_s = MIN_PAUSE_S
        while self._ears:
            try:
                await self._listen()
                pause_s = MIN_PAUSE_S
            except LOSSES as error:
                if isinstance(error, ResponseError) and not is_not_ready(error):
                    self._refusal = error
                    break
                self._away = True
                self._settle()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
        # nothing may come between the last look at who waits and this
        self._task = None
        self._settle()

    async def _listen(self) -> None:
        pool = self._servers.at(self._key).connection_pool
        connection = await pool.get_connection()
        # from here on there is what is awaited now, and what the outbox gets
        self._away, self._outbox = False, asyncio.Queue()
        self._send("SUBSCRIBE", list(self._ears))
        writer = asyncio.create_task(self._write(connection, self._outbox))
        try:
            await self._read(connection)
        finally:
            self._confirmed.clear()
            # told, not cancelled: while it sends it may not hear that
            self._outbox.put_nowait(END)
            await connection.disconnect(nowait=True)
            await writer
            # what was on its way when that came may have connected again
            await connection.disconnect(nowait=True)
            await pool.release(connection)

    async def _write(self, connection: Any, outbox: asyncio.Queue[tuple[str, ...]]) -> None:
        # a loss ends the connection, which the reader sees
        with suppress(*LOSSES):
            while (command := await outbox.get()) != END and connection.is_connected:
                await connection.send_command(*command, check_health=False)

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
                self._outbox.put_nowait(("PING",))

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
                ear.confirm(channel)
                ear.ring()

    def _settle(self) -> None:
        """Nobody need wait for confirmations now."""
        for ears in self._ears.values():
            for ear in ears:
                ear.settled.set()
