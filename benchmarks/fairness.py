"""
Shares of two tenants in windows of tokens, through a real server.

    python -m benchmarks.fairness

A worker of a few seats is imitated: each job that is pulled gets a token a step, and ends with as
many tokens as it really has, which is not what its producer estimated. Both tenants have jobs
waiting all the time, one of them a hundred times as many. A case is one JSON line: the first
tenant's share of the tokens in each window, and how far a tenant was from its due at most.
"""

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from pagemill.async_client import AsyncClient
from pagemill.connection import connect_async
from pagemill.consumer import Consumer
from pagemill.ids import uuid7
from pagemill.messages import Delivery, Finished, Room
from pagemill.schema import LANES, Job, Options, Result, Usage
from producers.local_redis import local_redis

TENANTS = ("first", "second")
PROMPT_TOKENS = 20


@dataclass(frozen=True, slots=True)
class Case:
    """
    Two tenants, by turns of their places here.

    Args:
        weights: Their weights.
        backlog: Jobs that each has waiting at all times.
        median: Tokens of an answer; sizes are lognormal.
        sigma: How uneven the sizes are: that of their logarithm.
        over: What each tenant's estimate is of the true size, by the median.
        spread: How far off single estimates are: sigma of their logarithm.
        seats: Jobs that run at a time.
        window: Tokens of one window.
        windows: How many are measured.
    """

    name: str
    weights: tuple[float, float] = (1.0, 1.0)
    backlog: tuple[int, int] = (3000, 30)
    median: tuple[float, float] = (60.0, 60.0)
    sigma: float = 0.8
    over: tuple[float, float] = (1.0, 1.0)
    spread: float = 0.0
    seats: int = 16
    window: int = 50_000
    windows: int = 4
    seed: int = 7

    @property
    def due(self) -> float:
        """The first tenant's share."""
        return self.weights[0] / sum(self.weights)

    def error(self, share: float) -> float:
        """How far the tenant that is worse off is from its share, as a fraction of it."""
        return abs(share - self.due) / min(self.due, 1 - self.due)


CASES = (
    Case("equal"),
    Case("equal, sizes differ", median=(30.0, 150.0)),
    Case("equal, estimates off", over=(1.5, 1.5), spread=0.7),
    Case("equal, one estimates 4 times as much", over=(4.0, 1.0), spread=0.5),
    Case("3 to 1", weights=(3.0, 1.0)),
    Case("3 to 1, estimates off", weights=(3.0, 1.0), over=(1.5, 1.5), spread=0.7),
    Case("1 to 3, one estimates 4 times as much", weights=(1.0, 3.0), over=(4.0, 1.0), spread=0.5),
)


class Sizes:
    """What the jobs of one tenant really take, and what is estimated of them."""

    def __init__(self, case: Case, place: int) -> None:
        self._rng = random.Random(case.seed * 2 + place)
        self._case = case
        self._place = place
        self._true: dict[str, int] = {}

    def job(self) -> Job:
        case, place = self._case, self._place
        tokens = max(1, round(case.median[place] * self._rng.lognormvariate(0, case.sigma)))
        guess = max(1, round(tokens * case.over[place] * self._rng.lognormvariate(0, case.spread)))
        job = Job(
            prompt="x" * 3 * PROMPT_TOKENS,
            lane="bulk",
            tenant=TENANTS[place],
            options=Options(max_tokens=guess),
        )
        self._true[job.id] = tokens
        return job

    def take(self, job_id: str) -> int:
        return self._true.pop(job_id)


class Worker:
    """Runs what it pulls, a token of each job a step, and counts whose tokens they are."""

    def __init__(self, consumer: Consumer, case: Case, sizes: Mapping[str, Sizes]) -> None:
        self._consumer = consumer
        self._case = case
        self._sizes = sizes
        self._running: list[tuple[Delivery, int, int]] = []
        self.tokens = dict.fromkeys(TENANTS, 0)
        self.pulled = dict.fromkeys(TENANTS, 0)

    async def turn(self) -> None:
        """Fill the seats, run until the first job ends, and publish what has ended."""
        room = Room(self._case.seats - len(self._running), 2**40)
        for job in await self._consumer.pull(rooms=[room] * len(LANES)):
            size = self._sizes[job.tenant].take(job.job_id)
            self.pulled[job.tenant] += 1
            self.tokens[job.tenant] += PROMPT_TOKENS
            self._running.append((job, size, size))
        steps = min(left for _, left, _ in self._running)
        for job, _, _ in self._running:
            self.tokens[job.tenant] += steps
        self._running = [(job, left - steps, size) for job, left, size in self._running]
        ended = [_finished(job, size) for job, left, size in self._running if not left]
        self._running = [one for one in self._running if one[1]]
        await self._consumer.finish(ended)


def _finished(job: Delivery, size: int) -> Finished:
    usage = Usage(prompt_tokens=PROMPT_TOKENS, completion_tokens=size)
    return Finished(job, Result(job_id=job.job_id, status="done", usage=usage))


async def measure(url: str, case: Case) -> list[float]:
    """The first tenant's share of the tokens of each window."""
    queue = f"fairness-{uuid7()}"
    sizes = {tenant: Sizes(case, place) for place, tenant in enumerate(TENANTS)}
    redis = connect_async(url)
    try:
        async with (
            AsyncClient(url, queue=queue, max_queued_tokens=0) as client,
            Consumer(redis, queue, worker_id="bench", lease_ms=60_000) as consumer,
        ):
            for tenant, weight in zip(TENANTS, case.weights, strict=True):
                await client.set_tenant(tenant, weight=weight)
            worker = Worker(consumer, case, sizes)
            submitted = dict.fromkeys(TENANTS, 0)
            marks = [dict(worker.tokens)]
            while len(marks) <= case.windows:
                for place, tenant in enumerate(TENANTS):
                    waiting = submitted[tenant] - worker.pulled[tenant]
                    if waiting <= case.backlog[place] // 2:
                        jobs = [sizes[tenant].job() for _ in range(case.backlog[place] - waiting)]
                        submitted[tenant] += len(await client.submit_many(jobs))
                await worker.turn()
                if sum(worker.tokens.values()) >= case.window * len(marks):
                    marks.append(dict(worker.tokens))
            return [_share(before, after) for before, after in pairwise(marks)]
    finally:
        await redis.aclose()


def _share(before: Mapping[str, int], after: Mapping[str, int]) -> float:
    first, second = (after[tenant] - before[tenant] for tenant in TENANTS)
    return first / (first + second)


def line(case: Case, shares: Sequence[float]) -> dict[str, object]:
    return {
        "case": case.name,
        **{name: value for name, value in asdict(case).items() if name not in ("name", "seed")},
        "due": round(case.due, 4),
        "shares": [round(share, 4) for share in shares],
        "furthest": round(max(map(case.error, shares)), 4),
    }


def main() -> None:
    with local_redis() as url:
        for case in CASES:
            print(json.dumps(line(case, asyncio.run(measure(url, case)))), flush=True)


if __name__ == "__main__":
    main()
