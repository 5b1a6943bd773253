"""
Many callers of one event loop follow jobs; few connections read for all of them.

`AsyncClient.stream` waits on a connection of its own, which is right for one reader and wrong for a
thousand. Here a reader asks for up to 256 token streams in one blocking XREAD, and gives each caller
its text. The wish is that a caller who comes while the read blocks is heard at once, and a blocked
connection takes no further command. So the reads are short (20 ms); a caller's job is at least as long
in the queue before it has a token. Reads that give something end at once, and are followed by a pause
that grows with the number of streams, so that what is asked again for streams without news stays a
small part of the work.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any

from pagemill.async_client import AsyncClient
from pagemill.calls import in_chunks
from pagemill.client_core import CHUNK, POLL_S, TextCursor, not_found, reference_in
from pagemill.errors import PagemillError, ServerAway, WaitTimeout
from pagemill.keys import QueueKeys
from pagemill.messages import TokenDelta
from pagemill.schema import Result
from pagemill.scripts import translated

# how long a read waits for news, and so how long a new caller waits for the reader
BLOCK_S = 0.02

# a pause after a read, for each stream that it asked for
PAUSE_A_STREAM_S = 10e-6

# callers of one reader
MAX_WATCHES = 256

# items that a caller may leave lying before texts are joined
MAX_APART = 64

# callers that ask at a time which queue their job is in
MAX_ASKING = 8

# a server that is away for longer fails those who follow
AWAY_S = 15.0

Item = TokenDelta | Result


class _Mailbox:
    """What a caller has not taken yet: of one who is slow, the texts of an answer become one."""

    def __init__(self) -> None:
        self._items: list[Item | PagemillError] = []
        # by answer, the place of its newest text
        self._newest: dict[int, int] = {}
        self._some = asyncio.Event()

    def put(self, item: Item | PagemillError) -> None:
        place = self._newest.get(item.index) if isinstance(item, TokenDelta) else None
        if place is not None and len(self._items) >= MAX_APART:
            self._items[place] = _joined(self._items[place], item)
            return
        if isinstance(item, TokenDelta):
            self._newest[item.index] = len(self._items)
        self._items.append(item)
        self._some.set()

    async def take(self) -> "list[Item | PagemillError]":
        """All that there is, at least one."""
        await self._some.wait()
        taken, self._items, self._newest = self._items, [], {}
        self._some.clear()
        return taken


def _joined(one: Any, other: Any) -> TokenDelta:
    return TokenDelta(one.index, one.offset, one.text + other.text, other.num_tokens)


class _Watch:
    """One caller that follows one job."""

    def __init__(self, job_id: str, offsets: Mapping[int, int] | None, *, tokens: bool) -> None:
        self.job_id = job_id
        self.cursor = TextCursor(offsets)
        # without them the end alone is awaited
        self.tokens = tokens
        self.items = _Mailbox()

    def feed(self, entries: Sequence[tuple[bytes, Mapping[bytes, bytes]]]) -> bool:
        """Pass new text on; True at the last entry."""
        for delta in self.cursor.feed(entries):
            self.items.put(delta)
        return self.cursor.ended

    def end(self, result: Result) -> None:
        if self.tokens:
            for delta in self.cursor.rest(result):
                self.items.put(delta)
        self.items.put(result)


class StreamHub:
    """
    Follows jobs for all callers of an event loop.

        hub = StreamHub(client)
        async for item in hub.follow(job_id):
            ...    # TokenDelta, and the Result as the last
        await hub.close()
    """

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._readers: dict[QueueKeys, list[_Reader]] = {}
        # to ask where a job is takes a connection
        self._asking = asyncio.Semaphore(MAX_ASKING)

    async def close(self) -> None:
        """Stop reading; whoever still follows is left waiting."""
        tasks = [task for readers in self._readers.values() for reader in readers for task in reader.tasks]
        self._readers.clear()
        # a cancel that meets a reply just read can get lost inside the Redis client: ask until all have ended
        while running := [task for task in tasks if not task.done()]:
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=0.2)

    async def follow(
        self,
        job_id: str,
        *,
        offsets: Mapping[int, int] | None = None,
        wait_s: float | None = None,
        tokens: bool = True,
    ) -> AsyncIterator[Item]:
        """
        The answers' text as it is generated, each character once, and then the result.

        Args:
            offsets: Characters of each answer that the caller has already.
            wait_s: Most seconds for all of it.
            tokens: False gives the result alone.

        Raises:
            WaitTimeout: the job has not ended by then.
            JobNotFound: there is no such job.
            ObjectStoreError: its result is in a store that cannot be read.
            QueueUnavailable: the server cannot be reached.
        """
        async with self._asking:
            keys = await self._client._locate(job_id)
        watch = _Watch(job_id, offsets, tokens=tokens)
        reader = self._reader(keys)
        reader.join(watch)
        # one timer for all of it: one for each item is a good part of what an item costs
        late = WaitTimeout(f"job {job_id} has not ended in time; it goes on")
        timer = wait_s is not None and asyncio.get_running_loop().call_later(wait_s, watch.items.put, late)
        try:
            while True:
                for item in await watch.items.take():
                    if isinstance(item, PagemillError):
                        raise item
                    yield item
                    if isinstance(item, Result):
                        return
        finally:
            if timer:
                timer.cancel()
            reader.leave(watch)

    async def result(self, job_id: str, wait_s: float | None = None) -> Result:
        """As `AsyncClient.result`."""
        async for item in self.follow(job_id, wait_s=wait_s, tokens=False):
            if isinstance(item, Result):
                return item
        raise AssertionError("follow ends with a result or raises")

    def _reader(self, keys: QueueKeys) -> "_Reader":
        readers = self._readers.setdefault(keys, [])
        free = min(readers, key=lambda one: one.num_watches, default=None)
        if free is None or free.num_watches >= MAX_WATCHES:
            free = _Reader(self._client, keys)
            readers.append(free)
        return free


class _Reader:
    """One connection that reads for some callers, as long as there are any."""

    def __init__(self, client: AsyncClient, keys: QueueKeys) -> None:
        self._client = client
        self._keys = keys
        self._watches: dict[str, list[_Watch]] = {}
        self.num_watches = 0
        self._joined: set[str] = set()
        self._some = asyncio.Event()
        # behind which event of the queue the next read begins; None where nobody awaits an end alone
        self._event: str | None = None
        # jobs that have ended and whose results are being read from the store
        self._ending: dict[str, asyncio.Task[None]] = {}
        self.task = asyncio.create_task(self._run())

    @property
    def tasks(self) -> "list[asyncio.Task[None]]":
        return [self.task, *self._ending.values()]

    def join(self, watch: _Watch) -> None:
        self._watches.setdefault(watch.job_id, []).append(watch)
        self.num_watches += 1
        self._joined.add(watch.job_id)
        self._some.set()

    def leave(self, watch: _Watch) -> None:
        """Forget a caller; one that was served already is no error."""
        watches = self._watches.get(watch.job_id, [])
        if watch in watches:
            watches.remove(watch)
            self.num_watches -= 1
        if not watches:
            self._watches.pop(watch.job_id, None)

    async def _run(self) -> None:
        look_at = away_since = 0.0
        while True:
            if not self._watches:
                self._event, look_at = None, 0.0
                self._some.clear()
                await self._some.wait()
            try:
                if time.monotonic() >= look_at:
                    # as events may be trimmed, and a stream lost, all are looked at now and then
                    self._joined |= self._watches.keys()
                    look_at = time.monotonic() + 10 * POLL_S
                await self._turn()
                away_since = 0.0
            except ServerAway as error:
                now = time.monotonic()
                away_since = away_since or now
                if now - away_since > AWAY_S:
                    self._fail(list(self._watches), error)
                    away_since = 0.0
                look_at = 0.0
                await asyncio.sleep(0.1)
            except PagemillError as error:
                self._fail(list(self._watches), error)
            except Exception as error:
                # a fault of ours must not leave callers waiting for ever
                self._fail(list(self._watches), PagemillError(f"the reader of results failed: {error!r}"))

    async def _turn(self) -> None:
        alone = any(not watch.tokens for watches in self._watches.values() for watch in watches)
        if not alone:
            self._event = None
        elif self._event is None:
            # before the look, so that no end falls between the two
            self._event = await self._client._last_event(self._keys)
            self._joined |= self._watches.keys()
        if self._joined:
            joined, self._joined = self._joined, set()
            await self._look(joined)
        positions = self._positions()
        if positions:
            ended = self._dispatch(await self._read(positions))
            await self._look(ended)
        # all may have been told of an end whose result is not there yet
        await asyncio.sleep(min(BLOCK_S, PAUSE_A_STREAM_S * len(positions)) if positions else BLOCK_S)

    def _positions(self) -> dict[str, str]:
        """The streams to read, and behind which entry of each."""
        found = {}
        for job_id, watches in self._watches.items():
            # text that one of two callers has already is left out by its cursor
            cursors = [watch.cursor.entry_id for watch in watches if watch.tokens and not watch.cursor.ended]
            if cursors:
                found[self._keys.tokens(job_id)] = min(cursors, key=_order)
        if self._event is not None:
            found[self._keys.events] = self._event
        return found

    async def _read(self, positions: Mapping[str, str]) -> list[tuple[bytes, Any]]:
        block_ms = round(BLOCK_S * 1000)
        command = ("XREAD", "COUNT", 512, "BLOCK", block_ms, "STREAMS", *positions, *positions.values())
        with translated():
            reply: Any = await self._client._servers.at(self._keys.base).execute_command(*command)
        return reply or []

    def _dispatch(self, reply: Sequence[tuple[bytes, Any]]) -> set[str]:
        """Pass on what was read; the jobs that have ended."""
        ended = set()
        events = self._keys.events.encode()
        for key, entries in reply:
            if key == events:
                self._event = entries[-1][0].decode()
                jobs = (fields.get(b"j", b"").decode() for _, fields in entries)
                ended |= {job_id for job_id in jobs if job_id in self._watches}
                continue
            job_id = key.decode().rpartition(":t:")[2]
            for watch in self._watches.get(job_id, ()):
                if watch.tokens and watch.feed(entries):
                    ended.add(job_id)
        return ended

    async def _look(self, job_ids: set[str]) -> None:
        """Serve those whose jobs have ended, and those whose jobs are unknown."""
        for chunk in in_chunks(sorted(job_ids), CHUNK):
            records, known = await self._client._look_many(self._keys, chunk)
            for job_id, record, there in zip(chunk, records, known, strict=True):
                if record is None:
                    if not there:
                        self._fail([job_id], not_found(job_id))
                elif reference_in(record) is None:
                    await self._end(job_id, record)
                elif job_id not in self._ending:
                    # beside: a store that is slow, or away, holds up nobody else
                    task = self._ending[job_id] = asyncio.create_task(self._end(job_id, record))
                    task.add_done_callback(partial(self._has_ended, job_id))

    def _has_ended(self, job_id: str, task: "asyncio.Task[None]") -> None:  # noqa: ARG002  callbacks get it
        del self._ending[job_id]

    async def _end(self, job_id: str, record: bytes) -> None:
        try:
            result = await self._client._read_result(record)
        except PagemillError as error:
            self._fail([job_id], error)
        except Exception as error:
            self._fail([job_id], PagemillError(f"the result cannot be read: {error!r}"))
        else:
            for watch in self._taken(job_id):
                watch.end(result)

    def _fail(self, job_ids: Sequence[str], error: PagemillError) -> None:
        for job_id in job_ids:
            for watch in self._taken(job_id):
                watch.items.put(error)

    def _taken(self, job_id: str) -> list[_Watch]:
        watches = self._watches.pop(job_id, [])
        self.num_watches -= len(watches)
        return watches


def _order(entry_id: str) -> tuple[int, int]:
    milliseconds, _, number = entry_id.partition("-")
    return int(milliseconds), int(number)
