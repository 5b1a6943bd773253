"""One batch of the API, taken from where it stands to its end."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagemill.bulk_client import BulkClient
from pagemill.errors import ObjectChanged, ObjectNotFound, StoreAway
from pagemill.object_store import ObjectStore, open_store
from producers.batch_file.book import Book, Key
from producers.batch_file.errors import Rejected
from producers.batch_file.files import MAX_BYTES, Files, output_id
from producers.batch_file.local import clear
from producers.batch_file.plan import Order
from producers.batch_file.records import FINAL, BatchFault, BatchFaults, BatchRecord, RequestCounts
from producers.batch_file.urls import inside
from producers.batch_file.work import BatchFile, Ended, Place, Progress
from producers.bulk.io_errors import SourceError
from producers.bulk.lease import OutputLease

# how often others see how far a batch is, and it hears that it was cancelled
LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Share:
    """
    What one batch may have.

    Args:
        max_lines, max_bytes: Of its input; more fails it.
        max_jobs, max_tokens: In the queue at a time.
    """

    max_lines: int = 50_000
    max_bytes: int = MAX_BYTES
    max_jobs: int = 512
    max_tokens: int = 1_000_000


class Turn:
    """
    The work of one server on one batch; the lease on it is held meanwhile.

    Args:
        root: URL of the folder that all batches and files are in.
    """

    def __init__(
        self,
        key: Key,
        root: str,
        client: BulkClient,
        share: Share,
        *,
        book: Book,
        files: Files,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._key, self._client, self._share, self._book, self._files = key, client, share, book, files
        self._clock = clock
        self._folder: ObjectStore = open_store(inside(root, f"work/{key[0]}/{key[1]}"))
        self._record = book.read(key)
        self._work: BatchFile | None = None
        self._stopping = False
        self._look_at = 0.0

    def stop(self) -> None:
        """Let `run` raise Interrupted soon; from any thread."""
        self._stopping = True
        if self._work is not None:
            self._work.stop()

    def run(self, lease: OutputLease) -> None:
        """
        Raises:
            Interrupted: after `stop`.
            PagemillError: it cannot go on now; later it may.
        """
        if self._record.status not in FINAL:
            self._advance(lease)
        # its server may have died between its end and this
        self._book.close(self._key)
        clear(self._folder)

    def fail(self, *faults: BatchFault) -> None:
        """End it without any output."""
        errors = BatchFaults(data=faults)
        self._book.end(self._key, self._with(status="failed", failed_at=self._now(), errors=errors))

    def _advance(self, lease: OutputLease) -> None:
        def turned(progress: Progress) -> None:
            lease.check()
            if time.monotonic() >= self._look_at:
                self._look(progress)

        try:
            self._work = work = BatchFile(self._order(), self._folder, self._client, turned)
            plan = work.plan
        except Rejected as error:
            self.fail(*error.faults)
            return
        except (SourceError, ObjectNotFound, ObjectChanged) as error:
            self.fail(BatchFault(code="invalid_input_file", message=str(error), param="input_file_id"))
            return
        self._with(status="in_progress", model=plan.model, in_progress_at=self._record.in_progress_at or self._now())
        self._look(work.progress())
        if self._stopping:
            work.stop()
        try:
            how = work.run()
        except ObjectNotFound as error:
            # somebody has deleted the file meanwhile
            if self._input_is_there():
                raise
            self.fail(BatchFault(code="invalid_input_file", message=str(error), param="input_file_id"))
            return
        lease.check()
        self._finalise(work, how)

    def _input_is_there(self) -> bool:
        place = self._files.place(self._key[0], self._record.input_file_id)
        return place.store.exists(place.url)

    def _order(self) -> Order:
        tenant, batch_id = self._key
        record, share = self._record, self._share
        return Order(
            self._files.content_url(tenant, record.input_file_id),
            name=batch_id,
            endpoint=record.endpoint,
            tenant=tenant,
            deadline=record.expires_at,
            max_lines=share.max_lines,
            max_bytes=share.max_bytes,
            max_jobs=share.max_jobs,
            max_tokens=share.max_tokens,
        )

    def _look(self, progress: Progress) -> None:
        """Tell others how far it is, and hear whether it is wanted any more."""
        self._look_at = time.monotonic() + LOOK_S
        counts = RequestCounts(total=progress.total, completed=progress.completed, failed=progress.failed)
        before = self._record.request_counts
        try:
            if counts != before or not before.total:
                self._book.note(self._key, self._with(request_counts=counts))
            if self._work is not None and self._book.cancelled_at(self._key) is not None:
                self._work.end("cancelled")
        except StoreAway:
            # nobody sees it for a while; the work goes on
            return

    def _finalise(self, work: BatchFile, how: Ended) -> None:
        progress = work.progress()
        counts = RequestCounts(total=progress.total, completed=progress.completed, failed=progress.failed)
        record = self._with(
            status="finalizing", finalizing_at=self._record.finalizing_at or self._now(), request_counts=counts
        )
        self._book.note(self._key, record)
        output, errors = self._place("output"), self._place("errors")
        sizes = work.join(output, errors)
        ids = [
            self._file(place, size, kind)
            for place, size, kind in zip((output, errors), sizes, ("output", "error"), strict=True)
        ]
        # one that was cancelled while its files were written is cancelled all the same
        cancelled_at = self._book.cancelled_at(self._key)
        status: Ended = "cancelled" if cancelled_at is not None else how
        ended_at: dict[str, Any] = {f"{status}_at": self._now(), "cancelling_at": cancelled_at}
        self._book.end(self._key, self._with(status=status, output_file_id=ids[0], error_file_id=ids[1], **ended_at))

    def _place(self, kind: str) -> Place:
        return self._files.place(self._key[0], output_id(self._key[1], kind))

    def _file(self, place: Place, size: int, kind: str) -> str | None:
        if not size:
            return None
        name = f"{self._key[1]}_{kind}.jsonl"
        return self._files.add(self._key[0], place, size=size, filename=name, purpose="batch_output").id

    def _with(self, **fields: Any) -> BatchRecord:
        self._record = self._record.model_copy(update=fields)
        return self._record

    def _now(self) -> int:
        return int(self._clock())
