"""
A bulk job from its plan to its manifest: what `run`, `resume` and the nightly task do.

The order of things is what makes it safe to be killed anywhere: the plan first; of each chunk its
file, whole, and only then are its jobs forgotten in the queue; the batch is sealed when all chunks
are there; the manifest comes last. Whoever comes again does what is not there yet.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from threading import Lock
from typing import Any

from pagemill.bulk_client import BulkClient
from pagemill.errors import BatchNotFound
from pagemill.object_store import ObjectStore
from producers.bulk.chunks import Chunk
from producers.bulk.decoders import read_rows
from producers.bulk.errors import BulkError, Interrupted
from producers.bulk.io_errors import OutputError
from producers.bulk.lease import OutputLease
from producers.bulk.locations import open_folder
from producers.bulk.manifest import MANIFEST_NAME, Manifest, commit_manifest, read_manifest
from producers.bulk.planner import (
    PLAN,
    Plan,
    counter_of,
    find_or_make,
    read_chunks,
    read_plan,
    settled,
    source_of,
    write_plan,
)
from producers.bulk.report import Summary, details_of, summarise
from producers.bulk.rows import Document, OutputRow, RowFault
from producers.bulk.runner import Runner
from producers.bulk.shards import Shard, list_shards, read_shard, shard_name, write_shard
from producers.bulk.spec import BulkSpec
from producers.bulk.tasks import BulkTask
from producers.bulk.work import Counts, Kept, Limits

BulkRunner = Runner[Chunk, OutputRow]


@dataclass(slots=True)
class Hooks:
    """
    What whoever runs a job may want to know.

    Args:
        started: Takes the runner, whose `stop` interrupts it, and the rows that are left and all.
        turned: Takes the counts, several times a second.
    """

    started: Callable[[BulkRunner, int, int], object] = lambda *_: None
    turned: Callable[[Counts], object] = lambda _: None


@dataclass(slots=True)
class _Written:
    """Chunks that this process wrote."""

    shards: dict[int, Shard] = field(default_factory=dict)
    errors: dict[int, Counter[str]] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)


def run_job(spec: BulkSpec, client: BulkClient, hooks: Hooks | None = None) -> Summary:
    """
    Do a job, or what is left of it; one that is done gives its figures at once.

    Raises:
        BulkError: it cannot start, or was interrupted; Occupied where another process does it.
        PagemillError: the queue or a store cannot be used.
    """
    spec = settled(spec)
    store = open_folder(spec.output)
    with OutputLease(client, store.url("")) as lease:
        plan = find_or_make(spec, store, client)
        return BulkJob(plan, store, client, lease, hooks or Hooks()).finish()


def resume_job(
    output: str,
    client: BulkClient,
    hooks: Hooks | None = None,
    *,
    failed: bool = False,
    changes: Mapping[str, Any] | None = None,
) -> Summary:
    """
    Go on with the job whose plan is in an output.

    Args:
        failed: Then run the rows again that have no answer.
        changes: Fields of the spec that may change between runs: FREE_FIELDS.

    Raises:
        BulkError: as `run_job`; or there is no plan.
    """
    store = open_folder(output)
    with OutputLease(client, store.url("")) as lease:
        plan = read_plan(store)
        if plan is None:
            raise BulkError(f"{output} has no {PLAN}: there is nothing to resume; `run` begins a job")
        plan = plan.model_copy(update={"spec": plan.spec.changed(changes or {})})
        job = BulkJob(plan, store, client, lease, hooks or Hooks())
        summary = job.finish()
        return job.rerun() if failed and summary.num_failed else summary


class BulkJob:
    """One job with its plan; the output is this process's alone meanwhile."""

    def __init__(self, plan: Plan, store: ObjectStore, client: BulkClient, lease: OutputLease, hooks: Hooks) -> None:
        self._plan, self._store, self._client, self._lease, self._hooks = plan, store, client, lease, hooks
        self._spec = plan.spec
        self._source = source_of(plan.spec)
        self._batch = ""
        self._written = _Written()
        # chunks with rows that run again
        self._failed: Set[int] = frozenset()

    def finish(self) -> Summary:
        """
        Work until the manifest is there.

        Raises:
            Interrupted: the runner was stopped.
        """
        manifest = read_manifest(self._store)
        if manifest is not None and manifest.details["generation"] == self._plan.generation:
            return summarise(manifest)
        started_at = datetime.now(UTC)
        if manifest is not None:
            # some shards are not as it says any more
            self._store.delete(self._store.url(MANIFEST_NAME))
        done = {index for index, _ in list_shards(self._store, self._spec.output_format)}
        rerun = self._plan.generation > 0
        self._failed = self._chunks_with_errors() if rerun else frozenset()
        if len(done - self._failed) < self._plan.num_chunks:
            self._work(done - self._failed)
        return self._commit(started_at if rerun else self._plan.created_at)

    def rerun(self) -> Summary:
        """Run the rows again that have no answer."""
        # before the manifest goes: whoever comes after a crash here knows that a rerun has begun
        self._plan = write_plan(self._store, self._plan.model_copy(update={"generation": self._plan.generation + 1}))
        self._written = _Written()
        return self.finish()

    def _work(self, done: Set[int]) -> None:
        spec = self._spec
        self._batch = self._open_batch()
        task = BulkTask(
            spec,
            counter=counter_of(self._plan, self._store),
            batch=self._batch,
            context_tokens=self._plan.context_tokens,
            generation=self._plan.generation,
        )
        deadline = spec.deadline.timestamp() if spec.deadline else None
        runner = Runner(
            self._client,
            task,
            self._read,
            self._write,
            name=spec.name,
            model=spec.model,
            limits=Limits(spec.max_jobs, spec.max_tokens, deadline),
            reopen=lambda: self._create(self._batch),
            end_late=lambda: self._client.end_batch(self._batch),
            on_turn=self._turned,
        )
        left = sum(chunk.num_rows for chunk in read_chunks(self._store) if chunk.index not in done)
        self._hooks.started(runner, left, self._plan.num_rows)
        runner.run(chunk for chunk in read_chunks(self._store) if chunk.index not in done)
        if runner.stopped:
            raise Interrupted(f"stopped; go on with: pagemill bulk resume '{spec.output}'")

    def _turned(self, counts: Counts) -> None:
        self._lease.check()
        self._hooks.turned(counts)

    def _open_batch(self) -> str:
        """The first of its batches that takes jobs: one that was cancelled or sealed has a successor."""
        number = 0
        while True:
            batch_id = f"{self._plan.batch_base}-{number}"
            if self._create(batch_id) == "open":
                return batch_id
            number += 1

    def _create(self, batch_id: str) -> str:
        spec = self._spec
        metadata = {"bulk": spec.name, "output": spec.output}
        return self._client.create_batch(
            batch_id, model=spec.model, tenant=spec.tenant, result_ttl_s=spec.result_ttl_s, metadata=metadata
        ).state

    def _read(self, chunk: Chunk) -> Iterator[Document | RowFault | Kept[OutputRow]]:
        items = islice(self._source.read(chunk), chunk.num_rows)
        if chunk.index not in self._failed:
            yield from items
            return
        for item, row in zip(items, self._rows_before(chunk), strict=True):
            yield Kept(row) if row.status == "done" else item

    def _rows_before(self, chunk: Chunk) -> Iterator[OutputRow]:
        form = self._spec.output_format
        return read_rows(self._store, self._store.url(shard_name(chunk.index, form)), form)

    def _write(self, chunk: Chunk, rows: list[OutputRow]) -> None:
        if len(rows) != chunk.num_rows:
            raise OutputError(f"chunk {chunk.index} has {len(rows):,} rows and was planned with {chunk.num_rows:,}")
        form, again = self._spec.output_format, chunk.index in self._failed
        if again:
            # what was tried before was paid for, too
            before = self._rows_before(chunk)
            rows = [row if old.status == "done" else row.after(old) for row, old in zip(rows, before, strict=True)]
        shard = write_shard(self._store, chunk.index, rows, format=form, errors=True, replace=again)
        errors = Counter(row.error.code for row in rows if row.error is not None)
        with self._written.lock:
            self._written.shards[chunk.index], self._written.errors[chunk.index] = shard, errors

    def _chunks_with_errors(self) -> Set[int]:
        return {index for index, _ in list_shards(self._store, self._spec.output_format, "errors")}

    def _commit(self, started_at: datetime) -> Summary:
        self._seal()
        form, written = self._spec.output_format, self._written
        errors: Counter[str] = Counter()
        for index in self._chunks_with_errors():
            errors += written.errors[index] if index in written.errors else self._errors_of(index)
        shards = (
            written.shards.get(index) or read_shard(self._store, index, form)
            for index, _ in list_shards(self._store, form)
        )
        manifest = Manifest.of(
            shards,
            source=self._spec.input,
            source_fingerprint=self._plan.source_fingerprint,
            config_fingerprint=self._plan.config_fingerprint,
            format=form,
            started_at=started_at,
            ended_at=datetime.now(UTC),
            details=details_of(self._spec, errors, self._plan.generation),
        )
        if len(manifest.shards) != self._plan.num_chunks:
            raise OutputError(f"{self._spec.output} has {len(manifest.shards):,} of {self._plan.num_chunks:,} shards")
        return summarise(commit_manifest(self._store, manifest))

    def _errors_of(self, index: int) -> Counter[str]:
        form = self._spec.output_format
        url = self._store.url(shard_name(index, form, "errors"))
        return Counter(row.error.code for row in read_rows(self._store, url, form) if row.error is not None)

    def _seal(self) -> None:
        batch_id = self._batch or self._open_batch_of_before()
        if batch_id:
            try:
                self._client.seal_batch(batch_id)
            except BatchNotFound:
                # it was flushed, or has expired: nobody waits for it
                return

    def _open_batch_of_before(self) -> str:
        """The batch that a run left open which was killed after its last chunk."""
        number = 0
        while True:
            batch_id = f"{self._plan.batch_base}-{number}"
            try:
                status = self._client.batch_status(batch_id)
            except BatchNotFound:
                return ""
            if status.state == "open":
                return batch_id
            number += 1
