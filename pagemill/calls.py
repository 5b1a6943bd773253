"""The scripts' arguments and replies: the one place that packs and reads them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar, cast

from pagemill.errors import BatchClosed, BatchNotFound, Busy, BusyReason, Conflict
from pagemill.keys import QueueKeys
from pagemill.messages import (
    Accepted,
    Checkpoint,
    DeathCause,
    Delivery,
    Finished,
    JobState,
    JobStatus,
    Outcome,
    Pull,
    QueueStats,
    Renewal,
    Room,
    TokenDelta,
)
from pagemill.schema import LANES
from pagemill.scripts import Arg, Call, load
from pagemill.versions import SCHEMA_VERSION

T = TypeVar("T")

# entries that one PULL looks at; more take another call
PULL_LOOKS = 64

# most jobs in one call that takes many, so that none holds the server for long
JOBS_A_CALL = 32


def in_chunks(items: Iterable[T], size: int = JOBS_A_CALL) -> Iterator[list[T]]:
    """The items in lists of `size`, the last one shorter; read as they are taken."""
    source = iter(items)
    while chunk := list(islice(source, size)):
        yield chunk


class Submission(NamedTuple):
    """
    A job made ready for the wire: the script's arguments for it, in their order.

    `payload` is empty where `ref` names the object that holds it.
    """

    job_id: str
    fingerprint: str
    idempotency: str
    payload: bytes
    ref: str
    lane: str
    tenant: str
    tokens: int
    timeout_ms: int
    result_ttl_s: int
    stream: int
    seed: int
    metadata: str
    batch: str = ""
    version: int = SCHEMA_VERSION
    reply_to: str = ""
    reply_context: str = ""


Answer = Accepted | Busy | Conflict | BatchNotFound | BatchClosed

_BUSY: dict[BusyReason, str] = {
    "memory": "its server's memory is over 80 % full",
    "tokens": "too many tokens wait",
    "tenant": "too many tokens of tenant {job.tenant} wait",
    "lane": "too many tokens wait in lane {job.lane}",
}


def submit(keys: QueueKeys, jobs: Sequence[Submission], max_queued_tokens: int) -> Call[list[Answer]]:
    """A refusal is returned, not raised: the other answers are still to be read."""
    args: list[Arg] = [max_queued_tokens]
    for job in jobs:
        args += job

    def parse(replies: list[list[bytes] | int]) -> list[Answer]:
        return [read_answer(keys.queue, job, reply) for job, reply in zip(jobs, replies, strict=True)]

    def when_full() -> list[Answer]:
        message = f"queue {keys.queue} takes no jobs for now: its server is full"
        return [Busy(message, reason="memory", retry_after_s=5.0) for _ in jobs]

    return Call(load("submit"), keys.base, args, parse, when_full)


def read_answer(queue: str, job: Submission, reply: list[bytes] | int) -> Answer:
    if isinstance(reply, int):
        return Accepted(job.job_id, "queued", duplicate=False, payload_ref=job.ref)
    word = reply[0]
    if word == b"DUP":
        first, state, ref = (part.decode() for part in reply[1:])
        return Accepted(first, cast(JobState, state), duplicate=True, payload_ref=ref)
    if word == b"CONFLICT":
        first = reply[1].decode()
        return Conflict(first, f"job {first} has the same id or idempotency key and another content")
    if word == b"NOBATCH":
        return BatchNotFound(f"queue {queue} has no batch {job.batch}, or it has expired: create it first")
    if word == b"CLOSED":
        return BatchClosed(f"batch {job.batch} takes no more jobs: it was sealed or cancelled; create another one")
    why = cast(BusyReason, reply[1].decode())
    what, retry_s = _BUSY[why].format(job=job), int(reply[2]) / 1000
    message = f"queue {queue} takes no jobs for now: {what}; try again in {retry_s:.1f} s"
    return Busy(message, reason=why, retry_after_s=retry_s)


def pull(
    keys: QueueKeys,
    worker_id: str,
    *,
    rooms: Sequence[Room],
    job_cap_tokens: int,
    lease_ms: int,
    turn: int,
    version: int,
) -> Call[Pull]:
    args: list[Arg] = [worker_id, job_cap_tokens, lease_ms, PULL_LOOKS, turn, version]
    for _, room in zip(LANES, rooms, strict=True):
        args += [room.max_jobs, room.max_tokens]

    def parse(reply: list[Any]) -> Pull:
        again, behind, *rows = reply
        lanes = frozenset(lane for rank, lane in enumerate(LANES) if behind >> rank & 1)
        return Pull([_delivery(row) for row in rows], again == 1, lanes)

    return Call(load("pull"), keys.base, args, parse)


def _claim(reply: list[Any]) -> tuple[bool, list[Delivery]]:
    return reply[0] == 1, [_delivery(row) for row in reply[1:]]


def _delivery(row: list[bytes]) -> Delivery:
    job_id, lane, tenant, stream, entry_id, attempt, payload, ref = row[:8]
    tokens, seed, accepted, started, deadline, ttl, streams, checkpoint, meta, lapses, faults, version = row[8:]
    fault, _, num_faults = faults.decode().partition(" ")
    return Delivery(
        job_id=job_id.decode(),
        lane=lane.decode(),
        tenant=tenant.decode(),
        stream=stream.decode(),
        entry_id=entry_id.decode(),
        attempt=int(attempt),
        payload=None if ref else payload,
        payload_ref=ref.decode() or None,
        tokens=int(tokens),
        seed=int(seed),
        accepted_ms=int(accepted),
        started_ms=int(started),
        deadline_ms=int(deadline),
        result_ttl_s=int(ttl),
        stream_tokens=streams == b"1",
        checkpoint=checkpoint,
        checkpoint_meta=meta.decode(),
        lapses=int(lapses),
        fault=fault,
        num_faults=int(num_faults or 0),
        version=int(version),
    )


def take_suspects(keys: QueueKeys, worker_id: str, *, lease_ms: int, turn: int) -> Call[tuple[bool, list[Delivery]]]:
    args: list[Arg] = [worker_id, lease_ms, PULL_LOOKS, turn]
    return Call(load("take_suspects"), keys.base, args, _claim)


def renew(
    keys: QueueKeys,
    worker_id: str,
    held: Sequence[Delivery],
    checkpoints: Mapping[str, Checkpoint],
    *,
    lease_ms: int,
) -> Call[Renewal]:
    args: list[Arg] = [worker_id, lease_ms]
    for job in held:
        args += [job.job_id, job.stream, job.entry_id]
        saved = checkpoints.get(job.job_id)
        args += [saved.offset, saved.records, saved.meta] if saved else ["", "", ""]

    def parse(reply: list[bytes]) -> Renewal:
        verdicts = [(job.job_id, *word.decode().split("+")) for job, word in zip(held, reply, strict=True)]

        def having(word: str) -> frozenset[str]:
            return frozenset(job_id for job_id, *words in verdicts if word in words)

        return Renewal(having("lost"), having("cancelled"), having("expired"), having("stale"))

    return Call(load("renew"), keys.base, args, parse)


def finish(keys: QueueKeys, worker_id: str, ends: Sequence[Finished], records: Sequence[bytes]) -> Call[list[Outcome]]:
    args: list[Arg] = [worker_id]
    for end, record in zip(ends, records, strict=True):
        job, usage = end.delivery, end.result.usage
        args += (job.job_id, job.stream, job.entry_id, end.result.status, record)
        args += (usage.prompt_tokens, usage.completion_tokens, usage.gpu_ms)
    return Call(load("finish"), keys.base, args, lambda reply: [_outcome(word) for word in reply])


def retry(
    keys: QueueKeys, worker_id: str, job: Delivery, *, delay_ms: int, why: str, fault: str, counts: bool
) -> Call[Outcome]:
    args: list[Arg] = [worker_id, job.job_id, job.stream, job.entry_id, delay_ms, why, fault, int(counts)]
    return Call(load("retry"), keys.base, args, _outcome)


def bury(keys: QueueKeys, worker_id: str, job: Delivery, *, why: DeathCause, message: str) -> Call[Outcome]:
    args: list[Arg] = [worker_id, job.job_id, job.stream, job.entry_id, why, message]
    return Call(load("bury"), keys.base, args, _outcome)


def _outcome(reply: bytes) -> Outcome:
    return cast(Outcome, reply.decode())


def release(keys: QueueKeys, worker_id: str, jobs: Sequence[Delivery]) -> Call[int]:
    args: list[Arg] = [worker_id]
    for job in jobs:
        args += [job.job_id, job.stream, job.entry_id]
    return Call(load("release"), keys.base, args, int)


def disown(keys: QueueKeys, worker_id: str, *, turn: int, known: Sequence[tuple[str, str]]) -> Call[int]:
    args: list[Arg] = [worker_id, turn, *(f"{stream} {entry}" for stream, entry in known)]
    return Call(load("disown"), keys.base, args, int)


def publish(keys: QueueKeys, worker_id: str, job: Delivery, deltas: Sequence[TokenDelta]) -> Call[bool]:
    args: list[Arg] = [worker_id, job.job_id, job.entry_id]
    for delta in deltas:
        args += [delta.index, delta.offset, delta.num_tokens, delta.text]
    return Call(load("publish"), keys.base, args, bool)


def heartbeat(
    keys: QueueKeys, worker_id: str, *, lease_ms: int, version: int, fields: Mapping[str, str | int | float]
) -> Call[str]:
    """Gives the server's run id: another one after a restart or a failover, empty where it does not say."""
    args: list[Arg] = [worker_id, lease_ms, version]
    for name, value in fields.items():
        args += [name, str(value)]
    return Call(load("heartbeat"), keys.base, args, lambda reply: reply[1].decode())


