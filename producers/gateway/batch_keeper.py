"""Sees to it that each batch that has not ended is run by one gateway, and by another where that one ended."""

import asyncio
import contextlib
import logging

from pagemill.catalogue import Catalogue
from pagemill.client import Client
from pagemill.errors import PagemillError
from pagemill.object_store import ObjectStore
from pagemill.settings import ClientSettings
from producers.bulk.errors import Occupied
from producers.bulk.lease import OutputLease, is_gone, lease_name
from producers.gateway.batch_run import ENDED, BatchRun, Place
from producers.gateway.records import Records
from producers.gateway.settings import GatewaySettings

log = logging.getLogger("pagemill.gateway")

# batches that nobody runs are looked for as often
LOOK_S = 2.0

# a process that ended is noticed after so long
LEASE_S = 15.0


class BatchKeeper:
    """
    Runs batches on threads, a few at a time.

    Args:
        store: None runs none.
    """

    def __init__(
        self,
        queue: ClientSettings,
        store: ObjectStore | None,
        records: Records,
        catalogue: Catalogue,
        settings: GatewaySettings,
    ) -> None:
        self._catalogue = catalogue
        self._loop = asyncio.get_running_loop()
        self._queue, self._store, self._records, self._settings = queue, store, records, settings
        self._running: dict[str, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        if self._store is not None and self._settings.max_batches:
            self._task = asyncio.create_task(self._keep(self._store))

    def poke(self) -> None:
        """Look now: a batch was added."""
        self._news.set()

    async def end(self) -> None:
        """Stop the batches that run here, so that others can go on with them."""
        if self._task is None:
            return
        self._task.cancel()
        for run, _ in self._running.values():
            run.stop()
        await asyncio.gather(self._task, *(task for _, task in self._running.values()), return_exceptions=True)

    async def _keep(self, store: ObjectStore) -> None:
        while True:
            self._news.clear()
            try:
                for tenant, name in await asyncio.to_thread(self._records.open_batches):
                    if len(self._running) < self._settings.max_batches and name not in self._running:
                        await self._begin(store, tenant, name)
            except PagemillError as error:
                log.warning("batches were not looked for: %s", error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), LOOK_S)

    async def _begin(self, store: ObjectStore, tenant: str, name: str) -> None:
        body = await asyncio.to_thread(self._records.get, "batch", tenant, name)
        if body is None or body["status"] in ENDED:
            # its record has expired, or a process ended before it had said so
            await asyncio.to_thread(self._records.close_batch, tenant, name)
            return
        client = Client(
            self._queue.redis_url,
            queue=self._queue.queue,
            object_store=store,
            max_queued_tokens=self._queue.max_queued_tokens,
        )
        place = Place(client, store, self._records, tenant, self._context_of, self._settings.file_ttl_s)
        run = BatchRun(place, body)
        task = asyncio.create_task(self._watch(name, client, run))
        self._running[name] = (run, task)

    async def _watch(self, name: str, client: Client, run: BatchRun) -> None:
        try:
            await asyncio.to_thread(self._run, name, client, run)
        except Occupied:
            # another gateway runs it
            return
        except PagemillError as error:
            log.warning("a batch was interrupted: id=%s error=%s", name, error)
        except Exception:
            log.exception("a batch failed here: id=%s", name)
            await asyncio.sleep(LOOK_S)
        finally:
            self._running.pop(name, None)
            client.close()
            self._news.set()

    def _context_of(self, model: str) -> int | None:
        """On a batch's own thread."""
        found = asyncio.run_coroutine_threadsafe(self._catalogue.find(model), self._loop)
        return found.result(60).max_model_len

    def _run(self, name: str, client: Client, run: BatchRun) -> None:
        place = f"gateway:{name}"
        holder = client.lease_holder(lease_name(place))
        if holder and not is_gone(holder):
            raise Occupied(name)
        with OutputLease(client, place, lease_s=LEASE_S) as lease:
            log.info("batch runs here: id=%s", name)
            run.run(lease.check)
