"""
One batch file from its plan to its two files: what the command line and the API's batches run.

As with bulk jobs (producers/bulk/jobs.py), the order of things makes it safe to be killed anywhere:
the plan first; of each chunk its part, whole, and only then are its jobs forgotten in the queue; the
parts are joined when all of them are there.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pagemill.bulk_client import BulkClient
from pagemill.errors import BatchNotFound, ObjectNotFound
from pagemill.object_store import ObjectStore
from pagemill.schema import Failure
from producers.batch_file.parts import HEAD_BYTES, LineEnd, copy_lines, list_parts, read_head, write_part
from producers.batch_file.plan import Input, Order, Plan, find_or_make
from producers.batch_file.tasks import LineTask, Tally, terms_of
from producers.bulk.chunks import Chunk
from producers.bulk.errors import Interrupted
from producers.bulk.io_errors import OutputError
from producers.bulk.planner import read_chunks
from producers.bulk.runner import Runner
from producers.bulk.work import Counts, Limits

Ended = Literal["completed", "expired", "cancelled"]
Early = Literal["expired", "cancelled"]

# how a batch is to end that ends early: whoever goes on with it knows
_OVER = "over"

_LATE = Failure(code="deadline_passed", message="the batch's time was over before this request had ended")


@dataclass(frozen=True, slots=True)
class Progress:
    """Lines of the input that have ended, and the tokens of answers that came in this run."""

    total: int
    completed: int
    failed: int
    completion_tokens: int = 0
    busy: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Where an object is written."""

    store: ObjectStore
    name: str

    @property
    def url(self) -> str:
        return self.store.url(self.name)


class BatchFile:
    """
    The work on one batch file; the folder is this process's alone meanwhile.

    Args:
        folder: Of the plan and the parts.
        on_turn: Called with how far it is, several times a second; what it raises ends the run, and it may
            call `stop` or `end`.
    """

    def __init__(
        self,
        order: Order,
        folder: ObjectStore,
        client: BulkClient,
        on_turn: Callable[[Progress], object] = lambda _: None,
    ) -> None:
        self._order, self._folder, self._client, self._on_turn = order, folder, client, on_turn
        self.input = Input(order)

        # all the mutable state there is
        self._tally = Tally()
        self._early: Early | None = None
        self._stopping = False
        self._batch = ""
        self._plan: Plan | None = None
        self._runner: Runner[Chunk, LineEnd] | None = None

    @property
    def plan(self) -> Plan:
        """
        What is to be done; read or made at the first call.

        Raises:
            Rejected, BatchFileError, SourceError, ObjectStoreError: as `find_or_make`.
        """
        if self._plan is None:
            self._plan = find_or_make(self._order, self.input, self._folder, self._client)
        return self._plan

    def stop(self) -> None:
        """Let `run` return as soon as what is complete is written; it raises Interrupted then."""
        self._stopping = True
        if self._runner is not None:
            self._runner.stop()

    @property
    def stopped(self) -> bool:
        return self._stopping

    def end(self, how: Early) -> None:
        """Give up on what has no answer yet; `run` goes on until that is written down."""
        self._early = self._early or how
        if self._runner is not None:
            self._runner.end_early(self._early, _LATE if self._early == "expired" else None)

    def run(self) -> Ended:
        """
        Work until all parts are there; how the whole has ended.

        Raises:
            Rejected, BatchFileError: it cannot be run; Interrupted after `stop`.
            PagemillError: the queue or a store cannot be used.
        """
        plan = self.plan
        done: set[int] = set()
        for index, entry in list_parts(self._folder):
            head = read_head(self._folder, entry)
            self._tally.completed += head.completed
            self._tally.failed += head.failed
            done.add(index)
        self._early = self._early or self._read_over()
        if len(done) < plan.num_chunks:
            self._work(done)
        self._seal()
        return self._early or "completed"

    def progress(self) -> Progress:
        return Progress(self.plan.num_rows, self._tally.completed, self._tally.failed)

    def join(self, output: Place, errors: Place) -> tuple[int, int]:
        """
        Write the file of the output, and that of the errors, each whole or not at all.

        Returns:
            The bytes of both; nothing is written of one that would have none.

        Raises:
            OutputError: parts are missing.
        """
        entries = sorted(list_parts(self._folder))
        if [index for index, _ in entries] != list(range(self.plan.num_chunks)):
            raise OutputError(f"{self._folder} has {len(entries):,} of {self.plan.num_chunks:,} parts")
        parts = [entry for _, entry in entries]
        heads = [read_head(self._folder, part) for part in parts]
        num_errors = sum(head.failed for head in heads)
        if num_errors < self.plan.num_rows:
            with output.store.open_writer(output.name) as writer:
                copy_lines(self._folder, parts, "output", writer)
        if num_errors:
            with errors.store.open_writer(errors.name) as writer:
                copy_lines(self._folder, parts, "errors", writer)
        output_bytes = sum(head.output_bytes for head in heads)
        return output_bytes, sum(part.size for part in parts) - output_bytes - HEAD_BYTES * len(parts)

    def _work(self, done: set[int]) -> None:
        order, plan = self._order, self.plan
        self._batch = f"{self._base}-0" if self._early else self._open_batch()
        terms = terms_of(order.tenant, self._batch, plan.context_tokens)
        task = LineTask(plan.name, plan.endpoint, plan.model, terms, self._tally)
        self._runner = Runner(
            self._client,
            task,
            self.input.source().read,
            self._write,
            name=plan.name,
            model=plan.model,
            limits=Limits(order.max_jobs, order.max_tokens),
            reopen=lambda: self._create(self._batch),
            end_late=self._end_late,
            on_turn=self._turned,
        )
        if self._early is not None:
            self.end(self._early)
        if self._stopping:
            self._runner.stop()
        self._runner.run(chunk for chunk in read_chunks(self._folder) if chunk.index not in done)
        if self._runner.stopped:
            raise Interrupted("stopped; the same command goes on with it")

    def _write(self, chunk: Chunk, ends: list[LineEnd]) -> None:
        if len(ends) != chunk.num_rows:
            raise OutputError(f"chunk {chunk.index} has {len(ends):,} rows and was planned with {chunk.num_rows:,}")
        write_part(self._folder, chunk.index, ends)

    def _turned(self, counts: Counts) -> None:
        if self._order.deadline is not None and time.time() >= self._order.deadline:
            self.end("expired")
        tally = self._tally
        self._on_turn(
            Progress(self.plan.num_rows, tally.completed, tally.failed, counts.completion_tokens, counts.busy)
        )

    def _end_late(self) -> None:
        assert self._early is not None
        self._folder.put(_OVER, self._early.encode())
        self._client.end_batch(self._batch)

    def _read_over(self) -> Early | None:
        try:
            word = self._folder.get(self._folder.url(_OVER))
        except ObjectNotFound:
            return None
        return "expired" if word == b"expired" else "cancelled"

    @property
    def _base(self) -> str:
        return f"file-{self.plan.name}"

    def _open_batch(self) -> str:
        """The first of its batches that takes jobs: one that somebody cancelled has a successor."""
        number = 0
        while self._create(f"{self._base}-{number}") != "open":
            number += 1
        return f"{self._base}-{number}"

    def _create(self, batch_id: str) -> str:
        plan = self.plan
        return self._client.create_batch(
            batch_id,
            model=plan.model,
            tenant=self._order.tenant,
            result_ttl_s=2 * 86400,
            metadata={"batch_file": plan.name},
        ).state

    def _seal(self) -> None:
        try:
            self._client.seal_batch(self._batch or f"{self._base}-0")
        except BatchNotFound:
            return