def leave(keys: QueueKeys, worker_id: str) -> Call[int]:
    return Call(load("leave"), keys.base, [worker_id], int)


def lock(keys: QueueKeys, worker_id: str, *, hold_ms: int) -> Call[int]:
    """Gives the server's time in ms; 0 where another worker has the lock."""
    return Call(load("lock"), keys.base, [worker_id, hold_ms], int)


def reclaim(keys: QueueKeys, *, lease_ms: int, limit: int, cursor: str, seen_ms: int) -> Call[tuple[str, int]]:
    """`seen_ms` is the server's time when it was in reach for certain."""
    args: list[Arg] = [lease_ms, limit, cursor, seen_ms]
    return Call(load("reclaim"), keys.base, args, lambda reply: (reply[0].decode(), int(reply[1])))


def promote(keys: QueueKeys, *, limit: int) -> Call[int]:
    return Call(load("promote"), keys.base, [limit], int)


def expire(keys: QueueKeys, *, limit: int) -> Call[int]:
    return Call(load("expire"), keys.base, [limit], int)


def collect(keys: QueueKeys, *, cursor: str, limit: int, lease_ms: int) -> Call[tuple[str, int]]:
    args: list[Arg] = [cursor, limit, lease_ms]
    return Call(load("collect"), keys.base, args, lambda reply: (reply[0].decode(), int(reply[1])))


