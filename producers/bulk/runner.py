"""
Puts the rows of an input through a queue, with bounded work in flight, and writes what comes out.

It knows neither prompts nor files. Whoever runs something of that kind gives it four things:

- chunks: whatever `read` and `write` can work with, each small;
- `read(chunk)`, the chunk's items in order: documents, faults of rows, and rows that are known
  already (`Kept`);
- a `Task`: `work(document)` is a generator that yields lists of jobs, is sent their results, and
  returns the document's row; `fault(fault)` makes a row of what cannot be worked on;
- `write(chunk, rows)`: makes a chunk's rows durable, in the order of its items. It is called on
  other threads, for several chunks at once, in the order in which they complete.

Jobs have ids that are the same in each run (tasks.py): a run that comes after another one submits
them again, and the queue gives what it has. After `write` they are forgotten there.
"""

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import Generic, TypeVar

from pagemill.bulk_client import BulkClient
from pagemill.errors import (
    BatchNotFound,
    Busy,
    Conflict,
    InvalidJob,
    PagemillError,
    ServerAway,
    ServerFull,
    StoreAway,
)
from pagemill.gathering import Gathered, Gathering
from pagemill.messages import Accepted
from pagemill.schema import Failure, Job, Result, ResultStatus
from producers.bulk.rows import Document, RowFault
from producers.bulk.run_record import RunRecord
from producers.bulk.work import Counts, Kept, Limits, OpenChunk, Step, Task, Work

C = TypeVar("C")
R = TypeVar("R")

# jobs submitted in one go
SLICE = 256

# how long the runner waits for an end before it looks around
TURN_S = 0.25

# rows that wait for others of their chunk are in memory: no more chunks than that are open
MAX_OPEN = 16
WRITERS = 4

# a server or store that is away for longer ends the run
AWAY_S = 600.0

# when all is to end early, jobs that run are waited for so long: there may be no worker that could end them
GRACE_S = 30.0


