"""
What this worker holds under lease, and how the leases are kept.

A renewal extends all leases, saves what the older jobs have generated, and brings back which
jobs are lost, cancelled or past their deadline.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from engine.request import Progress, Request, RequestOutput, RequestTimes
from pagemill.consumer import Consumer
from pagemill.logs import of_job
from pagemill.messages import Checkpoint, Delivery, Renewal
from pagemill.schema import Job, ResultStatus
from worker.checkpoints import Saved
from worker.engine_port import EngineDoor, progress
from worker.intake import Intake

RENEWALS_PER_LEASE = 3
# younger jobs are not saved: one that ends soon costs nothing. With a renewal this stays under half a lease,
# which is the most that is computed again of a job whose worker dies
YOUNG = 1 / 8


# of one job: an exporter keeps a few more
MAX_MARKS = 100


class Mark(NamedTuple):
    """Something that happened to a job; `at` is monotonic."""

    at: float
    name: str
    attributes: dict[str, int]


@dataclass(slots=True)
class Held:
    """
    One job in our hands, from the pull to the result.

    Args:
        delivery: What finish is fenced by; replaced when we pull a job again that we lost and
            still compute.
        since: When it was pulled, by the monotonic clock.
        job, request: Known when the intake has read it.
        in_engine: The engine has taken it.
        settled: Its result is on the way.
        stopped_as: Set when it is cancelled or past its deadline: it does not enter the engine any more.
        saved: Its checkpoint; of no answers until the intake has read the job.
        meta: What goes beside the checkpoint; made for the first one.
        text_offsets: Characters already published, by answer.
        marks: What happened to it, for its span; None where it has none.
        times, left_engine, num_preemptions: Of its stay in the engine, where it has a span.
    """

    delivery: Delivery
    since: float
    job: Job | None = None
    request: Request | None = None
    in_engine: bool = False
    settled: bool = False
    stopped_as: ResultStatus | None = None
    saved: Saved = field(default_factory=Saved)
    meta: str = ""
    text_offsets: dict[int, int] = field(default_factory=dict)
    marks: "list[Mark] | None" = None
    times: RequestTimes | None = None
    left_engine: float = 0.0
    num_preemptions: int = 0

    @property
    def ids(self) -> dict[str, str]:
        """What a line of the log about it says."""
        return of_job(self.delivery.job_id, self.job.traceparent if self.job else None)

    def mark(self, name: str, **attributes: int) -> None:
        """Note what happens to it now; a job of hours is told of up to a point."""
        if self.marks is not None and len(self.marks) < MAX_MARKS:
            self.marks.append(Mark(time.monotonic(), name, attributes))

    def note_output(self, output: RequestOutput | None) -> None:
        """Note how it was in the engine, which it has left."""
        if self.marks is not None and output is not None:
            self.times, self.num_preemptions, self.left_engine = output.times, output.num_preemptions, time.monotonic()

    def save_anew(self) -> None:
        """Have the next checkpoint replace the one in the queue: that is not what we sent."""
        self.saved = Saved([0] * len(self.saved.num_tokens))


class Leases:
    """The table of held jobs; all its methods are called on the event loop."""

    def __init__(
        self,
        consumer: Consumer,
        engine: EngineDoor,
        intake: Intake,
        *,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.renew_every_s = lease_s / RENEWALS_PER_LEASE
        self._young_s = lease_s * YOUNG
        self._consumer = consumer
        self._engine = engine
        self._intake = intake
        self._clock = clock
        self._held: dict[str, Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Held]:
        return iter(tuple(self._held.values()))

    def get(self, job_id: str) -> Held | None:
        return self._held.get(job_id)

    def hold(self, deliveries: Iterable[Delivery]) -> list[Held]:
        """
        Enter what was pulled; return what is new.

        A job that is here already was lost while we paused and came back to us: its new
        entry takes the place of the old one, and the work goes on.
        """
        fresh = []
        for delivery in deliveries:
            held = self._held.get(delivery.job_id)
            if held is not None:
                held.delivery = delivery
                held.save_anew()
            else:
                held = self._held[delivery.job_id] = Held(delivery, self._clock())
                fresh.append(held)
        return fresh

    def drop(self, job_id: str) -> Held | None:
        """Forget a job: finished, handed back, or lost."""
        return self._held.pop(job_id, None)

    async def renew(self, *, all_checkpoints: bool = False) -> Renewal:
        """
        Renew every lease, with checkpoints of jobs that are not young, or of all.

        Raises:
            QueueUnavailable: when the server is away; nothing is changed here.
        """
        if not self._held:
            return Renewal()
        checkpoints = await self._checkpoints(0 if all_checkpoints else self._young_s)
        asked = {job_id: held.delivery for job_id, held in self._held.items()}
        sent = {job_id: (held, held.saved) for job_id, held in self._held.items() if job_id in checkpoints}
        renewal = await self._consumer.renew(list(asked.values()), checkpoints)
        for job_id, (held, saved) in sent.items():
            if job_id in renewal.stale:
                held.save_anew()
            else:
                saved.confirm(checkpoints[job_id].end)
                held.mark("checkpoint", tokens=sum(saved.num_tokens))
        # a job that came back under a new entry while we asked is not lost
        lost = {job_id for job_id in renewal.lost if self._is_under(job_id, asked[job_id])}
        return Renewal(frozenset(lost), renewal.cancelled, renewal.expired, renewal.stale)

    def _is_under(self, job_id: str, delivery: Delivery) -> bool:
        held = self._held.get(job_id)
        return held is not None and held.delivery is delivery

    async def _checkpoints(self, min_age_s: float) -> dict[str, Checkpoint]:
        oldest = self._clock() - min_age_s
        known = {
            job_id: tuple(held.saved.num_tokens)
            for job_id, held in self._held.items()
            if held.in_engine and not held.settled and not held.saved.full and held.since <= oldest
        }
        gained: dict[str, list[Progress]] = {}
        # a step may take longer: the leases matter more than what they are to save
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.renew_every_s):
                gained = await self._engine.call(partial(progress, known=known)) if known else {}
        for job_id, answers in gained.items():
            held = self._held.get(job_id)
            # another renewal may have saved it while we asked
            if held is not None and held.request is not None and known[job_id] == tuple(held.saved.num_tokens):
                held.saved.add(answers)
                held.meta = held.meta or self._intake.checkpoint_meta(held.request.prompt, held.request.params.grammar)
        return {
            job_id: Checkpoint(held.saved.num_bytes, held.saved.unsaved, held.meta)
            for job_id, held in self._held.items()
            if held.saved.unsaved and not held.settled
        }
