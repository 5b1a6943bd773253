"""
Where results go: Redis when small, the object store when large or asked for.

Results are written in batches, one pipeline each. While a server is away they wait here, under
lease. Writing one twice does no harm: the queue knows the job as ended.
"""

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from engine.request import RequestOutput
from pagemill.consumer import Consumer
from pagemill.errors import ObjectStoreError, QueueUnavailable
from pagemill.messages import Finished, Outcome
from pagemill.object_store import ObjectStore
from pagemill.schema import Failure, Result, ResultStatus
from worker.leases import Held
from worker.results import ResultMaker
from worker.written import KEEP_S, Kept, Written

log = structlog.get_logger(__name__)

T = TypeVar("T")

MAX_BATCH = 64
MAX_BATCH_BYTES = 8 * 1024 * 1024
# a server takes 512 MB in one value by default, and should not hold a tenth of that
MAX_INLINE_BYTES = 32 * 1024 * 1024
MAX_PAUSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Ended:
    """A job that has ended: with an output, whole or partial, or with a failure, or with neither."""

    held: Held
    status: ResultStatus
    output: RequestOutput | None = None
    failure: Failure | None = None

    @property
    def heavy(self) -> bool:
        """Whether its result takes work for each token, and so a thread."""
        return self.output is not None and (
            self.output.prompt_logprobs is not None or any(one.logprobs for one in self.output.completions)
        )


@dataclass(frozen=True, slots=True)
class _Ready:
    held: Held
    result: Result
    payload: bytes
    ref: str | None = None


