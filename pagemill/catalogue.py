"""Which models are served, by how many workers, with how much context; read together and kept for a few seconds."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagemill.async_client import AsyncClient
from pagemill.errors import UnknownModel
from pagemill.keys import MODELS, QueueKeys

# how old what is known may be
FRESH_S = 5.0


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """
    One name that jobs may ask for.

    Args:
        num_workers: Living ones of its queue.
        max_model_len: Longest prompt plus answer that all of them take; None where no worker lives.
    """

    name: str
    queue: str
    num_workers: int
    max_model_len: int | None


class Catalogue:
    """Asks on behalf of all callers of one event loop: those who come meanwhile share the answer, or the error."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._facts: dict[str, ModelFacts] = {}
        self._read_at: float | None = None
        self._reading: asyncio.Task[None] | None = None

    async def models(self, *, fresh_s: float = FRESH_S) -> Mapping[str, ModelFacts]:
        """
        All models that a worker has ever registered, by name.

        Raises:
            QueueUnavailable: the server cannot be reached.
        """
        if self._read_at is None or time.monotonic() - self._read_at > fresh_s:
            if self._reading is None or self._reading.done():
                self._reading = asyncio.create_task(self._refresh())
            # one caller that leaves takes it from no other
            await asyncio.shield(self._reading)
        return self._facts

    async def find(self, name: str) -> ModelFacts:
        """
        Raises:
            UnknownModel: no worker has registered it.
        """
        facts = await self.models()
        if name not in facts:
            facts = await self.models(fresh_s=1.0)
        if name not in facts:
            raise UnknownModel(f"the model {name[:200]!r} does not exist")
        return facts[name]

    async def _refresh(self) -> None:
        self._facts = await self._read()
        self._read_at = time.monotonic()

    async def _read(self) -> dict[str, ModelFacts]:
        [table] = await self._client._pipeline(("HGETALL", MODELS))
        models = {model.decode(): queue.decode() for model, queue in sorted(table.items())}
        queues = sorted(set(models.values()))
        keys = [QueueKeys(queue) for queue in queues]
        if not queues:
            return {}
        names = await self._client._pipeline(*(("ZRANGE", one.workers, 0, -1) for one in keys))
        places = [(one, name.decode()) for one, found in zip(keys, names, strict=True) for name in found]
        hashes: list[Any] = []
        if places:
            hashes = await self._client._pipeline(*(("HGETALL", one.worker(name)) for one, name in places))
        contexts: dict[str, list[int]] = {queue: [] for queue in queues}
        for (one, _), fields in zip(places, hashes, strict=True):
            if fields:
                contexts[one.queue].append(int(fields.get(b"max_model_len", 0)))
        return {
            name: ModelFacts(name, queue, len(contexts[queue]), min(contexts[queue], default=0) or None)
            for name, queue in models.items()
        }
