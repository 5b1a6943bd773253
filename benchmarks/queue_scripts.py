"""Rates and latencies of the queue's scripts, each beside the least that a Redis stream could do."""

import asyncio
import statistics
import time
from collections.abc import Sequence
from typing import Any

from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from pagemill.calls import JOBS_A_CALL, in_chunks
from pagemill.client import Client
from pagemill.client_core import CHUNK
from pagemill.connection import connect, connect_async
from pagemill.consumer import Consumer
from pagemill.messages import Delivery, Finished, Room
from pagemill.schema import LANES, Completion, Job, Options, Result, Usage

_PULL = 64
_ROUNDS = 120
_REPEATS = 5
_STREAM = "bare"
_GROUP = "g"

# claim entries and read their payloads: what any puller must do
_BARE_PULL = """
local reply = redis.call('XREADGROUP', 'GROUP', ARGV[1], 'w', 'COUNT', ARGV[2], 'STREAMS', KEYS[1], '>')
local rows = {}
for _, entry in ipairs(reply and reply[1][2] or {}) do
  rows[#rows + 1] = { entry[1], redis.call('GET', 'bare:d:' .. entry[2][2]) }
end
return rows
"""

# acknowledge, delete and write the result: what any finish must do
_BARE_FINISH = """
for i = 2, #ARGV, 3 do
  redis.call('XACK', KEYS[1], ARGV[1], ARGV[i])
  redis.call('XDEL', KEYS[1], ARGV[i])
  redis.call('DEL', 'bare:d:' .. ARGV[i + 1])
  redis.call('SET', 'bare:r:' .. ARGV[i + 1], ARGV[i + 2], 'EX', 86400)
end
"""


def submit_rate(url: str, num_jobs: int, prompt_chars: int) -> dict[str, Any]:
    """Jobs a second of submit_many and of pipelined XADDs with the same payloads, in turns."""
    rates: dict[str, list[float]] = {"submit_many": [], "xadd": []}
    with Client(url, queue="submit") as client, connect(url) as redis:
        for _ in range(_REPEATS):
            jobs = [_job(prompt_chars) for _ in range(num_jobs)]
            begin = time.perf_counter()
            client.submit_many(jobs)
            rates["submit_many"].append(num_jobs / (time.perf_counter() - begin))
            begin = time.perf_counter()
            _add_all(redis, jobs)
            rates["xadd"].append(num_jobs / (time.perf_counter() - begin))
    found = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "queue": "submit",
        "jobs": num_jobs,
        "payload_bytes": len(_job(prompt_chars).payload()),
        "jobs_s": {name: round(rate) for name, rate in found.items()},
        "submit_over_xadd": round(found["submit_many"] / found["xadd"], 3),
    }


def _add_all(redis: Redis, jobs: Sequence[Job]) -> None:
    # the payload is made here too: a producer without us must write its JSON as well
    for start in range(0, len(jobs), CHUNK):
        with redis.pipeline(transaction=False) as pipeline:
            for job in jobs[start : start + CHUNK]:
                pipeline.execute_command("XADD", _STREAM, "*", "d", job.payload())
            pipeline.execute()


def latencies(url: str, backlog: int, prompt_chars: int) -> dict[str, Any]:
    """Milliseconds of PULL and FINISH with a backlog behind them, ours and bare."""
    with Client(url, queue="latency", max_queued_tokens=2**53) as client:
        client.submit_many(_job(prompt_chars) for _ in range(backlog))
    found = asyncio.run(_measure(url, backlog, prompt_chars))
    return {
        "queue": "scripts",
        "backlog": backlog,
        "payload_bytes": len(_job(prompt_chars).payload()),
        "pull_of": _PULL,
        "finish_of": JOBS_A_CALL,
        "ms": {name: _percentiles(values) for name, values in found.items()},
        "p50_over_bare": {
            name: round(statistics.median(found[name]) / statistics.median(found[f"bare_{name}"]), 2)
            for name in ("pull", "finish")
        },
    }


async def _measure(url: str, backlog: int, prompt_chars: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"pull": [], "bare_pull": [], "finish": [], "bare_finish": []}
    redis = connect_async(url)
    try:
        bare = await _Bare.prepare(redis, backlog, prompt_chars)
        async with Consumer(redis, "latency", worker_id="bench", lease_ms=60_000) as consumer:
            for _ in range(min(_ROUNDS, backlog // _PULL)):
                begin = time.perf_counter()
                pulled = await consumer.pull(rooms=[Room(_PULL, 2**40)] * len(LANES))
                found["pull"].append(time.perf_counter() - begin)
                begin = time.perf_counter()
                rows = await bare.pull()
                found["bare_pull"].append(time.perf_counter() - begin)
                for part, bare_part in zip(in_chunks(pulled), in_chunks(rows), strict=True):
                    ends = [_finished(delivery) for delivery in part]
                    begin = time.perf_counter()
                    await consumer.finish(ends)
                    found["finish"].append(time.perf_counter() - begin)
                    begin = time.perf_counter()
                    await bare.finish(bare_part, ends)
                    found["bare_finish"].append(time.perf_counter() - begin)
    finally:
        await redis.aclose()
    return found


class _Bare:
    """A stream, payloads beside it, and two scripts of a few lines."""

    def __init__(self, redis: AsyncRedis, pull: str, finish: str) -> None:
        self._redis = redis
        self._pull = pull
        self._finish = finish

    @classmethod
    async def prepare(cls, redis: AsyncRedis, backlog: int, prompt_chars: int) -> "_Bare":
        await redis.execute_command("XGROUP", "CREATE", _STREAM, _GROUP, "0", "MKSTREAM")
        payload = _job(prompt_chars).payload()
        for start in range(0, backlog, CHUNK):
            async with redis.pipeline(transaction=False) as pipeline:
                for index in range(start, min(start + CHUNK, backlog)):
                    pipeline.execute_command("SET", f"bare:d:{index}", payload)
                    pipeline.execute_command("XADD", _STREAM, "*", "id", str(index), "tok", "300")
                await pipeline.execute()
        pull = await redis.execute_command("SCRIPT", "LOAD", _BARE_PULL)
        return cls(redis, pull, await redis.execute_command("SCRIPT", "LOAD", _BARE_FINISH))

    async def pull(self) -> list[Any]:
        reply: list[Any] = await self._redis.execute_command("EVALSHA", self._pull, 1, _STREAM, _GROUP, _PULL)
        return reply

    async def finish(self, rows: Sequence[Any], ends: Sequence[Finished]) -> None:
        words: list[Any] = []
        for (entry_id, _), end in zip(rows, ends, strict=True):
            words += (entry_id, end.delivery.job_id, end.result.payload())
        await self._redis.execute_command("EVALSHA", self._finish, 1, _STREAM, _GROUP, *words)


def _job(prompt_chars: int) -> Job:
    return Job(prompt="x" * prompt_chars, options=Options(max_tokens=64))


def _finished(delivery: Delivery) -> Finished:
    text = "an answer of some length. " * 10
    result = Result(
        job_id=delivery.job_id,
        status="done",
        completions=(Completion(index=0, text=text, finish_reason="length", token_ids=tuple(range(64))),),
        usage=Usage(prompt_tokens=200, completion_tokens=64),
    )
    return Finished(delivery, result)


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"p50": round(cuts[49] * 1e3, 3), "p99": round(cuts[98] * 1e3, 3)}
