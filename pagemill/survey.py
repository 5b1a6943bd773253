"""A queue as a whole, as metrics and autoscalers want it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from pagemill import calls
from pagemill.keys import QueueKeys
from pagemill.messages import QueueStats
from pagemill.schema import LANES
from pagemill.scripts import Call, load, run_async, translated

# deadlines are counted up to each of these: 15 s to 5 days, each 1.5 times the one before
HORIZONS_S = tuple(round(15 * 1.5**step) for step in range(26))

# as in lua/common.lua
FADE_S = 30.0
# workers whose heartbeats are read
MAX_WORKERS = 256

MINUTE_MS = 60_000
# whole ones that are told; the ring in Redis has room for a few more
NUM_MINUTES = 60


@dataclass(frozen=True, slots=True)
class Minute:
    """
    What workers ended in one minute; tokens count when their job ends, not when they are generated.

    Args:
        at_ms: When it began, by the server's clock.
        seconds: How much of it is over: less than 60 for the one that runs.
    """

    at_ms: int
    seconds: float
    jobs: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Survey:
    """
    A moment of a queue, by the server's clock.

    Args:
        oldest_age_s: How long the job has waited that has waited for longest, by lane; 0 where none waits.
            Of lanes with more than 32 tenants that wait, the first and the last to be served are looked at.
        deadline_s: Time until the nearest deadline of jobs that have not ended, below 0 where it has passed;
            None where no job has one.
        due: Jobs that have not ended and whose deadlines come within each of `HORIZONS_S`.
        drain_tokens_per_s: Estimated tokens of jobs that ended lately, a second.
        retried: Jobs that were put off, by kind of fault, ever.
        cancelled_waiting: Jobs that were cancelled while no worker had them, ever.
        tenant_tokens: Tokens that the jobs of each tenant took, ever.
        workers: Heartbeats of the workers that live.
        server: What INFO says of memory, persistence and statistics; empty where it is refused.
        now_ms: The server's clock.
        minutes: The last hour and the running minute, oldest first; those in which nothing ended too.
    """

    stats: QueueStats
    oldest_age_s: dict[str, float]
    deadline_s: float | None
    due: tuple[int, ...]
    drain_tokens_per_s: float
    retried: dict[str, int]
    cancelled_waiting: int
    tenant_tokens: dict[str, int]
    workers: dict[str, dict[str, str]]
    server: dict[str, str]
    now_ms: int = 0
    minutes: tuple[Minute, ...] = ()

    @property
    def queued(self) -> int:
        """Jobs that wait in a lane."""
        return sum(self.stats.queued.values())

    @property
    def queued_tokens(self) -> int:
        """Their estimated tokens."""
        return sum(self.stats.queued_tokens.values())


async def read_survey(redis: Redis, keys: QueueKeys) -> Survey:
    """
    Look at a queue, in three round trips.

    Raises:
        QueueUnavailable: the server cannot be reached, or refuses.
    """
    infos = [("INFO", section) for section in ("memory", "persistence", "stats")]
    with translated():
        async with redis.pipeline(transaction=False) as pipeline:
            newest = ("ZREVRANGE", keys.workers, 0, MAX_WORKERS - 1)
            for command in (*calls.stats_commands(keys), ("HGETALL", keys.minutes), newest, *infos):
                pipeline.execute_command(*command)
            *replies, ring, worker_ids, memory, persistence, statistics = await pipeline.execute(raise_on_error=False)
        # INFO alone may be refused
        for reply in (*replies, ring, worker_ids):
            if isinstance(reply, Exception):
                raise reply
        names = [name.decode() for name in worker_ids]
        async with redis.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.execute_command("HGETALL", keys.worker(name))
            workers = calls.read_workers(names, await pipeline.execute())
    horizons_ms = [1000 * horizon for horizon in HORIZONS_S]
    looked = await run_async(redis, Call(load("survey"), keys.base, horizons_ms, _as_is))
    info = {str(name): str(value) for part in (memory, persistence, statistics) for name, value in _pairs(part)}
    return make_survey(replies, looked, workers, info, ring)


def make_survey(
    replies: Sequence[Any],
    looked: Sequence[Any],
    workers: dict[str, dict[str, str]],
    info: dict[str, str],
    ring: Mapping[bytes, bytes],
) -> Survey:
    """
    Args:
        replies: To `calls.stats_commands`.
        looked: The reply of survey.lua.
        ring: The hash of minutes.
    """
    now_ms, oldest, nearest_ms, due = looked
    counters: Mapping[str, int] = {name.decode(): int(value) for name, value in replies[0].items()}
    return Survey(
        stats=calls.read_stats(*replies),
        oldest_age_s={
            lane: max(0.0, (now_ms - accepted) / 1000) if accepted else 0.0
            for lane, accepted in zip(LANES, oldest, strict=True)
        },
        deadline_s=(nearest_ms - now_ms) / 1000 if nearest_ms else None,
        due=tuple(due),
        drain_tokens_per_s=drain_rate(counters, now_ms),
        retried=_behind(counters, "retried:"),
        cancelled_waiting=counters.get("cancelled:waiting", 0),
        tenant_tokens=_behind(counters, "tenant_tokens:"),
        workers=workers,
        server=info,
        now_ms=now_ms,
        minutes=read_minutes(ring.values(), now_ms),
    )


def read_minutes(ring: Iterable[bytes], now_ms: int) -> tuple[Minute, ...]:
    """The last hour, from what FINISH wrote of its minutes; those of an hour before it do not count."""
    known = {minute: ended for minute, *ended in (map(int, field.split()) for field in ring)}
    running = now_ms // MINUTE_MS
    return tuple(
        Minute(minute * MINUTE_MS, min(60.0, now_ms / 1000 - 60 * minute), *known.get(minute, ()))
        for minute in range(running - NUM_MINUTES, running + 1)
    )


def drain_rate(counters: Mapping[str, int], now_ms: int) -> float:
    """
    Estimated tokens a second of jobs that ended lately: what admission.lua tells a busy client by.
    """
    ended = sum(counters.get(f"drain:{lane}", 0) for lane in LANES)
    ended_now = ended * _faded(counters.get("drain:at", now_ms), now_ms)
    span_s = FADE_S * (1 - _faded(counters.get("drain:from", now_ms), now_ms))
    return ended_now / max(1.0, span_s)


def _faded(at_ms: int, now_ms: int) -> float:
    return math.exp(-max(0, now_ms - at_ms) / 1000 / FADE_S)


def _behind(counters: Mapping[str, int], prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): value for name, value in counters.items() if name.startswith(prefix)}


def _as_is(reply: Any) -> Sequence[Any]:
    looked: Sequence[Any] = reply
    return looked


def _pairs(reply: Any) -> Sequence[tuple[Any, Any]]:
    # redis-py parses INFO; a managed server may refuse it
    return list(reply.items()) if isinstance(reply, dict) else []
