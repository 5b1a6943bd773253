"""A queue as its operator looks at it: the survey, its batches, and the newest of its dead letters."""

from collections.abc import Sequence
from dataclasses import dataclass

from redis.asyncio import Redis

from pagemill.batches import read_batch
from pagemill.keys import QueueKeys
from pagemill.messages import BatchStatus
from pagemill.scripts import Call, load, run_async, translated
from pagemill.survey import Survey, read_survey

# all but what its owner wrote into it, which may be large
_BATCH_FIELDS = (
    *("tn", "total", "done", "failed", "cancelled", "expired", "prompt_tokens", "completion_tokens", "gpu_ms"),
    *("created", "sealed", "ended", "cancel", "pace", "pace_at", "pace_from"),
)


@dataclass(frozen=True, slots=True)
class LetterHead:
    """
    A dead letter without its job: nothing of a prompt.

    Args:
        why, message, at_ms, attempt, worker: As of DeadLetter.
    """

    entry_id: str
    job_id: str
    why: str
    message: str
    at_ms: int
    worker: str
    lane: str
    tenant: str
    batch: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Overview:
    """
    Args:
        batches: The newest, newest first; without their metadata and webhooks.
        num_batches: How many are known in all; some of them may have expired.
        letters: The newest dead letters, newest first.
    """

    survey: Survey
    batches: tuple[BatchStatus, ...]
    num_batches: int
    letters: tuple[LetterHead, ...]


async def read_overview(
    redis: Redis, keys: QueueKeys, *, max_batches: int, max_letters: int, last: Overview | None = None
) -> Overview:
    """
    Look at a queue, in five round trips, and a sixth where there are other dead letters than before.

    Args:
        last: What was seen before.

    Raises:
        QueueUnavailable: the server cannot be reached, or refuses.
    """
    survey = await read_survey(redis, keys)
    with translated():
        async with redis.pipeline(transaction=False) as pipeline:
            pipeline.execute_command("ZREVRANGE", keys.batches, 0, max_batches - 1)
            pipeline.execute_command("ZCARD", keys.batches)
            names, num_batches = await pipeline.execute()
        ids = [name.decode() for name in names]
        async with redis.pipeline(transaction=False) as pipeline:
            for batch_id in ids:
                pipeline.execute_command("HMGET", keys.batch(batch_id), *_BATCH_FIELDS)
            hashes = await pipeline.execute()
    # one that has expired may still be named
    found = [
        read_batch(keys, batch_id, {name.encode(): value for name, value in fields.items() if value is not None})
        for batch_id, values in zip(ids, hashes, strict=True)
        if (fields := dict(zip(_BATCH_FIELDS, values, strict=True)))["tn"] is not None
    ]
    if last is not None and _mark(last.survey) == _mark(survey):
        letters = last.letters
    else:
        letters = await run_async(redis, newest_letters(keys, max_letters)) if survey.stats.dead else ()
    return Overview(survey, tuple(found), num_batches, letters)


def newest_letters(keys: QueueKeys, limit: int) -> Call[tuple[LetterHead, ...]]:
    """The newest dead letters, newest first."""
    return Call(load("letters"), keys.base, [limit], lambda reply: tuple(map(_read_head, reply)))


def _read_head(row: Sequence[bytes]) -> LetterHead:
    entry_id, job_id, why, message, at, worker, lane, tenant, batch, attempt = (
        part.decode(errors="replace") for part in row
    )
    return LetterHead(entry_id, job_id, why, message, int(at or 0), worker, lane, tenant, batch, int(attempt or 0))


def _mark(survey: Survey) -> tuple[int, ...]:
    """Another one where letters came or went: they are not read again and again, as they may be large."""
    totals = survey.stats.totals
    return survey.stats.dead, *(totals.get(name, 0) for name in ("buried", "requeued"))