class Sink:
    """
    Takes ended jobs and publishes their results.

    Args:
        store: For large results; without one, all go to Redis.
        inline_bytes: Results above this size go to the store.
        on_settled: Called for each job when its result is written, or belongs to another; and with which.
        keep_s: How long what was written can be written again.
    """

    def __init__(
        self,
        consumer: Consumer,
        store: ObjectStore | None,
        results: ResultMaker,
        *,
        inline_bytes: int,
        on_settled: Callable[[Held, Outcome, Result], None],
        keep_s: float = KEEP_S,
    ) -> None:
        self._consumer = consumer
        self._store = store
        self._results = results
        self._inline_bytes = inline_bytes
        self._on_settled = on_settled

        # all the mutable state there is: what waits, what goes to or from the store, what is being written, what was
        self._written = Written(keep_s)
        self._ended: deque[Ended] = deque()
        self._ready: deque[_Ready] = deque()
        self._transfers: set[asyncio.Task[None]] = set()
        self._num_writing = 0
        self._work = asyncio.Event()

    def __len__(self) -> int:
        """Jobs that have ended and are not written yet, and payloads that are not deleted yet."""
        return len(self._ended) + len(self._ready) + len(self._transfers) + self._num_writing

    def put(self, ended: Ended) -> None:
        """Take an ended job; its result is written soon."""
        ended.held.settled = True
        self._ended.append(ended)
        self._work.set()

    async def run(self) -> None:
        """Write batch after batch, until cancelled."""
        while True:
            await self._work.wait()
            self._work.clear()
            while self._ended or self._ready:
                self._make_ready()
                await self._write()

    def _make_ready(self) -> None:
        for _ in range(min(MAX_BATCH, len(self._ended))):
            ended = self._ended.popleft()
            if ended.heavy:
                self._upload_later(ended, None)
                continue
            result = self._make(ended)
            payload = result.payload()
            if self._goes_to_store(ended.held, payload):
                self._upload_later(ended, result)
            else:
                self._keep_inline(ended.held, result, payload)

    def _keep_inline(self, held: Held, result: Result, payload: bytes) -> None:
        if len(payload) > MAX_INLINE_BYTES:
            # the server would refuse it, and with it all that is written beside it
            message = (
                f"the result has {len(payload):,} bytes and Redis is given {MAX_INLINE_BYTES:,} at most: "
                "give the worker an --object-store"
            )
            failure = Failure(code="payload_too_large", message=message)
            result = self._results.make(held.delivery, result.metadata, "failed", failure=failure)
            payload = result.payload()
        self._ready.append(_Ready(held, result, payload))

    def _next_batch(self) -> list[_Ready]:
        batch: list[_Ready] = []
        room = MAX_BATCH_BYTES
        while self._ready and len(batch) < MAX_BATCH and (room > 0 or not batch):
            batch.append(self._ready.popleft())
            room -= len(batch[-1].payload)
        return batch

    async def _write(self) -> None:
        batch = self._next_batch()
        if not batch:
            return
        self._num_writing = len(batch)
        sent = [Finished(one.held.delivery, one.result, one.payload, one.ref) for one in batch]
        outcomes = await keep_trying("results.write", lambda: self._consumer.finish(sent))
        self._num_writing = 0
        for one, finished, outcome in zip(batch, sent, outcomes, strict=True):
            if outcome in ("fenced", "gone") and one.held.delivery is not finished.delivery:
                # we lost the job and pulled it again meanwhile: the result is good for the new entry
                self._ready.append(one)
            else:
                self._written.keep(finished, outcome)
                self._on_settled(one.held, outcome, one.result)

    async def write_again(self) -> None:
        """Write the last results once more, to a server that may not have them any more."""
        kept = self._written.let_go(everything=True)
        for start in range(0, len(kept), MAX_BATCH):
            await self._write_part_again(kept[start : start + MAX_BATCH])

    async def _write_part_again(self, kept: Sequence[Kept]) -> None:
        sent = [one.finished for one in kept]
        outcomes = await keep_trying("results.write_again", lambda: self._consumer.finish(sent))
        for one, outcome in zip(kept, outcomes, strict=True):
            # "fenced": the server does not even know that we had it, and has it run again
            self._written.keep(one.finished, outcome)
        log.info("results.written_again", results=len(kept), forgotten=outcomes.count("done"))

    async def tidy_forever(self) -> None:
        """Discard what was written, some time later."""
        while True:
            await asyncio.sleep(1.0)
            self._discard(self._written.let_go())

    async def close(self) -> None:
        """Discard all that was written, now."""
        self._discard(self._written.let_go(everything=True))
        if self._transfers:
            await asyncio.wait(self._transfers)

    def _discard(self, written: Iterable[Kept]) -> None:
        """Delete what nobody needs any more; an object that stays behind is for the bucket's lifecycle rule."""
        if self._store is not None:
            for kept in written:
                self._delete_objects(self._store, kept.finished, kept.outcome)

    def _delete_objects(self, store: ObjectStore, finished: Finished, outcome: Outcome) -> None:
        # fenced: its new owner reads the payload
        if finished.delivery.payload_ref and outcome != "fenced":
            self._start(self._delete(store, finished.delivery.payload_ref))
        # not on "duplicate": where a reply was lost, the result that is published is this one
        if finished.ref and outcome in ("fenced", "gone"):
            self._start(self._delete(store, finished.ref))

    async def _delete(self, store: ObjectStore, ref: str) -> None:
        try:
            await asyncio.to_thread(store.delete, ref)
        except ObjectStoreError as error:
            log.warning("object.not_deleted", ref=ref, error=str(error))

    def _make(self, ended: Ended) -> Result:
        delivery = ended.held.delivery
        metadata = ended.held.job.metadata if ended.held.job else {}
        try:
            return self._results.make(delivery, metadata, ended.status, ended.output, ended.failure)
        except Exception as error:
            # a fault of ours, met on one job's data: that job pays, the others go on
            log.exception("result.not_made", **ended.held.ids)
            message = f"the worker could not write the answer: {type(error).__name__}: {error}"
            return self._results.make(delivery, {}, "failed", failure=Failure(code="engine_error", message=message))

    def _goes_to_store(self, held: Held, payload: bytes) -> bool:
        if self._store is None:
            return False
        choice = held.job.result_store if held.job else "auto"
        return choice == "object" or (choice == "auto" and len(payload) > self._inline_bytes)

    def _upload_later(self, ended: Ended, result: Result | None) -> None:
        self._start(self._upload(ended, result))

    def _start(self, transfer: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(transfer)
        self._transfers.add(task)
        task.add_done_callback(self._transfers.discard)

    async def _upload(self, ended: Ended, result: Result | None) -> None:
        if result is None:
            result = await asyncio.to_thread(self._make, ended)
        payload = await asyncio.to_thread(result.payload)
        if self._goes_to_store(ended.held, payload):
            # of this entry alone: a worker that was fenced off must not write over the published result
            delivery = ended.held.delivery
            name = f"results/{self._consumer.keys.queue}/{delivery.job_id}-{delivery.entry_id}.json"
            ref = await keep_trying("results.upload", lambda: asyncio.to_thread(self._put, name, payload))
            self._ready.append(_Ready(ended.held, result, payload, ref))
        else:
            self._keep_inline(ended.held, result, payload)
        self._work.set()

    def _put(self, name: str, payload: bytes) -> str:
        assert self._store is not None
        return self._store.put(name, payload)


async def keep_trying(what: str, action: Callable[[], Awaitable[T]]) -> T:
    """
    Repeat an action while its server is away, with growing pauses of random length.
    """
    pause_s = 0.05
    while True:
        try:
            return await action()
        except (QueueUnavailable, ObjectStoreError) as error:
            log.warning(f"{what}_failed", error=str(error), retry_s=round(pause_s, 2))
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
        pause_s = min(MAX_PAUSE_S, 2 * pause_s)
