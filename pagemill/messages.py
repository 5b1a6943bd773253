"""What travels between the queue's scripts and its two users, the clients and the workers."""

import json
from dataclasses import dataclass, field
from typing import Literal

from pagemill.schema import Lane, Result

JobState = Literal["queued", "delayed", "running", "suspect", "done", "failed", "cancelled", "expired"]
TERMINAL_STATES: frozenset[JobState] = frozenset({"done", "failed", "cancelled", "expired"})

Outcome = Literal["done", "fenced", "gone", "duplicate"]

# why a job is a dead letter: it ended workers, its attempts or its workers were used up, or it never was a job
DeathCause = Literal["poison", "retries", "lapses", "garbage"]


@dataclass(frozen=True, slots=True)
class Accepted:
    """
    What became of a submit.

    Args:
        job_id: The job that stands for it; the first one's where this is a duplicate.
        state: The state of that job when the submit arrived.
        duplicate: The queue had it already; nothing was added.
        payload_ref: The object that the payload is read from; empty where the queue has it.
    """

    job_id: str
    state: JobState
    duplicate: bool
    payload_ref: str = field(default="", compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class JobStatus:
    """
    Where a job stands. Times are milliseconds of the server's clock, 0 where not reached.

    Args:
        tokens: Estimate of the KV cache that it takes, in tokens.
        attempt: Times that a worker took it, hand-backs and lapsed leases not counted.
        worker: Who runs it, or ran it last.
        cancel_requested: It runs and its worker has been told to stop it.
        reason: Why it was put off, where it was.
        batch: The batch that it is counted in; empty where there is none.
        gpu_ms: With the tokens beside it what it took, once it has ended.
    """

    job_id: str
    state: JobState
    queue: str
    lane: str
    tenant: str
    tokens: int
    attempt: int
    worker: str
    accepted_ms: int
    started_ms: int
    ended_ms: int
    deadline_ms: int
    cancel_requested: bool
    reason: str
    batch: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    gpu_ms: int = 0

    @property
    def ended(self) -> bool:
        return self.state in TERMINAL_STATES


BatchState = Literal["open", "sealed", "cancelling", "ended"]


@dataclass(frozen=True, slots=True)
class BatchStatus:
    """
    Where a batch stands. Times are milliseconds of the server's clock, 0 where not reached.

    Args:
        state: "open" takes jobs; "sealed" and "cancelling" do not, and end with their last open job.
        total: Jobs that joined it; `done`, `failed`, `cancelled` and `expired` of them have ended so.
        prompt_tokens, completion_tokens, gpu_ms: What its ended jobs took together.
        webhook: The URL that is told of the end; `webhook_state` is how that went, and
            `webhook_reason` why not, where it went wrong.
        metadata: What it was created with.
        pace: Jobs of it that ended lately, a sum that fades; `pace_from_ms` is when the first of these ended, and
            `pace_at_ms` the last.
    """

    batch_id: str
    queue: str
    tenant: str
    state: BatchState
    total: int
    done: int
    failed: int
    cancelled: int
    expired: int
    prompt_tokens: int
    completion_tokens: int
    gpu_ms: int
    created_ms: int
    sealed_ms: int
    ended_ms: int
    cancel_requested: bool
    webhook: str
    webhook_state: str
    webhook_tries: int
    webhook_reason: str
    metadata: dict[str, str]
    pace: float = 0.0
    pace_at_ms: int = 0
    pace_from_ms: int = 0

    @property
    def ended(self) -> bool:
        return self.state == "ended"

    @property
    def num_open(self) -> int:
        """Jobs that have not ended."""
        return self.total - self.done - self.failed - self.cancelled - self.expired


@dataclass(frozen=True, slots=True)
class HookDelivery:
    """
    How one try to deliver a batch's webhook went.

    Args:
        outcome: "again" has it tried once more after `delay_ms`, for three days after the batch's end.
        why: What went wrong, in words.
    """

    outcome: Literal["delivered", "failed", "again"]
    delay_ms: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """
    New text of one answer.

    Args:
        index: Which answer.
        offset: Characters of that answer before this text.
        text: The new characters.
        num_tokens: Tokens of that answer so far, these included.
    """

    index: int
    offset: int
    text: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Room:
    """
    What a worker has room for in one lane.

    Args:
        max_tokens: Estimated tokens of all the jobs together.
    """

    max_jobs: int
    max_tokens: int

    def __bool__(self) -> bool:
        return self.max_jobs > 0 and self.max_tokens > 0


@dataclass(frozen=True, slots=True)
class Pull:
    """
    What one call of PULL brought.

    Args:
        again: Another call may claim more at once.
        behind: Lanes in which jobs wait that this call left there, for want of room or of time.
    """

    jobs: list["Delivery"]
    again: bool
    behind: frozenset[Lane]


@dataclass(frozen=True, slots=True)
class Delivery:
    """
    A job in a worker's hands, under lease.

    Args:
        stream: Key of the stream that it was read from.
        entry_id: Its entry there; with `stream` it is what a finish is fenced by.
        attempt: 1 for the first delivery; neither a hand-back nor a lapsed lease counts.
        payload: The job as JSON; None where `payload_ref` says which object holds it.
        tokens: The client's estimate of prompt and answer tokens.
        seed: The job's own, or the one chosen when it was accepted.
        accepted_ms: When it was accepted, by the server's clock.
        started_ms: When a worker first took it.
        deadline_ms: When the answer becomes worthless, by the server's clock; 0 for never.
        result_ttl_s: How long its result is kept.
        stream_tokens: Tokens are to be published while they are generated.
        checkpoint: What earlier attempts saved with `Consumer.renew`, end to end.
        checkpoint_meta: The text saved beside it.
        lapses: Times that a peer took it back from a worker that had fallen silent.
        fault: The kind of fault that it was last put off for; empty where it never was.
        num_faults: Times in a row that it was put off for that kind.
        version: Of the wire format, as the job was submitted; its result is to be of the same.
    """

    job_id: str
    lane: str
    tenant: str
    stream: str
    entry_id: str
    attempt: int
    payload: bytes | None
    payload_ref: str | None
    tokens: int
    seed: int
    accepted_ms: int
    started_ms: int
    deadline_ms: int
    result_ttl_s: int
    stream_tokens: bool
    checkpoint: bytes = b""
    checkpoint_meta: str = ""
    lapses: int = 0
    fault: str = ""
    num_faults: int = 0
    version: int = 1


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """
    What a running job has generated since its last checkpoint.

    Args:
        offset: Bytes saved before these; 0 replaces what was saved.
        records: Appended; what is there already of them, from a renewal whose reply was lost, is not.
        meta: Replaces the text beside the checkpoint: model fingerprint, prompt hash, ...
    """

    offset: int
    records: bytes
    meta: str

    @property
    def end(self) -> int:
        """Bytes saved with these."""
        return self.offset + len(self.records)


@dataclass(frozen=True, slots=True)
class Renewal:
    """
    What renewing the leases brought back, as job ids.

    Args:
        lost: Another worker's now, or gone: drop it and publish nothing.
        cancelled: Finish it with status "cancelled" and the text so far.
        expired: Its deadline has passed: finish it with status "expired".
        stale: Its checkpoint was not at that offset and was not saved: send it from 0.
    """

    lost: frozenset[str] = frozenset()
    cancelled: frozenset[str] = frozenset()
    expired: frozenset[str] = frozenset()
    stale: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Finished:
    """
    A job's end, to be published.

    Args:
        payload: The result as JSON; None has it made from `result`.
        ref: Where the object store holds the result; only this reference is then written.
    """

    delivery: Delivery
    result: Result
    payload: bytes | None = None
    ref: str | None = None

    def record(self) -> bytes:
        """What stands under the result's key: the result, or where it is."""
        if self.ref is not None:
            return json.dumps({"ref": self.ref}).encode()
        return self.result.payload() if self.payload is None else self.payload


@dataclass(frozen=True, slots=True)
class SweepReport:
    """
    What one sweep did.

    Args:
        swept: False where another worker is this fleet's sweeper; the counts are then 0.
        reclaimed: Jobs taken back from workers that are gone.
        promoted: Delayed jobs that came due.
        expired: Jobs that waited past their deadline and ended so.
        cancelled: Jobs of cancelled batches that waited and ended so; `cancelling` says that more are left.
        collected: Idle consumers and empty streams removed.
    """

    swept: bool
    reclaimed: int = 0
    promoted: int = 0
    expired: int = 0
    cancelled: int = 0
    cancelling: bool = False
    collected: int = 0


@dataclass(frozen=True, slots=True)
class QueueStats:
    """
    Counters of a queue, kept by its scripts.

    Args:
        queued: Jobs waiting, by lane.
        queued_tokens: Their estimated tokens, by lane.
        running: Jobs in workers' hands.
        delayed: Jobs put off until later.
        suspects: Jobs that wait to run apart from others, since one of them may have ended a worker.
        dead: Dead letters that were neither requeued nor purged.
        raw: Entries written by other programs that no worker has adopted yet.
        totals: What ever happened, by name: accepted, done, failed, cancelled, expired,
            reclaimed, released, retried, fenced, suspected, buried, requeued, prompt_tokens,
            completion_tokens, gpu_ms.
    """

    queued: dict[str, int]
    queued_tokens: dict[str, int]
    running: int
    delayed: int
    suspects: int
    dead: int
    raw: int
    totals: dict[str, int]
