"""
Adopts the jobs that programs write into the queue's raw stream without our client.

Any bytes may come. What cannot become a job goes to the dead letters with its bytes and a reason;
what the queue has no room for stays, and is tried again. The loop keeps nothing: which entries
are in its hands is read from the server each time.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from re import fullmatch
from typing import Any, NamedTuple

import structlog
from pydantic_core import from_json

from pagemill.calls import Submission
from pagemill.client_core import prepare
from pagemill.errors import Busy, Conflict, InvalidJob, NewerVersion, PagemillError, QueueUnavailable
from pagemill.raw import Adoption, RawEntries, RawEntry, Refusal
from pagemill.schema import NAME, Failure, Job
from pagemill.versions import SCHEMA_VERSION

log = structlog.get_logger(__name__)

# how long an idle loop waits before it looks for what dead readers left
IDLE_WAIT_S = 1.0
# it costs little to ask again whether there is room, and entries of other tenants may wait behind
MAX_BUSY_S = 1.0
MAX_PAUSE_S = 5.0


class Judged(NamedTuple):
    """What entries are: jobs, and what cannot become one."""

    adoptions: list[Adoption]
    refusals: list[Refusal]


class RawIntake:
    """
    Takes raw entries, and has them adopted or refused.

    Args:
        pool: Parses; an entry may have megabytes.
        version: The newest wire format that this worker takes.
        max_queued_tokens: Entries are left where they are while more tokens wait.
    """

    def __init__(self, entries: RawEntries, pool: ThreadPoolExecutor, *, version: int, max_queued_tokens: int) -> None:
        self._entries = entries
        self._version = version
        self._pool = pool
        self._max_queued_tokens = max_queued_tokens

        # all the mutable state there is: there was no room for anybody, so that new ones are left alone
        self._is_full = False

    async def run(self) -> None:
        """Adopt what comes, until cancelled."""
        pause_s = 0.1
        while True:
            try:
                await asyncio.sleep(min(MAX_BUSY_S, await self._turn()))
                pause_s = 0.1
            except QueueUnavailable as error:
                log.warning("raw.failed", error=str(error), retry_s=pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(MAX_PAUSE_S, 2 * pause_s)

    async def _turn(self) -> float:
        """Deal with what is there, or wait for something; returns for how long nothing more can be done."""
        entries, num_new = await self._entries.take(with_new=not self._is_full)
        if not entries and not self._is_full:
            await self._entries.wait(IDLE_WAIT_S)
            return 0.0
        look = partial(judge, entries, self._version)
        adoptions, refusals = await asyncio.get_running_loop().run_in_executor(self._pool, look)
        answers = await self._entries.adopt(adoptions, self._max_queued_tokens)
        own_ids = {entry.entry_id: entry.job_id for entry in entries}
        busy: list[Busy] = []
        for (entry_id, submission), answer in zip(adoptions, answers, strict=True):
            match answer:
                case Busy():
                    busy.append(answer)
                case Conflict():
                    # the id that it gave is another job's, whose result must not be touched
                    refusals.append(_refusal(entry_id, own_ids[entry_id], "invalid_job", str(answer)))
                case PagemillError():
                    refusals.append(_refusal(entry_id, submission.job_id, "invalid_job", str(answer)))
        if refusals and (num_refused := await self._entries.refuse(refusals)):
            # the reasons stand in the dead letters: they may quote what somebody wrote
            log.warning("raw.refused", entries=num_refused, first=refusals[0].entry_id)
        # where it is one tenant or lane that is full, what is behind is read on: it may be another's
        self._is_full = any(answer.reason in ("memory", "tokens") for answer in busy)
        may_go_on = len(busy) < len(entries) or (num_new and not self._is_full)
        return min((answer.retry_after_s for answer in busy), default=0.0) if not may_go_on else 0.0


def judge(entries: Sequence[RawEntry], version: int = SCHEMA_VERSION) -> Judged:
    """Read each entry by itself, for a worker of that version; none is left out."""
    judged = Judged([], [])
    for entry in entries:
        try:
            judged.adoptions.append(Adoption(entry.entry_id, _submission(entry, version)))
        except NewerVersion as error:
            refusal = _refusal(entry.entry_id, _id_in(entry), error.code, str(error))
            judged.refusals.append(refusal._replace(version=error.version))
        except InvalidJob as error:
            judged.refusals.append(_refusal(entry.entry_id, _id_in(entry), error.code, str(error)))
        except Exception as error:
            # a fault of ours, met on one entry: that entry pays, the others go on
            log.exception("raw.not_read", entry=entry.entry_id)
            why = f"the worker could not read the entry: {type(error).__name__}: {error}"
            judged.refusals.append(_refusal(entry.entry_id, entry.job_id, "invalid_job", why))
    return judged


def _submission(entry: RawEntry, version: int) -> Submission:
    if entry.payload is None:
        names = ", ".join(repr(name[:40])[1:] for name in entry.fields[:16:2])
        raise InvalidJob("invalid_job", f"the entry has the fields {names}: want d alone, the job as JSON")
    job = Job.parse(entry.payload, version)
    if "id" not in job.model_fields_set:
        job = job.model_copy(update={"id": entry.job_id})
    return prepare(job, version)


def _refusal(entry_id: str, job_id: str, code: str, message: str) -> Refusal:
    return Refusal(entry_id, job_id, Failure.model_validate({"code": code, "message": message}))


def _id_in(entry: RawEntry) -> str:
    """The id that the entry says although it cannot be read as a job, else the one that it gets."""
    try:
        value: Any = from_json(entry.payload or b"")
    except ValueError:
        return entry.job_id
    found = value.get("id") if isinstance(value, dict) else None
    return found if isinstance(found, str) and fullmatch(NAME, found) else entry.job_id
