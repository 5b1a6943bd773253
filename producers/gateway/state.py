"""What all routes share: the doors to the queue, the keys and their limits, the counters."""

import asyncio
import re
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from pagemill.async_client import AsyncClient
from pagemill.catalogue import Catalogue
from pagemill.object_store import ObjectStore, open_store
from pagemill.settings import ClientSettings
from pagemill.stream_hub import StreamHub
from pagemill.submitter import Submitter
from producers.batch_file.service import BatchRunner, FileKeeper, open_service
from producers.gateway.api_keys import KeyRing
from producers.gateway.batch_process import BatchProcess
from producers.gateway.limits import Limiter
from producers.gateway.metrics import Metrics
from producers.gateway.settings import GatewaySettings
from producers.gateway.status.board import Board
from producers.gateway.status.pages import Pages


@dataclass(slots=True)
class Gateway:
    """
    One gateway process.

    Args:
        keys: None serves anybody.
        store: Where large payloads and results are; None where the operator gave none.
        files, batches: Kept there too.
        pages: For operators; read when one of them looks.
        in_flight: Generations that are under way.
    """

    settings: GatewaySettings
    client: AsyncClient
    submitter: Submitter
    hub: StreamHub
    catalogue: Catalogue
    limiter: Limiter
    keys: KeyRing | None
    metrics: Metrics
    store: ObjectStore | None
    files: FileKeeper | None
    batches: BatchRunner | None
    drop_lines: list[re.Pattern[str]]
    pages: Pages
    in_flight: int = 0
    stopping: bool = False
    _tasks: set["asyncio.Task[None]"] = field(default_factory=set)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something beside the requests; what is left of it at the end is waited for."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finish(self, wait_s: float) -> None:
        """Wait for what was started beside the requests."""
        self.stopping = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=wait_s)


@asynccontextmanager
async def open_gateway(
    settings: GatewaySettings, queue: ClientSettings, keys: KeyRing | None
) -> AsyncIterator[Gateway]:
    """Connections, opened when they are first used."""
    store = open_store(queue.object_store) if queue.object_store is not None else None
    client = AsyncClient(
        queue.redis_url, queue=queue.queue, object_store=store, max_queued_tokens=queue.max_queued_tokens
    )
    hub = StreamHub(client)
    files, batches = _service(queue, settings)
    board = Board(client, batches)
    gateway = Gateway(
        settings=settings,
        client=client,
        submitter=Submitter(client),
        hub=hub,
        catalogue=Catalogue(client),
        limiter=Limiter(client),
        keys=keys,
        metrics=Metrics(),
        store=store,
        files=files,
        batches=batches,
        drop_lines=settings.patterns,
        pages=Pages(board),
    )
    runs_batches = batches is not None and settings.max_batches > 0
    running = asyncio.create_task(BatchProcess(queue, settings).run()) if runs_batches else None
    try:
        yield gateway
    finally:
        if running is not None:
            running.cancel()
            await asyncio.wait([running])
        await gateway.finish(5.0)
        await board.close()
        await hub.close()
        await client.close()


def _service(queue: ClientSettings, settings: GatewaySettings) -> tuple[FileKeeper | None, BatchRunner | None]:
    if queue.object_store is None:
        return None, None
    return open_service(queue.object_store, queue.queue, max_bytes=settings.max_file_bytes, ttl_s=settings.file_ttl_s)
