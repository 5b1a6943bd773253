"""What the status page shows: looked up at most every two seconds, by one task for all who watch."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pagemill.async_client import AsyncClient
from pagemill.errors import PagemillError
from pagemill.keys import MODELS, QueueKeys
from pagemill.overview import Overview, read_overview
from producers.batch_file.records import BatchRecord
from producers.batch_file.service import BatchRunner
from producers.openai_api.errors import ApiError

READ_EVERY_S = 2.0
# a viewer waits no longer: what was seen before is shown then
READ_TIMEOUT_S = 3.0
# an object store is asked less often: a listing and some objects each time
FILES_EVERY_S = 10.0
FILES_TIMEOUT_S = 10.0

# of a queue; those that are shown are chosen of these
MAX_BATCHES = 100
MAX_LETTERS = 10
# queues that are read at a time
MAX_READS = 8


@dataclass(frozen=True, slots=True)
class QueueSight:
    """
    One queue, as it was seen last.

    Args:
        models: Names that its workers have registered.
        overview: None where it has never been read.
        error: Why the last look failed; empty where it did not.
    """

    queue: str
    models: tuple[str, ...] = ()
    overview: Overview | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class FilesSight:
    """
    The batches of the HTTP API that have not ended; the object store has them, not the queue.

    Args:
        batches: The newest, each with its tenant.
    """

    batches: tuple[tuple[str, BatchRecord], ...] = ()
    num_batches: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Sight:
    """
    All queues that the gateway serves.

    Args:
        at_s: When this was put together, since 1970, by this machine's clock.
        age_s: How old the oldest of what is shown is; 0 where all of it is new, None where nothing was ever read.
        error: Why the list of queues could not be read.
    """

    queues: tuple[QueueSight, ...]
    files: FilesSight
    at_s: float
    age_s: float | None
    error: str = ""


@dataclass(slots=True)
class Board:
    """
    Looks when somebody asks, and not again for two seconds; those who come meanwhile share the look.

    Args:
        batches: Of the HTTP API; None where there is no object store.
        clock: Monotonic, in seconds.
    """

    client: AsyncClient
    batches: BatchRunner | None = None
    clock: Callable[[], float] = time.monotonic
    num_looks: int = 0
    _sight: Sight | None = None
    _looked_at: float | None = None
    _whole_at: float | None = None
    _models: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _queues: dict[str, QueueSight] = field(default_factory=dict)
    _files: FilesSight = FilesSight()
    _files_at: float | None = None
    _looking: "asyncio.Task[Sight] | None" = None
    _asking: "asyncio.Task[None] | None" = None

    async def sight(self) -> Sight:
        """The queues as they were at most two seconds ago, or as they were last seen, with the reason."""
        if self._sight is not None and self._looked_at is not None and self.clock() - self._looked_at < READ_EVERY_S:
            return self._sight
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        # one viewer that leaves takes it from no other
        return await asyncio.shield(self._looking)

    async def close(self) -> None:
        """Give a look up that is under way."""
        for task in (self._looking, self._asking):
            if task is not None and not task.done():
                task.cancel()
                await asyncio.wait([task])

    async def _look(self) -> Sight:
        self.num_looks += 1
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._look_at_files())
        until = asyncio.get_running_loop().time() + READ_TIMEOUT_S
        error = await self._look_at_models(until)
        turns = asyncio.Semaphore(MAX_READS)
        names = sorted({self.client._directory.own.queue, *self._models})
        queues = await asyncio.gather(*(self._look_at(queue, turns, until) for queue in names))
        # a store that takes long is shown with the next look
        await asyncio.wait([self._asking], timeout=READ_TIMEOUT_S / 2)
        self._queues = {one.queue: one for one in queues}
        now = self.clock()
        if not error and not any(one.error for one in queues):
            self._whole_at = now
        age_s = None if self._whole_at is None else now - self._whole_at
        self._sight = Sight(tuple(queues), self._files, time.time(), age_s, error)
        self._looked_at = now
        return self._sight

    async def _look_at_models(self, until: float) -> str:
        """Which queues there are; gives why that is not known."""
        try:
            async with asyncio.timeout_at(until):
                [table] = await self.client._pipeline(("HGETALL", MODELS))
        except (PagemillError, TimeoutError) as error:
            return _reason(error)
        found: dict[str, list[str]] = {}
        for model, queue in sorted(table.items()):
            found.setdefault(queue.decode(errors="replace"), []).append(model.decode(errors="replace"))
        self._models = {queue: tuple(models) for queue, models in found.items()}
        return ""

    async def _look_at(self, queue: str, turns: asyncio.Semaphore, until: float) -> QueueSight:
        last = replace(self._queues.get(queue, QueueSight(queue)), models=self._models.get(queue, ()))
        try:
            keys = QueueKeys(queue)
            async with turns, asyncio.timeout_at(until):
                redis = self.client._servers.at(keys.base)
                overview = await read_overview(
                    redis, keys, max_batches=MAX_BATCHES, max_letters=MAX_LETTERS, last=last.overview
                )
        except (PagemillError, TimeoutError) as error:
            return replace(last, error=_reason(error))
        return replace(last, overview=overview, error="")

    async def _look_at_files(self) -> None:
        if self.batches is None or (self._files_at is not None and self.clock() - self._files_at < FILES_EVERY_S):
            return
        reading = asyncio.ensure_future(asyncio.to_thread(self.batches.running, limit=MAX_BATCHES))
        if not (await asyncio.wait([reading], timeout=FILES_TIMEOUT_S))[0]:
            self._files = replace(self._files, error=_reason(TimeoutError(), FILES_TIMEOUT_S))
        try:
            # a thread cannot be stopped: the store is not asked again, by another one, before it has answered
            found, num = await reading
            self._files = FilesSight(found, num)
        except (ApiError, PagemillError, ValueError) as error:
            # ValueError: a record that this version cannot read
            self._files = replace(self._files, error=_reason(error))
        self._files_at = self.clock()


def _reason(error: Exception, timeout_s: float = READ_TIMEOUT_S) -> str:
    return str(error) or f"no answer within {timeout_s:g} s"