def cancel(keys: QueueKeys, job_id: str) -> Call[JobState | None]:
    return Call(load("cancel"), keys.base, [job_id], lambda reply: cast(JobState, reply.decode()) if reply else None)


def forget(keys: QueueKeys, job_id: str) -> Call[JobState | None]:
    """Gives the state that the job was in, None where it is unknown."""
    return Call(load("forget"), keys.base, [job_id], lambda reply: cast(JobState, reply.decode()) if reply else None)


_STATE = ("st", "ln", "tn", "tok", "att", "own", "acc", "run", "end", "dl", "cancel", "why", "b")
STATUS_FIELDS = (*_STATE, "pt", "ct", "gpu")


def read_status(queue: str, job_id: str, values: Sequence[bytes | None]) -> JobStatus | None:
    """A job's state from the STATUS_FIELDS of its hash; None where there is no hash."""
    if values[0] is None:
        return None
    text = [value.decode() if value is not None else "" for value in values]
    state, lane, tenant, tokens, attempt, worker, accepted, started, ended, deadline, cancel, reason, batch = text[
        : len(_STATE)
    ]
    prompt_tokens, completion_tokens, gpu_ms = (int(number or 0) for number in text[len(_STATE) :])
    return JobStatus(
        job_id=job_id,
        state=cast(JobState, state),
        queue=queue,
        lane=lane,
        tenant=tenant,
        tokens=int(tokens),
        attempt=int(attempt or 0),
        worker=worker,
        accepted_ms=int(accepted),
        started_ms=int(started or 0),
        ended_ms=int(ended or 0),
        deadline_ms=int(deadline or 0),
        cancel_requested=cancel == "1",
        reason=reason,
        batch=batch,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        gpu_ms=gpu_ms,
    )


def stats_commands(keys: QueueKeys) -> list[tuple[str, ...]]:
    """What `read_stats` reads the replies of."""
    return [("HGETALL", keys.stats), ("ZCARD", keys.delayed), ("XLEN", keys.dead), ("XLEN", keys.raw)]


def read_stats(counters: Mapping[bytes, bytes], delayed: int, dead: int, raw: int) -> QueueStats:
    """Counters of the hash `st`, and how many jobs are put off, dead, or not yet adopted."""
    values: dict[str, Any] = {name.decode(): int(value) for name, value in counters.items()}
    no_totals = ("running", "suspects", "groups")
    totals = {name: value for name, value in values.items() if ":" not in name and name not in no_totals}
    return QueueStats(
        queued={lane: values.get(f"queued:{lane}", 0) for lane in LANES},
        queued_tokens={lane: values.get(f"queued_tokens:{lane}", 0) for lane in LANES},
        running=values.get("running", 0),
        delayed=delayed,
        suspects=values.get("suspects", 0),
        dead=dead,
        raw=raw,
        totals=totals,
    )


def read_workers(worker_ids: Sequence[str], hashes: Sequence[Mapping[bytes, bytes]]) -> dict[str, dict[str, str]]:
    """The workers whose heartbeat is there."""
    return {
        worker_id: {name.decode(): value.decode() for name, value in fields.items()}
        for worker_id, fields in zip(worker_ids, hashes, strict=True)
        if fields
    }
