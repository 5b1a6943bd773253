"""What a client's verbs stand on: its connections, and where to find a name; for threads and for asyncio."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from pagemill.client_core import Directory, Outage, by_server, store_of
from pagemill.connection import AsyncServers, Servers
from pagemill.errors import ServerAway
from pagemill.keys import MODELS, QueueKeys
from pagemill.object_store import ObjectStore
from pagemill.scripts import Call, run, run_async, run_many, run_many_async, translated
from pagemill.settings import ClientSettings
from pagemill.subscriber import Subscriber
from pagemill.trace_context import TraceContext
from pagemill.traces import tracer_for

if TYPE_CHECKING:
    from pagemill.tracing import Sending, Tracer

T = TypeVar("T")

# commands of one asyncio client that are under way at a time, and so its connections for them
MAX_UNDER_WAY = 32

_NOT_TRACED: "AbstractContextManager[Sending | None]" = nullcontext()


class _Common(ABC):
    """
    What a client has open. What is not given comes from ClientSettings; nothing is opened before the
    first call.
    """

    def __init__(
        self,
        redis_url: str | None = None,
        *,
        queue: str | None = None,
        object_store: str | ObjectStore | None = None,
        max_queued_tokens: int | None = None,
    ) -> None:
        place = object_store if isinstance(object_store, str) else None
        settings = ClientSettings.load(
            strict=False, redis_url=redis_url, queue=queue, object_store=place, max_queued_tokens=max_queued_tokens
        )
        self._directory = Directory(settings.queue)
        self._store = store_of(settings.object_store if object_store is None else object_store)
        self._max_queued_tokens = settings.max_queued_tokens
        self._tracer = tracer_for(settings.tracing)
        self._trace_rows = settings.trace_rows
        self._connect(settings.redis_url)

    @abstractmethod
    def _connect(self, redis_url: str) -> None: ...

    @property
    def tracer(self) -> "Tracer | None":
        """What makes spans; None where traces are off."""
        return self._tracer

    def _sending(self) -> "AbstractContextManager[Sending | None]":
        """A span around a submit, where traces are on."""
        return _NOT_TRACED if self._tracer is None else self._tracer.sending(self._directory.own.queue)

    def _context_of(self, sending: "Sending | None") -> TraceContext | None:
        """What the jobs of a submit carry."""
        return None if sending is None else sending.context

    def _key(self, command: Sequence[Any]) -> str:
        # what is asked of a server, and not of a key, is asked of the own queue's
        return str(command[1]) if len(command) > 1 else self._directory.own.base


class ClientBase(_Common):
    """A blocking client's connections."""

    def _connect(self, redis_url: str) -> None:
        self._servers = Servers(redis_url)

    @property
    def _redis(self) -> Redis:
        """Where the client's own queue is."""
        return self._servers.at(self._directory.own.base)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        self._servers.close()

    def _learn_models(self, models: Iterable[str | None]) -> None:
        if self._directory.stale(models):
            [table] = self._pipeline(("HGETALL", MODELS))
            self._directory.learn(table)

    def _seek(self, name: str, key: Callable[[QueueKeys], str]) -> QueueKeys:
        """The queue that has the key; `name` stands for it where that is remembered."""
        if self._directory.out_of_date():
            [table] = self._pipeline(("HGETALL", MODELS))
            self._directory.learn(table)
        places = self._directory.candidates(name)
        if len(places) == 1:
            return places[0]
        found = self._pipeline(*(("EXISTS", key(keys)) for keys in places))
        return self._directory.first(name, places, found)

    def _run(self, call: Call[T]) -> T:
        return run(self._servers.at(call.base), call)

    def _run_many(self, calls: Sequence[Call[T]]) -> list[T]:
        """Replies in order; a server's calls go out together."""
        replies: dict[int, T] = {}
        for server, places in by_server([self._servers.at(call.base) for call in calls]):
            replies |= zip(places, run_many(server, [calls[place] for place in places]), strict=True)
        return [replies[place] for place in range(len(calls))]

    def _pipeline(self, *commands: tuple[Any, ...]) -> list[Any]:
        """As `_run_many`, for plain commands: the key comes second, if there is one."""
        replies: dict[int, Any] = {}
        for server, places in by_server([self._servers.at(self._key(command)) for command in commands]):
            with translated(), server.pipeline(transaction=False) as pipeline:
                for place in places:
                    pipeline.execute_command(*commands[place])
                replies |= zip(places, pipeline.execute(), strict=True)
        return [replies[place] for place in range(len(commands))]

    def _ride_out(self, outage: Outage, call: Callable[[], T]) -> T:
        """Repeat what may be repeated while the server is away, as long as the outage may last."""
        while True:
            try:
                reply = call()
            except ServerAway as error:
                time.sleep(outage.pause_s(error))
            else:
                outage.over()
                return reply


class AsyncClientBase(_Common):
    """As ClientBase, for one event loop."""

    def _connect(self, redis_url: str) -> None:
        self._servers = AsyncServers(redis_url)
        self._subscriber = Subscriber(self._servers, self._directory.own.base)
        # so that a thousand waiters are not a thousand connections
        self._turns = asyncio.Semaphore(MAX_UNDER_WAY)

    @property
    def _redis(self) -> AsyncRedis:
        """Where the client's own queue is."""
        return self._servers.at(self._directory.own.base)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        await self._subscriber.close()
        await self._servers.close()

    async def _learn_models(self, models: Iterable[str | None]) -> None:
        if self._directory.stale(models):
            [table] = await self._pipeline(("HGETALL", MODELS))
            self._directory.learn(table)

    async def _seek(self, name: str, key: Callable[[QueueKeys], str]) -> QueueKeys:
        """As ClientBase._seek."""
        if self._directory.out_of_date():
            [table] = await self._pipeline(("HGETALL", MODELS))
            self._directory.learn(table)
        places = self._directory.candidates(name)
        if len(places) == 1:
            return places[0]
        found = await self._pipeline(*(("EXISTS", key(keys)) for keys in places))
        return self._directory.first(name, places, found)

    async def _run(self, call: Call[T]) -> T:
        async with self._turns:
            return await run_async(self._servers.at(call.base), call)

    async def _run_many(self, calls: Sequence[Call[T]]) -> list[T]:
        """As ClientBase._run_many."""
        replies: dict[int, T] = {}
        for server, places in by_server([self._servers.at(call.base) for call in calls]):
            async with self._turns:
                answers = await run_many_async(server, [calls[place] for place in places])
            replies |= zip(places, answers, strict=True)
        return [replies[place] for place in range(len(calls))]

    async def _pipeline(self, *commands: tuple[Any, ...]) -> list[Any]:
        """As ClientBase._pipeline."""
        replies: dict[int, Any] = {}
        for server, places in by_server([self._servers.at(self._key(command)) for command in commands]):
            async with self._turns:
                with translated():
                    async with server.pipeline(transaction=False) as pipeline:
                        for place in places:
                            pipeline.execute_command(*commands[place])
                        replies |= zip(places, await pipeline.execute(), strict=True)
        return [replies[place] for place in range(len(commands))]

    async def _ride_out(self, outage: Outage, call: Callable[[], Awaitable[T]]) -> T:
        """As ClientBase._ride_out."""
        while True:
            try:
                reply = await call()
            except ServerAway as error:
                await asyncio.sleep(outage.pause_s(error))
            else:
                outage.over()
                return reply
