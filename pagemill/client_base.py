"""What a client's verbs stand on: its connections, and where to find a name; for threads and for asyncio."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from pagemill.client_core import Directory, store_of
from pagemill.connection import connect, connect_async
from pagemill.keys import MODELS, QueueKeys
from pagemill.object_store import ObjectStore
from pagemill.scripts import translated
from pagemill.settings import ClientSettings


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
        self._connect(settings.redis_url)
        self._store = store_of(settings.object_store if object_store is None else object_store)
        self._max_queued_tokens = settings.max_queued_tokens
        self._directory = Directory(settings.queue)

    @abstractmethod
    def _connect(self, redis_url: str) -> None: ...


class ClientBase(_Common):
    """A blocking client's connections."""

    def _connect(self, redis_url: str) -> None:
        self._redis: Redis = connect(redis_url)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()

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

    def _pipeline(self, *commands: tuple[Any, ...]) -> list[Any]:
        with translated(), self._redis.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            return pipeline.execute()


class AsyncClientBase(_Common):
    """As ClientBase, for one event loop."""

    def _connect(self, redis_url: str) -> None:
        self._redis: AsyncRedis = connect_async(redis_url)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

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

    async def _pipeline(self, *commands: tuple[Any, ...]) -> list[Any]:
        with translated():
            async with self._redis.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                return await pipeline.execute()
