"""Submit jobs and get their results: the blocking client."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pagemill import calls, dead_letters
from pagemill.batch_verbs import BatchVerbs
from pagemill.bulk_verbs import BulkVerbs
from pagemill.calls import Answer, in_chunks
from pagemill.client_core import (
    CHUNK,
    POLL_S,
    Awaited,
    Deadline,
    Ready,
    TextCursor,
    accepted_or_raise,
    answer_of,
    busy_places,
    discard_unused,
    in_doubt,
    in_order,
    is_large,
    not_found,
    offload,
    prepare,
    read_result,
    reference_in,
    submit_calls,
)
from pagemill.dead_letters import DeadLetter, Reading
from pagemill.errors import ObjectStoreError, QueueUnavailable
from pagemill.keys import QueueKeys
from pagemill.messages import TERMINAL_STATES, Accepted, JobState, JobStatus, QueueStats, TokenDelta
from pagemill.schema import Job, Result
from pagemill.scripts import run, run_many, translated
from pagemill.shares import ShareVerbs


class Client(BatchVerbs, BulkVerbs, ShareVerbs):
    """
    A producer's door to the queue.

        with Client() as client:
            job = client.submit(prompt="Why is the sky blue?")
            print(client.text(job.job_id))

    What is not given comes from PAGEMILL_* and pagemill.toml (ClientSettings). Nothing is opened
    before the first call. Threads may share a client; a Job object, an id or a key can
    be submitted again and stays one job.
    All methods raise QueueUnavailable where the server cannot be reached, and those that take a
    job id raise JobNotFound.
    """

    def submit(self, job: Job | None = None, **fields: Any) -> Accepted:
        """
        Put a job, or the fields of one, into the queue, once.

        Repeating it with the same Job object, the same id or the same idempotency key gives the
        first one's state. Fields without either are a new job in each call.

        Raises:
            InvalidJob: the job cannot be served; `code` says why.
            UnknownModel: no worker serves its model.
            Conflict: the id or key is another job's.
            BatchNotFound, BatchClosed: its batch is unknown, or takes no more jobs.
            Busy: the queue takes no more for now.
            ObjectStoreError: its payload is large and cannot be stored.
            QueueUnavailable: it may be in the queue or not; `job_id` is its id, which makes
                submitting the same fields again safe.
        """
        made = Job.build(**fields) if job is None else job
        ready = self._prepare_all([made])
        try:
            [accepted] = self._submit_ready(ready, patience=0.0)
        except QueueUnavailable as error:
            raise in_doubt(error, made.id) from error
        return accepted

    def submit_many(self, jobs: Iterable[Job], *, wait_s: float = 0.0) -> list[Accepted]:
        """
        Put many jobs into the queue, a few hundred to a round trip; answers in order.

        The iterable is read as it is sent. After an error, repeating the whole call with
        the same Job objects is safe: what was accepted counts as duplicate.

        Args:
            wait_s: How long in all to wait where the queue is busy, before Busy is raised.

        Raises:
            As `submit`, for the first job that was refused; others of its chunk were sent.
        """
        accepted: list[Accepted] = []
        patience = time.monotonic() + wait_s
        for chunk in in_chunks(jobs, CHUNK):
            accepted += self._submit_ready(self._prepare_all(chunk), patience)
        return accepted

    def _prepare_all(self, jobs: Sequence[Job]) -> list[Ready]:
        self._learn_models(job.model for job in jobs)
        return [self._prepare(job) for job in jobs]

    def _submit_ready(self, ready: Sequence[Ready], patience: float) -> list[Accepted]:
        answers = self._send(ready)
        while True:
            places, pause_s = busy_places(answers, patience)
            if not places:
                break
            time.sleep(pause_s)
            for place, answer in zip(places, self._send([ready[place] for place in places]), strict=True):
                answers[place] = answer
        discard_unused(ready, answers, self._store)
        accepted = accepted_or_raise(answers)
        for (keys, _), one in zip(ready, accepted, strict=True):
            self._directory.settle(one.job_id, keys)
        return accepted

    def _prepare(self, job: Job) -> Ready:
        keys = self._directory.route(job.model)
        submission = prepare(job)
        if self._store is not None and is_large(submission):
            submission = offload(submission, self._store, keys.queue)
        return keys, submission

    def _send(self, ready: Sequence[Ready]) -> list[Answer]:
        parts = submit_calls(ready, self._max_queued_tokens)
        replies = run_many(self._redis, [call for _, call in parts])
        return in_order((places for places, _ in parts), replies)

    def result(self, job_id: str, wait_s: float | None = None) -> Result:
        """
        How the job ended; waits for it, without limit where `wait_s` is None.

        Raises:
            WaitTimeout: it has not ended.
            ObjectStoreError: the result is in a store that cannot be read.
        """
        keys = self._locate(job_id)
        found = self._look(keys, job_id)
        if found is not None:
            return read_result(found, self._store)
        deadline = Deadline(wait_s, f"job {job_id} has not ended")
        deadline.left_s()
        with translated(), self._redis.pubsub(ignore_subscribe_messages=True) as channel:
            channel.subscribe(keys.channel(job_id))
            # subscribed first, so that an end between look and wait is heard
            while (found := self._look(keys, job_id)) is None:
                channel.get_message(timeout=deadline.left_s())
        return read_result(found, self._store)

    def text(self, job_id: str, wait_s: float | None = None) -> str:
        """
        The first answer's text; waits as `result`.

        Raises:
            JobFailed: the job ended without an answer.
        """
        return answer_of(self.result(job_id, wait_s))

    def stream(
        self, job_id: str, *, offsets: Mapping[int, int] | None = None, wait_s: float | None = None
    ) -> Iterator[TokenDelta]:
        """
        The answers' text as it is generated, each character once; ends with the job.

        A job that was not submitted with `stream=True` gives its text when it has ended.

        Args:
            offsets: Characters of each answer that the caller has already.
            wait_s: Most seconds for all of it.

        Raises:
            WaitTimeout: the job has not ended by then.
        """
        keys = self._locate(job_id)
        cursor = TextCursor(offsets)
        deadline = Deadline(wait_s, f"job {job_id} has not ended")
        while True:
            ended = self._look(keys, job_id)
            entries = self._read(keys.tokens(job_id), cursor.entry_id, 0.0 if ended else deadline.left_s())
            yield from cursor.feed(entries)
            if ended and (cursor.ended or not entries):
                yield from cursor.rest(read_result(ended, self._store))
                return

    def finished(self, job_ids: Iterable[str] | None = None, *, wait_s: float | None = None) -> Iterator[Result]:
        """
        Results in the order in which jobs end; those that have ended come first.

        Args:
            job_ids: The jobs to wait for, each given once; None gives whatever ends in this
                client's queue from now on, and never ends by itself.
            wait_s: Most seconds for all of it.

        Raises:
            WaitTimeout: some have not ended by then.
        """
        awaited = self._awaited(job_ids)
        deadline = Deadline(wait_s, "some jobs have not ended")
        look_at = 0.0
        while awaited := [one for one in awaited if not one.over]:
            if time.monotonic() >= look_at:
                # first of all what has ended already; later on for events that were trimmed
                for one in awaited:
                    yield from self._take(one, sorted(one.job_ids or ()))
                look_at = time.monotonic() + 10 * POLL_S
            for one in awaited:
                left_s = deadline.left_s() if not one.over else 0.0
                entries = self._read(one.keys.events, one.entry_id, left_s / len(awaited))
                yield from self._take(one, one.ended(entries))

    def _awaited(self, job_ids: Iterable[str] | None) -> list[Awaited]:
        if job_ids is None:
            groups: dict[QueueKeys, set[str] | None] = {self._directory.own: None}
        else:
            groups = {}
            for chunk in in_chunks(job_ids, CHUNK):
                for job_id in chunk:
                    wanted = groups.setdefault(self._locate(job_id), set())
                    if wanted is not None:
                        wanted.add(job_id)
        # where the events are now: read before the first look, so that none is missed
        return [Awaited(keys, wanted, self._last_event(keys)) for keys, wanted in groups.items()]

    def _take(self, one: Awaited, job_ids: Sequence[str]) -> Iterator[Result]:
        for chunk in in_chunks(job_ids, CHUNK):
            for job_id, record, known in zip(chunk, *self._look_many(one.keys, chunk), strict=True):
                if record is not None:
                    if one.job_ids is not None:
                        one.job_ids.discard(job_id)
                    yield read_result(record, self._store)
                elif not known and one.job_ids is not None:
                    raise not_found(job_id)

    def status(self, job_id: str) -> JobStatus:
        """Where the job stands."""
        keys = self._locate(job_id)
        with translated():
            values: Any = self._redis.execute_command("HMGET", keys.job(job_id), *calls.STATUS_FIELDS)
        status = calls.read_status(keys.queue, job_id, values)
        if status is None:
            raise not_found(job_id)
        return status

    def cancel(self, job_id: str) -> JobState:
        """
        End the job; returns its state after the call.

        "running" means that its worker has been asked and ends it within a third of a lease; a
        job that has ended stays as it is.
        """
        state = run(self._redis, calls.cancel(self._locate(job_id), job_id))
        if state is None:
            raise not_found(job_id)
        return state

    def forget(self, job_id: str) -> bool:
        """
        Drop the result and all else that is kept of a job; False where it has not ended.

        Raises:
            ObjectStoreError: its result is in a store that this client cannot delete from;
                nothing is dropped.
        """
        keys = self._locate(job_id)
        [record] = self._pipeline(("GET", keys.result(job_id)))
        url = reference_in(record or b"")
        if url is not None:
            if self._store is None:
                raise ObjectStoreError(f"the result is at {url}: give the client that object_store")
            # before its record, so that a call that fails can be repeated
            self._store.delete(url)
        state = run(self._redis, calls.forget(keys, job_id))
        if state is None and record is None:
            raise not_found(job_id)
        # the call may have been made twice, where its first reply was lost
        return state is None or state in TERMINAL_STATES

    def stats(self) -> QueueStats:
        """Counters of this client's queue."""
        return calls.read_stats(*self._pipeline(*calls.stats_commands(self._directory.own)))

    def dead_letters(self, limit: int = 100, after: str = "-") -> list[DeadLetter]:
        """
        Jobs of this client's queue that were given up, with their payloads; oldest first.

        Args:
            after: The `entry_id` behind which to begin, so that pages can follow one another.
        """
        reading = Reading(self._directory.own, limit, after)
        while command := reading.next_command:
            [entries] = self._pipeline(command)
            reading.feed(entries)
        return reading.letters

    def dead_letter(self, entry_id: str) -> DeadLetter:
        """
        One of them.

        Raises:
            JobNotFound: there is no such letter (any more).
        """
        [entries] = self._pipeline(dead_letters.one_command(self._directory.own, entry_id))
        return dead_letters.read_one(entry_id, entries)

    def requeue_dead(self, entry_id: str) -> Accepted:
        """
        Run a dead letter's job anew under its id, ahead of its lane; its failed result goes.

        Nothing happens where the job was submitted again meanwhile, or the letter was requeued within the
        last hour: the answer is then a duplicate.
        A raw entry that was refused is one again, under the same id, and is judged anew.

        Raises:
            JobNotFound: there is no such letter (any more).
            InvalidJob: it never was a job.
        """
        return run(self._redis, dead_letters.requeue(self._directory.own, entry_id))

    def purge_dead(
        self, entry_ids: Iterable[str] = (), *, before_ms: int | None = None, older_than_s: float | None = None
    ) -> int:
        """
        Delete dead letters for good: these, and those given up before a time; returns how many.

        Args:
            before_ms: A time by the server's clock, as in `DeadLetter.at_ms`.
            older_than_s: Before now by the server's clock; 0 takes all that are there.

        Raises:
            JobNotFound: one of the ids can be no letter's; nothing was deleted. One that is gone is no error.
        """
        keys = self._directory.own
        purged = sum(run_many(self._redis, dead_letters.purge(keys, entry_ids)))
        if older_than_s is not None:
            [now] = self._pipeline(("TIME",))
            before_ms = max(before_ms or 0, dead_letters.cutoff_ms(now, older_than_s))
        while before_ms is not None:
            num_gone = run(self._redis, dead_letters.purge_oldest(keys, before_ms))
            purged += num_gone
            if not num_gone:
                break
        return purged

    def workers(self) -> dict[str, dict[str, str]]:
        """What the living workers of this client's queue say of themselves, by worker id."""
        keys = self._directory.own
        [names] = self._pipeline(("ZRANGE", keys.workers, 0, -1))
        ids = [name.decode() for name in names]
        replies = self._pipeline(*(("HGETALL", keys.worker(worker_id)) for worker_id in ids))
        return calls.read_workers(ids, replies)

    def _locate(self, job_id: str) -> QueueKeys:
        return self._seek(job_id, lambda keys: keys.job(job_id))

    def _look(self, keys: QueueKeys, job_id: str) -> bytes | None:
        [record], [known] = self._look_many(keys, [job_id])
        if record is None and not known:
            raise not_found(job_id)
        return record

    def _look_many(self, keys: QueueKeys, job_ids: Sequence[str]) -> tuple[list[bytes | None], list[int]]:
        # the job first: one that ends in between then shows its result
        known = (("EXISTS", keys.job(job_id)) for job_id in job_ids)
        records = (("GET", keys.result(job_id)) for job_id in job_ids)
        replies = self._pipeline(*known, *records)
        return replies[len(job_ids) :], replies[: len(job_ids)]

    def _last_event(self, keys: QueueKeys) -> str:
        [entries] = self._pipeline(("XREVRANGE", keys.events, "+", "-", "COUNT", 1))
        return entries[0][0].decode() if entries else "0-0"

    def _read(self, stream: str, after: str, block_s: float) -> list[Any]:
        block = ("BLOCK", max(1, round(block_s * 1000))) if block_s > 0 else ()
        with translated():
            reply: Any = self._redis.execute_command("XREAD", "COUNT", 512, *block, "STREAMS", stream, after)
        return reply[0][1] if reply else []
