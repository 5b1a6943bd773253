"""
What this worker holds under lease, and how the leases are kept.

A renewal extends all leases, saves what the older jobs have generated, and brings back which
jobs are lost, cancelled or past their deadline.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from engine.request import Request
from pagemill.consumer import Consumer
from pagemill.messages import Checkpoint, Delivery, Renewal
from pagemill.schema import Job, ResultStatus
from worker.engine_thread import EngineThread
from worker.intake import Intake, resumable

TOKEN_BYTES = 4


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
        saved_bytes: Length of its checkpoint.
        meta: What goes beside the checkpoint; made for the first one.
        text_offsets: Characters already published, by answer.
    """

    delivery: Delivery
    since: float
    job: Job | None = None
    request: Request | None = None
    in_engine: bool = False
    settled: bool = False
    stopped_as: ResultStatus | None = None
    saved_bytes: int = 0
    meta: str = ""
    text_offsets: dict[int, int] = field(default_factory=dict)


class Leases:
    """The table of held jobs; all its methods are called on the event loop."""

    def __init__(
        self,
        consumer: Consumer,
        engine: EngineThread,
        intake: Intake,
        *,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.renew_every_s = lease_s / 3
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
            else:
                held = self._held[delivery.job_id] = Held(delivery, self._clock())
                fresh.append(held)
        return fresh

    def drop(self, job_id: str) -> Held | None:
        """Forget a job: finished, handed back, or lost."""
        return self._held.pop(job_id, None)

    async def renew(self, *, all_checkpoints: bool = False) -> Renewal:
        """
        Renew every lease, with checkpoints for jobs older than one renewal, or for all.

        Raises:
            QueueUnavailable: when the server is away; nothing is changed here.
        """
        if not self._held:
            return Renewal()
        checkpoints = await self._checkpoints(0 if all_checkpoints else self.renew_every_s)
        asked = {job_id: held.delivery for job_id, held in self._held.items()}
        renewal = await self._consumer.renew(list(asked.values()), checkpoints)
        for job_id, checkpoint in checkpoints.items():
            held = self._held.get(job_id)
            if held is not None:
                # a stale checkpoint is sent whole the next time
                saved = checkpoint.offset + len(checkpoint.token_ids)
                held.saved_bytes = 0 if job_id in renewal.stale else saved
        # a job that came back under a new entry while we asked is not lost
        lost = {job_id for job_id in renewal.lost if self._is_under(job_id, asked[job_id])}
        return Renewal(frozenset(lost), renewal.cancelled, renewal.expired, renewal.stale)

    def _is_under(self, job_id: str, delivery: Delivery) -> bool:
        held = self._held.get(job_id)
        return held is not None and held.delivery is delivery

    async def _checkpoints(self, min_age_s: float) -> dict[str, Checkpoint]:
        oldest = self._clock() - min_age_s
        wanted = [
            job_id
            for job_id, held in self._held.items()
            if held.in_engine and not held.settled and held.since <= oldest and held.job and resumable(held.job.options)
        ]
        if not wanted:
            return {}
        progress = await self._engine.call(lambda engine: engine.progress(wanted))
        checkpoints = {}
        for job_id, answers in progress.items():
            held = self._held.get(job_id)
            if held is None or held.request is None:
                continue
            fresh = answers[0][held.saved_bytes // TOKEN_BYTES :]
            if fresh:
                held.meta = held.meta or self._intake.checkpoint_meta(held.request.prompt)
                checkpoints[job_id] = Checkpoint(held.saved_bytes, _little_endian(fresh), held.meta)
        return checkpoints


def _little_endian(token_ids: tuple[int, ...]) -> bytes:
    return np.asarray(token_ids, dtype="<i4").tobytes()
