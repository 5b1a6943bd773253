"""
The way of a job through this process: pulled, prepared, computed, ended.

Everything here runs on the event loop and in batches: no job has a task of its own.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import structlog

from engine.errors import RequestError
from engine.request import Request, RequestOutput
from pagemill.logs import content, logs_prompts
from pagemill.messages import DeathCause, Delivery, Outcome
from pagemill.schema import LANES, Failure, FailureCode, Result, ResultStatus
from worker.checkpoints import Saved
from worker.engine_port import EngineDoor, Turn
from worker.intake import Accepted, Deferred, Intake, Prepared, Refused
from worker.leases import Held, Leases
from worker.puller import Transit
from worker.results import errors_in
from worker.retries import Fault
from worker.sinks import Ended, Sink
from worker.streams import TokenStreams

if TYPE_CHECKING:
    from worker.job_spans import JobSpans

log = structlog.get_logger(__name__)

# deliveries that one thread of the pool prepares in one go
INTAKE_BATCH = 16
# lost workers say little of the jobs that they held: a job may lapse more often than it may be tried
LAPSES_PER_ATTEMPT = 4


class Jobs:
    """
    Moves jobs from the pull to the sink.

    Args:
        max_attempts: A job that was tried so many times without an end is failed, not run again.
        on_change: Called when there may be room for more jobs, or none is left.
        put_off: Has a job tried again after a fault; False where it was tried often enough, and stays here.
        bury: Makes a job that is given up a dead letter; it stays in the table until then.
        spans: Makes spans of jobs; None where traces are off.
    """

    def __init__(
        self,
        *,
        leases: Leases,
        intake: Intake,
        pool: ThreadPoolExecutor,
        engine: EngineDoor,
        sink: Sink,
        streams: TokenStreams,
        max_attempts: int,
        on_change: Callable[[], None],
        put_off: Callable[[Held, Fault, str], bool],
        bury: Callable[[Held, DeathCause, str], None],
        spans: "JobSpans | None" = None,
    ) -> None:
        self._leases = leases
        self._intake = intake
        self._pool = pool
        self._engine = engine
        self._sink = sink
        self._streams = streams
        self._max_attempts = max_attempts
        self._on_change = on_change
        self._put_off = put_off
        self._bury = bury
        self._spans = spans

        # what the engine's capacity does not know of yet, by job, with its lane
        self._transit: dict[str, tuple[str, Transit]] = {}
        # set by a drain: what the intake still has does not go on to the engine
        self._closed = False

    @property
    def transit(self) -> list[Transit]:
        """One a lane, the most urgent first."""
        sums: dict[str, list[int]] = {lane: [0, 0] for lane in LANES}
        for lane, one in self._transit.values():
            sums[lane][0] += one.seqs
            sums[lane][1] += one.tokens
        return [Transit(*pair) for pair in sums.values()]

    def receive(self, deliveries: Sequence[Delivery]) -> None:
        """Take what was pulled and send it through the intake."""
        fresh = []
        for held in self._leases.hold(deliveries):
            delivery = held.delivery
            lapsed = delivery.lapses > self._max_attempts * LAPSES_PER_ATTEMPT
            if delivery.attempt > self._max_attempts or lapsed:
                self._give_up(held)
            else:
                fresh.append(delivery)
                self._transit[delivery.job_id] = delivery.lane, Transit(1, delivery.tokens)
        loop = asyncio.get_running_loop()
        for start in range(0, len(fresh), INTAKE_BATCH):
            batch = fresh[start : start + INTAKE_BATCH]
            loop.run_in_executor(self._pool, self._intake.prepare, batch).add_done_callback(self._on_prepared)

    def on_turns(self, turns: Iterable[Turn]) -> None:
        """Take what the engine gave."""
        for turn in turns:
            for job_id in turn.added:
                self._transit.pop(job_id, None)
                if held := self._leases.get(job_id):
                    held.in_engine = True
            for job_id, error in turn.rejected:
                self._reject(job_id, error)
            for delta in turn.deltas:
                if held := self._leases.get(delta.request_id):
                    self._streams.put(held, delta)
            for output in turn.finished:
                self._take_output(output)
        self._on_change()

    async def stop(self, job_ids: Iterable[str], status: ResultStatus) -> None:
        """End jobs that were cancelled or are past their deadline; what they have of text is kept."""
        open_jobs = {job_id: held for job_id in job_ids if (held := self._leases.get(job_id)) and not held.settled}
        if not open_jobs:
            return
        for held in open_jobs.values():
            # the intake may end while the engine is asked
            held.stopped_as = status
        outputs = await self._engine.abort(open_jobs)
        for job_id, held in open_jobs.items():
            # not in the engine: it has not come there yet, or its output is on the way to us
            if job_id in outputs or held.request is None:
                self._finish(job_id, status, outputs.get(job_id))

    async def forget(self, job_ids: Iterable[str]) -> None:
        """Drop jobs that belong to another worker now."""
        lost = []
        for job_id in job_ids:
            held = self._leases.get(job_id)
            if held is not None and self._drop(job_id):
                lost.append(job_id)
                if self._spans is not None:
                    self._spans.left(held, "lost", "lost")
        if lost:
            await self._engine.abort(lost)
            self._on_change()

    async def take_unstarted(self) -> list[Held]:
        """Take back all jobs of which nothing has been computed; none enters the engine any more."""
        # first: what the intake finishes while the engine is asked would go on running
        self._closed = True
        in_engine = {held.delivery.job_id for held in self._leases if held.request and not held.settled}
        unstarted = await self._engine.abort(in_engine, unstarted_only=True)
        jobs = [held for held in self._leases if not held.settled]
        return self._take(held for held in jobs if not held.request or held.delivery.job_id in unstarted)

    async def take_all(self) -> list[Held]:
        """Take back all jobs that have not ended; none enters the engine any more."""
        self._closed = True
        open_jobs = [held for held in self._leases if not held.settled]
        await self._engine.abort(held.delivery.job_id for held in open_jobs)
        return self._take(held for held in open_jobs if not held.settled)

    def take(self, held: Held) -> bool:
        """Take back one job that is not in the engine; False where it is ours no more, or has ended."""
        is_ours = self._leases.get(held.delivery.job_id) is held and not held.settled
        return is_ours and self._drop(held.delivery.job_id)

    def abandon(self) -> tuple[list[Held], list[Held]]:
        """
        Take back all jobs that have not ended, when the engine is gone.

        Returns:
            Those that it had been given, of which one may be to blame, and the others.
        """
        jobs = self._take(held for held in self._leases if not held.settled)
        return [held for held in jobs if held.request], [held for held in jobs if not held.request]

    def _take(self, jobs: Iterable[Held]) -> list[Held]:
        return [held for held in jobs if self._drop(held.delivery.job_id)]

    def _drop(self, job_id: str) -> bool:
        self._transit.pop(job_id, None)
        return self._leases.drop(job_id) is not None

    def _on_prepared(self, future: "asyncio.Future[list[Prepared]]") -> None:
        if future.cancelled():
            return
        requests: list[Request] = []
        for prepared in future.result():
            held = self._leases.get(prepared.delivery.job_id)
            # handed back, lost or cancelled while a thread had it
            if held is None or held.settled or held.request is not None:
                continue
            match prepared:
                case Deferred():
                    self._try_later(held, prepared.fault, prepared.why)
                case Refused():
                    held.job = prepared.job
                    log.info("job.refused", **held.ids, code=prepared.failure.code)
                    self._end(Ended(held, "failed", failure=prepared.failure))
                case Accepted() if not self._closed and held.stopped_as is None:
                    self._enter(held, prepared)
                    requests.append(prepared.request)
        if requests:
            self._engine.add(requests)

    def _enter(self, held: Held, accepted: Accepted) -> None:
        request = accepted.request
        held.job, held.request = accepted.job, request
        held.saved = Saved([0] * request.params.n)
        if request.resumed:
            held.saved = Saved.of(request.resumed, len(accepted.delivery.checkpoint))
        if self._spans is not None:
            self._spans.begin(held)
        delivery = held.delivery
        self._transit[request.request_id] = delivery.lane, Transit(request.params.n, delivery.tokens)

    def _try_later(self, held: Held, fault: Fault, why: str) -> None:
        """Have a job put off that cannot be read now, or here, unless that has gone on for too long."""
        self._transit.pop(held.delivery.job_id, None)
        if self._put_off(held, fault, why):
            self._on_change()
            return
        message = f"the job is given up after {held.delivery.num_faults + 1} tries: {why}"
        log.error("job.given_up", **held.ids, fault=fault, tries=held.delivery.num_faults + 1)
        if fault == "memory":
            held.settled = True
            self._bury(held, "retries", message)
        else:
            code: FailureCode = "unsupported_version" if fault == "version" else "lost_payload"
            self._end(Ended(held, "failed", failure=Failure(code=code, message=message)))

    def _take_output(self, output: RequestOutput) -> None:
        """End a job, or have it tried again where its answer is none: that may be the device's fault."""
        held = self._leases.get(output.request_id)
        errors = errors_in(output)
        if held is None or held.settled or not errors or not self._put_off(held, "answer", "; ".join(errors)):
            self._finish(output.request_id, "done", output)

    def _finish(self, job_id: str, status: ResultStatus, output: RequestOutput | None) -> None:
        held = self._leases.get(job_id)
        if held is None or held.settled:
            return
        failure = None
        if status == "expired":
            failure = Failure(code="deadline_passed", message="the deadline passed while a worker had the job")
        self._end(Ended(held, status, output, failure))

    def _reject(self, job_id: str, error: RequestError) -> None:
        held = self._leases.get(job_id)
        if held is not None and not held.settled:
            failure = Failure.model_validate({"code": error.code, "message": str(error)})
            log.info("job.refused", **held.ids, code=error.code)
            self._end(Ended(held, "failed", failure=failure))

    def _give_up(self, held: Held) -> None:
        attempts, lapses = held.delivery.attempt - 1, held.delivery.lapses
        log.error("job.given_up", **held.ids, attempts=attempts, lapses=lapses)
        message = f"the job is given up: {attempts} attempts failed, and {lapses} times it was lost with its worker"
        held.settled = True
        self._bury(held, "retries" if attempts >= self._max_attempts else "lapses", message)

    def _end(self, ended: Ended) -> None:
        self._transit.pop(ended.held.delivery.job_id, None)
        ended.held.note_output(ended.output)
        if ended.held.delivery.stream_tokens:
            self._streams.end(ended)
        else:
            self._sink.put(ended)


def tell_end(held: Held, outcome: Outcome, result: Result | None) -> None:
    """Log the end of a job; with the beginning of its prompt and answer, where the operator asks for these."""
    fields: dict[str, Any] = {"outcome": outcome, "attempt": held.delivery.attempt}
    if result is not None:
        fields |= {"status": result.status, "tokens": result.usage.completion_tokens, **content(text=result.text)}
    if held.job is not None:
        prompt = held.job.messages[-1].content if held.job.messages else held.job.prompt
        fields |= content(prompt=prompt) if isinstance(prompt, str) else {}
    note = log.info if logs_prompts() else log.debug
    note("job.ended", **held.ids, **fields)
