"""Jobs that were given up, kept with their reason: read, run anew, or thrown away."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from pagemill.calls import JOBS_A_CALL, in_chunks
from pagemill.errors import InvalidJob, JobNotFound
from pagemill.keys import QueueKeys
from pagemill.messages import Accepted, DeathCause, JobState
from pagemill.scripts import Arg, Call, load

# read in one command: a payload may have megabytes
PAGE = 32

_ENTRY_ID = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")

# as XRANGE gives it: its id, and its fields
StreamEntry = tuple[bytes, Mapping[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """
    A job that was given up.

    Args:
        entry_id: Names the letter; a job that dies again gets another.
        job_id: Of what never was a job, the id under which its writer finds the failure.
        why: "poison": its worker died twice while it ran alone. "retries": all attempts failed.
            "lapses": it was lost with too many workers. "garbage": what came was no job.
        at_ms: When it was given up, by the server's clock.
        crashes: Times that its worker died while it ran alone.
        worker: Who had it last.
        timeout_ms: How long it was given from its acceptance on; 0 for no deadline.
        payload: The job as JSON; None where `payload_ref` says which object holds it.
        raw: What came, where it never was a job.
        can_be_requeued: It is a job, or an entry that may be judged anew.
    """

    entry_id: str
    job_id: str
    why: DeathCause
    message: str
    at_ms: int
    attempt: int
    crashes: int
    lapses: int
    worker: str
    lane: str
    tenant: str
    tokens: int
    result_ttl_s: int
    timeout_ms: int
    seed: int
    batch: str
    metadata: dict[str, str] = field(default_factory=dict)
    payload: bytes | None = field(default=None, repr=False)
    payload_ref: str | None = None
    raw: bytes | None = field(default=None, repr=False)
    can_be_requeued: bool = True


def read_letter(entry: StreamEntry) -> DeadLetter:
    entry_id, fields = entry

    def text(name: str) -> str:
        return fields.get(name.encode(), b"").decode(errors="replace")

    def number(name: str) -> int:
        return int(text(name) or 0)

    return DeadLetter(
        entry_id=entry_id.decode(),
        job_id=text("j"),
        why=cast(DeathCause, text("why")),
        message=text("msg"),
        at_ms=number("at"),
        attempt=number("att"),
        crashes=number("crash"),
        lapses=number("lapses"),
        worker=text("worker"),
        lane=text("ln"),
        tenant=text("tn"),
        tokens=number("tok"),
        result_ttl_s=number("ttl"),
        timeout_ms=number("timeout"),
        seed=number("seed"),
        batch=text("b"),
        metadata=json.loads(text("md") or "{}"),
        payload=fields.get(b"d"),
        payload_ref=text("ref") or None,
        raw=fields.get(b"raw"),
        can_be_requeued=b"raw" not in fields or b"entry" in fields,
    )


def one_command(keys: QueueKeys, entry_id: str) -> tuple[str, ...]:
    return "XRANGE", keys.dead, checked(entry_id), entry_id


def read_one(entry_id: str, entries: Sequence[StreamEntry]) -> DeadLetter:
    if not entries:
        raise not_found(entry_id)
    return read_letter(entries[0])


class Reading:
    """
    Reads letters page by page, oldest first.

    Args:
        after: The letter before the first one; "-" begins with the oldest.
    """

    def __init__(self, keys: QueueKeys, limit: int, after: str) -> None:
        self.letters: list[DeadLetter] = []
        self._keys = keys
        self._limit = limit
        self._after = after if after == "-" else f"({checked(after)}"
        self._is_over = limit <= 0

    @property
    def next_command(self) -> tuple[str | int, ...] | None:
        """What to ask the server; None when all is read."""
        if self._is_over:
            return None
        return "XRANGE", self._keys.dead, self._after, "+", "COUNT", min(PAGE, self._limit - len(self.letters))

    def feed(self, entries: Sequence[StreamEntry]) -> None:
        self.letters += map(read_letter, entries)
        self._is_over = len(entries) < PAGE or len(self.letters) >= self._limit
        if self.letters:
            self._after = f"({self.letters[-1].entry_id}"


def requeue(keys: QueueKeys, entry_id: str) -> Call[Accepted]:
    def parse(reply: list[bytes]) -> Accepted:
        word, *rest = (part.decode() for part in reply)
        if word == "GONE":
            raise not_found(entry_id)
        if word == "GARBAGE":
            raise InvalidJob("invalid_job", f"dead letter {entry_id} holds no job: submit what was meant")
        if word == "DUP":
            return Accepted(rest[0], cast(JobState, rest[1]), duplicate=True, payload_ref=rest[2])
        return Accepted(rest[0], "queued", duplicate=False, payload_ref=rest[1])

    return Call(load("requeue"), keys.base, [checked(entry_id)], parse)


def purge(keys: QueueKeys, entry_ids: Iterable[str]) -> list[Call[int]]:
    # all of them first: where one can be no id, nothing is purged
    ids: list[Arg] = [checked(entry_id) for entry_id in entry_ids]
    return [Call(load("purge"), keys.base, ["", 0, *part], int) for part in in_chunks(ids)]


def purge_oldest(keys: QueueKeys, before_ms: int) -> Call[int]:
    """Purges some of the letters from before that time; repeated until none is left."""
    # an id without its second half stands for all of that millisecond
    return Call(load("purge"), keys.base, [max(0, before_ms - 1), JOBS_A_CALL], int)


def cutoff_ms(server_time: tuple[int, int], older_than_s: float) -> int:
    """
    The `before_ms` of letters that are so old, of the reply to TIME: the server's clock names the letters.
    """
    seconds, microseconds = server_time
    # this millisecond is over for who asks: what was given up in it is as old
    return 1000 * seconds + microseconds // 1000 - round(1000 * older_than_s) + 1


def checked(entry_id: str) -> str:
    """
    Raises:
        JobNotFound: no letter can have that id.
    """
    if not _ENTRY_ID.fullmatch(entry_id):
        raise not_found(entry_id)
    return entry_id


def not_found(entry_id: str) -> JobNotFound:
    return JobNotFound(f"there is no dead letter {entry_id}: it was requeued or purged, or never was")
