"""Submit jobs and get their results: the asyncio client, verb for verb as pagemill/client.py."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any

from pagemill import calls
from pagemill.async_batch_verbs import AsyncBatchVerbs
from pagemill.calls import Answer, in_chunks
from pagemill.client_core import (
    CHUNK,
    SHARED_POLL_S,
    Awaited,
    Deadline,
    Outage,
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
from pagemill.dead_verbs import AsyncDeadVerbs
from pagemill.errors import ObjectStoreError, QueueUnavailable
from pagemill.keys import QueueKeys
from pagemill.messages import TERMINAL_STATES, Accepted, JobState, JobStatus, QueueStats, TokenDelta
from pagemill.schema import Job, Result
from pagemill.scripts import translated
from pagemill.shares import AsyncShareVerbs
from pagemill.trace_context import TraceContext


class AsyncClient(AsyncBatchVerbs, AsyncDeadVerbs, AsyncShareVerbs):
    """
    As Client, for one event loop.

        async with AsyncClient() as client:
            job = await client.submit(prompt="Why is the sky blue?")
            print(await client.text(job.job_id))

    The object store is asked on threads, so that the loop goes on meanwhile.
    """

    async def submit(self, job: Job | None = None, *, wait_s: float = 0.0, **fields: Any) -> Accepted:
        """
        Put a job, or the fields of one, into the queue, once.

        Repeating it with the same Job object, the same id or the same idempotency key gives the
        first one's state. Fields without either are a new job in each call.

        Args:
            fields: As those of pagemill.schema.Job.
            wait_s: Seconds to wait where the queue is busy or its server away, before that is raised.

        Raises:
            InvalidJob: the job cannot be served; `code` says why.
            UnknownModel: no worker serves its model.
            Conflict: the id or key is another job's.
            BatchNotFound, BatchClosed: its batch is unknown, or takes no more jobs.
            Busy: the queue takes no more for now; `reason` says what is full, `retry_after_s` for how long.
            ObjectStoreError: its payload is large and cannot be stored.
            QueueUnavailable: it may be in the queue or not; `job_id` is its id, which makes
                submitting the same fields again safe.
        """
        patience = time.monotonic() + wait_s
        made = Job.build(**fields) if job is None else job
        with self._sending() as sending:
            ready = await self._prepare_all([made], patience, self._context_of(sending))
            try:
                [accepted] = await self._submit_ready(ready, patience)
            except QueueUnavailable as error:
                raise in_doubt(error, made.id) from error
            if sending is not None:
                sending.sent([accepted], ready[0][0].queue)
        return accepted

    async def submit_many(self, jobs: Iterable[Job], *, wait_s: float = 0.0) -> list[Accepted]:
        """
        Put many jobs into the queue, a few hundred to a round trip; answers in order.

        The iterable is read as it is sent. After an error, repeating the whole call with
        the same Job objects is safe: what was accepted counts as duplicate.

        Args:
            wait_s: Seconds in all to wait where the queue is busy or its server away, before that is raised.

        Raises:
            As `submit`, for the first job that was refused; others of its chunk were sent.
        """
        accepted: list[Accepted] = []
        patience = time.monotonic() + wait_s
        with self._sending() as sending:
            trace = self._context_of(sending)
            for chunk in in_chunks(jobs, CHUNK):
                accepted += await self._submit_ready(await self._prepare_all(chunk, patience, trace), patience)
            if sending is not None:
                sending.sent(accepted)
        return accepted

    async def _prepare_all(self, jobs: Sequence[Job], patience: float, trace: TraceContext | None) -> list[Ready]:
        outage = Outage(patience, most_s=inf)
        await self._ride_out(outage, lambda: self._learn_models([job.model for job in jobs]))
        return [await self._prepare(job, trace) for job in jobs]

    async def _submit_ready(self, ready: Sequence[Ready], patience: float) -> list[Accepted]:
        outage = Outage(patience, most_s=inf)
        answers = await self._ride_out(outage, lambda: self._send(ready))
        while True:
            places, pause_s = busy_places(answers, patience)
            if not places:
                break
            await asyncio.sleep(pause_s)
            again = [ready[place] for place in places]
            replies = await self._ride_out(outage, partial(self._send, again))
            for place, answer in zip(places, replies, strict=True):
                answers[place] = answer
        if any(submission.ref for _, submission in ready):
            await asyncio.to_thread(discard_unused, ready, answers, self._store)
        accepted = accepted_or_raise(answers)
        for (keys, _), one in zip(ready, accepted, strict=True):
            self._directory.settle(one.job_id, keys)
        return accepted

    async def _prepare(self, job: Job, trace: TraceContext | None = None) -> Ready:
        keys = self._directory.route(job.model)
        submission = prepare(job, trace=trace)
        if self._store is not None and is_large(submission):
            submission = await asyncio.to_thread(offload, submission, self._store, keys.queue)
        return keys, submission

    async def _send(self, ready: Sequence[Ready]) -> list[Answer]:
        parts = submit_calls(ready, self._max_queued_tokens)
        replies = await self._run_many([call for _, call in parts])
        return in_order((places for places, _ in parts), replies)

    async def result(self, job_id: str, wait_s: float | None = None) -> Result:
        """
        How the job ended; waits for it, without limit where `wait_s` is None.

        A wait that has begun goes on while the server is away, for up to a minute.

        Args:
            wait_s: Most seconds to wait; 0 only looks.

        Raises:
            WaitTimeout: it has not ended.
            ObjectStoreError: the result is in a store that cannot be read.
        """
        keys = await self._locate(job_id)
        found = await self._look(keys, job_id)
        if found is not None:
            return await self._read_result(found)
        deadline = Deadline(wait_s, f"job {job_id} has not ended")
        deadline.left_s()
        outage = Outage(deadline.end)
        async with self._subscriber.listen([keys.channel(job_id)]) as ear:
            # subscribed first, so that an end between look and wait is heard
            while (found := await self._ride_out(outage, lambda: self._look(keys, job_id))) is None:
                await ear.wait(deadline.left_s(SHARED_POLL_S))
        return await self._read_result(found)

    async def text(self, job_id: str, wait_s: float | None = None) -> str:
        """
        The first answer's text; waits as `result`.

        Raises:
            JobFailed: the job ended without an answer.
        """
        return answer_of(await self.result(job_id, wait_s))

    async def stream(
        self, job_id: str, *, offsets: Mapping[int, int] | None = None, wait_s: float | None = None
    ) -> AsyncIterator[TokenDelta]:
        """
        The answers' text as it is generated, each character once; ends with the job.

        A job that was not submitted with `stream=True` gives its text when it has ended.

        Args:
            offsets: Characters of each answer that the caller has already.
            wait_s: Most seconds for all of it.

        Raises:
            WaitTimeout: the job has not ended by then.
        """
        keys = await self._locate(job_id)
        cursor = TextCursor(offsets)
        deadline = Deadline(wait_s, f"job {job_id} has not ended")
        outage = Outage(deadline.end)

        async def news() -> tuple[bytes | None, list[Any]]:
            ended = await self._look(keys, job_id)
            return ended, await self._read(keys.tokens(job_id), cursor.entry_id, 0.0 if ended else deadline.left_s())

        while True:
            ended, entries = await self._ride_out(outage, news)
            for delta in cursor.feed(entries):
                yield delta
            if ended and (cursor.ended or not entries):
                for delta in cursor.rest(await self._read_result(ended)):
                    yield delta
                return

    async def finished(
        self, job_ids: Iterable[str] | None = None, *, wait_s: float | None = None
    ) -> AsyncIterator[Result]:
        """
        Results in the order in which jobs end; those that have ended come first.

        Args:
            job_ids: The jobs to wait for, each given once; None gives whatever ends in this
                client's queue from now on, and never ends by itself.
            wait_s: Most seconds for all of it.

        Raises:
            WaitTimeout: some have not ended by then.
        """
        deadline = Deadline(wait_s, "some jobs have not ended")
        outage = Outage(deadline.end)
        own = self._directory.own
        if job_ids is None:
            one = Awaited(own, None, await self._last_event(own))
            while True:
                one.hear(await self._ride_out(outage, lambda: self._events(one, deadline.left_s())))
                async for result in self._take(one, list(one.heard), outage):
                    yield result
        awaited = await self._awaited(job_ids)
        by_channel = {one.keys.channel(job_id): (one, job_id) for one in awaited for job_id in one.job_ids or ()}
        async with self._subscriber.listen(by_channel) as ear:
            look_at = 0.0
            while awaited := [one for one in awaited if not one.over]:
                missed = ear.missed or time.monotonic() >= look_at
                for one, job_id in [by_channel[name] for name in ear.take()]:
                    one.note(job_id)
                for one in awaited:
                    async for result in self._take(
                        one, sorted(one.job_ids or ()) if missed else list(one.heard), outage
                    ):
                        yield result
                if missed:
                    look_at = time.monotonic() + 2 * SHARED_POLL_S
                if not all(one.over for one in awaited):
                    await ear.wait(deadline.left_s(max(0.0, look_at - time.monotonic())))

    async def _events(self, one: Awaited, block_s: float) -> list[Any]:
        return await self._read(one.keys.events, one.entry_id, block_s)

    async def _awaited(self, job_ids: Iterable[str]) -> list[Awaited]:
        groups: dict[QueueKeys, set[str]] = {}
        for chunk in in_chunks(job_ids, CHUNK):
            for job_id in chunk:
                groups.setdefault(await self._locate(job_id), set()).add(job_id)
        return [Awaited(keys, wanted) for keys, wanted in groups.items()]

    async def _take(self, one: Awaited, job_ids: Sequence[str], outage: Outage) -> AsyncIterator[Result]:
        for chunk in in_chunks(job_ids, CHUNK):
            looked = await self._ride_out(outage, partial(self._look_many, one.keys, chunk))
            for job_id, record, known in zip(chunk, *looked, strict=True):
                if record is not None:
                    one.taken(job_id)
                    yield await self._read_result(record)
                elif not known and one.job_ids is not None:
                    raise not_found(job_id)
                one.heard.pop(job_id, None)

    async def status(self, job_id: str) -> JobStatus:
        """Where the job stands."""
        keys = await self._locate(job_id)
        [values] = await self._pipeline(("HMGET", keys.job(job_id), *calls.STATUS_FIELDS))
        status = calls.read_status(keys.queue, job_id, values)
        if status is None:
            raise not_found(job_id)
        return status

    async def cancel(self, job_id: str) -> JobState:
        """
        End the job; returns its state after the call.

        "running" means that its worker has been asked and ends it within a third of a lease; a
        job that has ended stays as it is.
        """
        state = await self._run(calls.cancel(await self._locate(job_id), job_id))
        if state is None:
            raise not_found(job_id)
        return state

    async def forget(self, job_id: str) -> bool:
        """
        Drop the result and all else that is kept of a job; False where it has not ended.

        Raises:
            ObjectStoreError: its result is in a store that this client cannot delete from;
                nothing is dropped.
        """
        keys = await self._locate(job_id)
        [record] = await self._pipeline(("GET", keys.result(job_id)))
        url = reference_in(record or b"")
        if url is not None:
            if self._store is None:
                raise ObjectStoreError(f"the result is at {url}: give the client that object_store")
            # before its record, so that a call that fails can be repeated
            await asyncio.to_thread(self._store.delete, url)
        state = await self._run(calls.forget(keys, job_id))
        if state is None and record is None:
            raise not_found(job_id)
        # the call may have been made twice, where its first reply was lost
        return state is None or state in TERMINAL_STATES

    async def stats(self) -> QueueStats:
        """Counters of this client's queue."""
        return calls.read_stats(*await self._pipeline(*calls.stats_commands(self._directory.own)))

    async def workers(self) -> dict[str, dict[str, str]]:
        """What the living workers of this client's queue say of themselves, by worker id."""
        keys = self._directory.own
        [names] = await self._pipeline(("ZRANGE", keys.workers, 0, -1))
        ids = [name.decode() for name in names]
        replies = await self._pipeline(*(("HGETALL", keys.worker(worker_id)) for worker_id in ids))
        return calls.read_workers(ids, replies)

    async def _locate(self, job_id: str) -> QueueKeys:
        return await self._seek(job_id, lambda keys: keys.job(job_id))

    async def _read_result(self, record: bytes) -> Result:
        if reference_in(record) is None:
            return read_result(record, None)
        return await asyncio.to_thread(read_result, record, self._store)

    async def _look(self, keys: QueueKeys, job_id: str) -> bytes | None:
        [record], [known] = await self._look_many(keys, [job_id])
        if record is None and not known:
            raise not_found(job_id)
        return record

    async def _look_many(self, keys: QueueKeys, job_ids: Sequence[str]) -> tuple[list[bytes | None], list[int]]:
        # the job first: one that ends in between then shows its result
        known = (("EXISTS", keys.job(job_id)) for job_id in job_ids)
        records = (("GET", keys.result(job_id)) for job_id in job_ids)
        replies = await self._pipeline(*known, *records)
        return replies[len(job_ids) :], replies[: len(job_ids)]

    async def _last_event(self, keys: QueueKeys) -> str:
        [entries] = await self._pipeline(("XREVRANGE", keys.events, "+", "-", "COUNT", 1))
        return entries[0][0].decode() if entries else "0-0"

    async def _read(self, stream: str, after: str, block_s: float) -> list[Any]:
        block = ("BLOCK", max(1, round(block_s * 1000))) if block_s > 0 else ()
        with translated():
            server = self._servers.at(stream)
            reply: Any = await server.execute_command("XREAD", "COUNT", 512, *block, "STREAMS", stream, after)
        return reply[0][1] if reply else []