class Runner(Generic[C, R]):
    """
    One run over some chunks.

    Args:
        name: What the log and the traces call it.
        reopen: Creates the batch of the jobs anew, where the queue has lost it.
        end_late: Called once when the deadline has passed, or at `end_early`, to end what is in the queue.
        on_turn: Called with the counts after each look around; what it raises ends the run.
    """

    def __init__(
        self,
        client: BulkClient,
        task: Task[R],
        read: Callable[[C], Iterable[Document | RowFault | Kept[R]]],
        write: Callable[[C, list[R]], object],
        *,
        name: str = "",
        model: str | None = None,
        limits: Limits | None = None,
        reopen: Callable[[], object] = lambda: None,
        end_late: Callable[[], object] = lambda: None,
        on_turn: Callable[[Counts], object] = lambda _: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._client, self._task, self._read, self._write = client, task, read, write
        self._model, self._limits = model, limits or Limits()
        self._reopen, self._end_late, self._on_turn, self._clock = reopen, end_late, on_turn, clock
        self._stopping = threading.Event()

        # all the mutable state there is
        self.counts = Counts()
        self._record = RunRecord(client.tracer, name, self.counts)
        self._open: list[OpenChunk[C, R]] = []
        self._source: Iterator[tuple[OpenChunk[C, R], Document | RowFault | Kept[R]]] = iter(())
        self._pending: deque[Job] = deque()
        self._steps: dict[str, Step[C, R]] = {}
        self._sent: dict[str, Job] = {}
        self._tokens = 0
        # so many are sent one by one, for one of them was refused
        self._num_alone = 0
        self._slice = SLICE
        self._busy_until = 0.0
        self._sent_when_busy = 0
        self._patience = _Patience(self._stopping, self._record)
        # how what has not ended is to end
        self._over: tuple[ResultStatus, Failure | None] | None = None
        self._told_at: float | None = None
        self._writes: set[Future[None]] = set()

    def stop(self) -> None:
        """Submit no more, write what is complete, and return from `run`; for signal handlers."""
        self._stopping.set()

    def end_early(self, status: ResultStatus, failure: Failure | None = None) -> None:
        """Have all that has no answer yet end like that: `end_late` is called, and nothing submitted any more."""
        self._over = self._over or (status, failure)

    @property
    def stopped(self) -> bool:
        return self._stopping.is_set()

    def run(self, chunks: Iterable[C]) -> Counts:
        """
        Work until all chunks are written, or until `stop`.

        Raises:
            QueueUnavailable, ObjectStoreError: out of reach for ten minutes, or refused; all that
                was written stays, and running again goes on.
            BatchClosed: somebody has sealed or cancelled the batch.
        """
        with self._record.run():
            self._work_on(chunks)
        return self.counts

    def _work_on(self, chunks: Iterable[C]) -> None:
        gathering = self._client.gather(self._model)
        self._source = self._items(iter(chunks))
        with ThreadPoolExecutor(WRITERS, thread_name_prefix="write") as writers:
            more = True
            while not self.stopped:
                more = more and self._fill()
                if not more and not self._open and not self._writes:
                    break
                try:
                    self._submit(gathering)
                    gathered = self._gather(gathering)
                    self._patience.renew()
                except (ServerAway, ServerFull, StoreAway) as error:
                    self._patience.wait(error)
                    continue
                for result in gathered.results:
                    self._end(result)
                for job_id in gathered.lost:
                    self._send_again(job_id)
                idle = not self._sent and not self._pending and not (more and self._may_read())
                self._hand_over(writers, idle=idle)
                self._report()
            self._settle_writes(wait(self._writes).done)
        self._report()

    # reading

    def _items(self, chunks: Iterator[C]) -> Iterator[tuple[OpenChunk[C, R], Document | RowFault | Kept[R]]]:
        for chunk in chunks:
            opened: OpenChunk[C, R] = OpenChunk(chunk)
            self._open.append(opened)
            for item in self._rows_of(chunk):
                yield opened, item
            opened.read_all = True

    def _rows_of(self, chunk: C) -> Iterator[Document | RowFault | Kept[R]]:
        """What `read` gives; where the store goes away in between, from there on when it is back."""
        num_taken, patience = 0, _Patience(self._stopping, self._record)
        while True:
            try:
                for item in islice(iter(self._read(chunk)), num_taken, None):
                    num_taken += 1
                    yield item
                return
            except StoreAway as error:
                patience.wait(error)
                if self.stopped:
                    raise

    def _fill(self) -> bool:
        """Take documents as long as there is room for their jobs; False where there are no more."""
        while self._wants_more() and self._may_read():
            taken = next(self._source, None)
            if taken is None:
                return False
            self._begin(*taken)
        return True

    def _may_read(self) -> bool:
        return len(self._open) + len(self._writes) <= MAX_OPEN

    def _wants_more(self) -> bool:
        num_jobs = len(self._sent) + len(self._pending)
        return len(self._pending) < SLICE and num_jobs < self._limits.jobs and self._has_room()

    def _has_room(self) -> bool:
        """Whether the next job that waits may go into the queue, or else one of unknown size."""
        tokens = self._tokens + (self._pending[0].estimated_tokens() if self._pending else 1)
        return not self._sent or (len(self._sent) < self._limits.jobs and tokens <= self._limits.tokens)

    def _begin(self, home: OpenChunk[C, R], item: Document | RowFault | Kept[R]) -> None:
        place = len(home.rows)
        home.rows.append(None)
        home.num_missing += 1
        if isinstance(item, Kept):
            self._put(home, place, item.row)
        elif isinstance(item, RowFault):
            self._put(home, place, self._task.fault(item))
        else:
            self._advance(self._task.work(item), home, place, None)

    def _advance(self, work: Work[R], home: OpenChunk[C, R], place: int, results: Sequence[Result] | None) -> None:
        try:
            jobs = next(work) if results is None else work.send(results)
        except StopIteration as end:
            self._put(home, place, end.value)
            return
        step = Step(work, home, place, [job.id for job in jobs])
        home.job_ids += step.job_ids
        for job in jobs:
            assert job.id not in self._steps, f"two jobs have the id {job.id}"
            self._steps[job.id] = step
        # what goes on comes before what begins, so that few documents are half done
        if results is None:
            self._pending.extend(jobs)
        else:
            self._pending.extendleft(reversed(jobs))

    def _put(self, home: OpenChunk[C, R], place: int, row: R) -> None:
        home.rows[place] = row
        home.num_missing -= 1
        self.counts.rows += 1

    # submitting

    def _submit(self, gathering: Gathering) -> None:
        """Send what waits, as much as the limits and the queue allow."""
        if self._limits.deadline is not None and self._clock() >= self._limits.deadline:
            self.end_early("expired", Failure(code="deadline_passed", message="the deadline of all had passed"))
        if self._over is not None:
            self._end_rest(*self._over)
        if self._sent_when_busy and 2 * len(self._sent) <= self._sent_when_busy:
            # the server's guess was of when others would make room, and ours have
            self._busy_until, self._sent_when_busy = 0.0, 0
        while self._pending and self._has_room() and time.monotonic() >= self._busy_until and not self.stopped:
            jobs = self._next_jobs()
            try:
                accepted = self._client.submit_many(jobs)
            except Busy as error:
                self._pending.extendleft(reversed(jobs))
                self._heed(error, len(jobs))
            except BatchNotFound:
                self._pending.extendleft(reversed(jobs))
                self._reopen()
            except (InvalidJob, Conflict) as error:
                self._refused(jobs, error)
            except PagemillError:
                self._pending.extendleft(reversed(jobs))
                raise
            else:
                self._slice = min(SLICE, 2 * self._slice)
                self._note(jobs, accepted)
                gathering.add(accepted)

    def _next_jobs(self) -> list[Job]:
        jobs = [self._pending.popleft()]
        if self._num_alone:
            self._num_alone -= 1
            return jobs
        most, tokens = min(self._slice, self._limits.jobs - len(self._sent)), self._tokens + jobs[0].estimated_tokens()
        while self._pending and len(jobs) < most:
            tokens += self._pending[0].estimated_tokens()
            if tokens > self._limits.tokens:
                break
            jobs.append(self._pending.popleft())
        return jobs

    def _heed(self, error: Busy, num_jobs: int) -> None:
        """The queue is full: try with fewer, and where even one is too many, wait as it says."""
        # some of them may have been taken: a repeated submit finds them
        self._slice = max(1, num_jobs // 2)
        if num_jobs == 1:
            # not all producers at once
            self._busy_until = time.monotonic() + error.retry_after_s * random.uniform(1.0, 1.25)
            self._sent_when_busy = len(self._sent)

    def _refused(self, jobs: Sequence[Job], error: InvalidJob | Conflict) -> None:
        if len(jobs) > 1:
            # one by one tells whose it is; a repeated submit is no second job
            self._pending.extendleft(reversed(jobs))
            self._num_alone = len(jobs)
            return
        code = error.code if isinstance(error, InvalidJob) else "invalid_job"
        failure = Failure.model_validate({"code": code, "message": str(error)})
        self._end(_unsent(jobs[0], "failed", failure))

    def _note(self, jobs: Sequence[Job], accepted: Sequence[Accepted]) -> None:
        for job, one in zip(jobs, accepted, strict=True):
            self._sent[job.id] = job
            self._tokens += job.estimated_tokens()
            self.counts.jobs += 1
            self.counts.resubmitted += one.duplicate

    def _send_again(self, job_id: str) -> None:
        if job_id in self._sent:
            self._pending.append(self._taken_back(job_id))

    def _taken_back(self, job_id: str) -> Job:
        job = self._sent.pop(job_id)
        self._tokens -= job.estimated_tokens()
        return job

    def _gather(self, gathering: Gathering) -> Gathered:
        if not self._sent:
            # the queue is full of others' jobs
            self._stopping.wait(max(0.0, min(TURN_S, self._busy_until - time.monotonic())) if self._pending else 0.0)
        return gathering.take(TURN_S if self._sent else 0.0)

    # ending

    def _end(self, result: Result) -> None:
        if self._over is not None and result.status == "cancelled":
            # `end_late` cancels, whatever the reason is
            status, failure = self._over
            result = result.model_copy(update={"status": status, "failure": failure})
        if result.job_id in self._sent:
            self._taken_back(result.job_id)
        elif result.job_id not in self._steps:
            # it was not waited for any more
            return
        self.counts.completion_tokens += result.usage.completion_tokens
        step = self._steps.pop(result.job_id)
        step.results[result.job_id] = result
        if len(step.results) == len(step.job_ids):
            results = [step.results[job_id] for job_id in step.job_ids]
            self._advance(step.work, step.home, step.place, results)

    def _end_rest(self, status: ResultStatus, failure: Failure | None) -> None:
        """End what is in the queue, and what waits to be sent."""
        if self._told_at is None:
            self._end_late()
            self._told_at = time.monotonic()
        if time.monotonic() - self._told_at > GRACE_S:
            self._pending.extend(self._sent.values())
        while self._pending:
            # an earlier run may have submitted some, and have been killed before it wrote their answers
            waiting = list(islice(self._pending, SLICE))
            found = {one.job_id: one for one in self._client.results_of((job.id for job in waiting), self._model)}
            for _ in waiting:
                self._pending.popleft()
            # what is found may lead to jobs of the next level: these come first then
            for job in waiting:
                self._end(found.get(job.id) or _unsent(job, status, failure))

    def _hand_over(self, writers: ThreadPoolExecutor, *, idle: bool) -> None:
        """Have complete chunks written; wait for that where there is nothing else to do."""
        for opened in [one for one in self._open if one.complete]:
            self._open.remove(opened)
            self._writes.add(writers.submit(self._write_down, opened))
        if self._writes:
            done = wait(self._writes, TURN_S if idle else 0.0, FIRST_COMPLETED).done
            self._settle_writes(done)

    def _settle_writes(self, done: Iterable[Future[None]]) -> None:
        for future in done:
            self._writes.discard(future)
            future.result()
            self.counts.chunks += 1

    def _write_down(self, opened: OpenChunk[C, R]) -> None:
        rows = [row for row in opened.rows if row is not None]
        patience = _Patience(self._stopping, self._record)
        while True:
            try:
                self._write(opened.chunk, rows)
                break
            except StoreAway as error:
                patience.wait(error)
                if self.stopped:
                    raise
        self._record.chunk(opened.began_ns, time.time_ns(), len(rows), len(opened.job_ids))
        try:
            self._client.forget_many(opened.job_ids, self._model)
        except PagemillError:
            # what is written is written; the rest goes by itself, when its time is over
            return

    def _report(self) -> None:
        self.counts.in_flight = len(self._sent)
        self.counts.busy = time.monotonic() < self._busy_until
        self._on_turn(self.counts)


class _Patience:
    """Waits for a server or a store that is away, for so long and no longer; a stop wakes it."""

    def __init__(self, stopping: threading.Event, record: RunRecord) -> None:
        self._stopping = stopping
        self._record = record
        self._since: float | None = None

    def renew(self) -> None:
        self._since = None

    def wait(self, error: PagemillError) -> None:
        """
        Raises:
            PagemillError: the error, where it has lasted for too long.
        """
        now = time.monotonic()
        self._since = self._since or now
        if now - self._since > AWAY_S:
            raise error
        self._record.away(error)
        self._stopping.wait(random.uniform(0.5, 1.0) * min(5.0, 0.2 + now - self._since))


def _unsent(job: Job, status: ResultStatus, failure: Failure | None) -> Result:
    return Result(job_id=job.id, status=status, failure=failure)
