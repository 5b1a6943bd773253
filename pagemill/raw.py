"""
Jobs that any program may write: one XADD of an entry with the job as JSON.

Workers adopt such entries (docs/wire.md). An entry is one worker's from when it is taken until it
is adopted or refused, and a dead worker's become another's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from re import fullmatch
from typing import Any, NamedTuple

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from pagemill.calls import Answer, Submission, in_chunks, read_answer
from pagemill.connection import send_once
from pagemill.errors import Busy
from pagemill.keys import QueueKeys
from pagemill.schema import MAX_PAYLOAD_BYTES, NAME, Failure
from pagemill.scripts import Arg, Call, load, run_async, run_many_async, translated

# one TAKE_RAW looks at so many entries, and stops after so many bytes
TAKE_LOOKS = 64
TAKE_BYTES = MAX_PAYLOAD_BYTES
# readers that may die of an entry
MAX_READERS = 3

GROUP = "workers"
# the job, and what is its id where it says none itself: a dead letter that is put back keeps its name
FIELD, ID_FIELD = b"d", b"id"
MAX_ENTRY_BYTES = MAX_PAYLOAD_BYTES + 256


@dataclass(frozen=True, slots=True)
class RawEntry:
    """
    An entry that somebody wrote.

    Args:
        entry_id: Its id in the stream.
        fields: Names and values in turn, as they were given.
    """

    entry_id: str
    fields: tuple[bytes, ...]

    @property
    def job_id(self) -> str:
        """Its job's id, where the job says none: whoever wrote the entry knows it from XADD's reply."""
        given = self.fields[3].decode(errors="replace") if self.fields[2:3] == (ID_FIELD,) else ""
        return given if fullmatch(NAME, given) else f"raw-{self.entry_id}"

    @property
    def payload(self) -> bytes | None:
        """The job as JSON; None where there is more or less than that, and a name of the job's."""
        names = self.fields[::2]
        return self.fields[1] if names in ((FIELD,), (FIELD, ID_FIELD)) else None


class Taken(NamedTuple):
    """Entries in this worker's hands, and how many of them nobody had before."""

    entries: list[RawEntry]
    num_new: int


class Adoption(NamedTuple):
    """A raw entry, and the job that it is to become, ready for the wire."""

    entry_id: str
    submission: Submission


class Refusal(NamedTuple):
    """
    A raw entry that cannot become a job, and the failure that the job which it names ends with.

    Args:
        version: Where it is of a later wire format: a worker of that version may adopt it.
    """

    entry_id: str
    job_id: str
    failure: Failure
    version: int = 0


class RawEntries:
    """
    One worker at the stream of raw entries.

    All methods raise QueueUnavailable, and may be repeated then: which entries are in this worker's
    hands is known by the server alone.
    """

    def __init__(self, redis: Redis, keys: QueueKeys, worker_id: str) -> None:
        self._redis = redis
        self._keys = keys
        self._worker_id = worker_id
        self._page = "-"

    async def take(self, *, with_new: bool = True) -> Taken:
        """
        The next entries, also those that were taken before and neither adopted nor refused.

        What is too large to be a job, and what its readers died of, is refused on the way. Where much
        waits in this worker's hands, each call brings another part of it.
        """
        self._page, taken = await run_async(
            self._redis, _take(self._keys, self._worker_id, page=self._page, with_new=with_new)
        )
        return taken

    async def adopt(self, adoptions: Sequence[Adoption], max_queued_tokens: int) -> list[Answer | None]:
        """
        Make jobs of entries, each once; None where another worker did it. Answers in order.

        After any other answer than Accepted the entry stays in this worker's hands.
        """
        calls = [_adopt(self._keys, part, max_queued_tokens) for part in in_chunks(adoptions)]
        answers = await run_many_async(self._redis, calls)
        return [answer for part in answers for answer in part]

    async def refuse(self, refusals: Sequence[Refusal]) -> int:
        """
        Put entries to the dead letters, or into the hands of a newer worker that may know them.

        Returns:
            How many went to the dead letters.
        """
        calls = [_refuse(self._keys, self._worker_id, part) for part in in_chunks(refusals)]
        return sum(await run_many_async(self._redis, calls))

    async def wait(self, timeout_s: float) -> None:
        """
        Return when there may be something to take, and after `timeout_s` at the latest.
        """
        # what it reads is this worker's, and the next `take` brings it, whatever became of this reply
        block_ms = max(1, round(timeout_s * 1000))
        command = ("XREADGROUP", "GROUP", GROUP, self._worker_id, "BLOCK", block_ms, "COUNT", 1)
        with translated():
            try:
                await send_once(self._redis, *command, "STREAMS", self._keys.raw, ">", timeout_s=timeout_s + 5)
            except ResponseError as error:
                # the stream or its group went away, or a failover: the next `take` mends it, or says what is the matter
                if not str(error).startswith(("NOGROUP", "UNBLOCKED")):
                    raise


def _take(keys: QueueKeys, worker_id: str, *, page: str, with_new: bool) -> Call[tuple[str, Taken]]:
    args: list[Arg] = [worker_id, TAKE_LOOKS, TAKE_BYTES, MAX_ENTRY_BYTES, MAX_READERS, page, int(with_new)]

    def parse(reply: list[Any]) -> tuple[str, Taken]:
        next_page, num_new, *rows = reply
        entries = [RawEntry(entry_id.decode(), tuple(fields)) for entry_id, fields in rows]
        return next_page.decode(), Taken(entries, num_new)

    return Call(load("take_raw"), keys.base, args, parse)


def _adopt(keys: QueueKeys, adoptions: Sequence[Adoption], max_queued_tokens: int) -> Call[list[Answer | None]]:
    args: list[Arg] = [max_queued_tokens]
    for entry_id, submission in adoptions:
        args += (entry_id, *submission)

    def parse(replies: list[list[bytes] | int | bytes]) -> list[Answer | None]:
        return [
            None if isinstance(reply, bytes) else read_answer(keys.queue, one.submission, reply)
            for one, reply in zip(adoptions, replies, strict=True)
        ]

    def when_full() -> list[Answer | None]:
        return [Busy("the queue's server is full", reason="memory", retry_after_s=5.0) for _ in adoptions]

    return Call(load("adopt"), keys.base, args, parse, when_full)


def _refuse(keys: QueueKeys, worker_id: str, refusals: Sequence[Refusal]) -> Call[int]:
    args: list[Arg] = [worker_id]
    for entry_id, job_id, failure, version in refusals:
        args += (entry_id, job_id, failure.code, failure.message.encode(errors="replace"), version)
    return Call(load("refuse_raw"), keys.base, args, int)
