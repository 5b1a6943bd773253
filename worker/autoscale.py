"""
How many workers a queue wants, and why; for an autoscaler, and for people.

What is asked is a plain function of what the queue says. Work is counted in estimated tokens, as the
backlog is, and so is what a worker gets done in a second.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pagemill.survey import HORIZONS_S, Survey

# a fleet has to be busy for so long before its rate is one to plan with
BUSY_S = 30.0


@dataclass(frozen=True, slots=True)
class Demand:
    """
    What a queue wants done.

    Args:
        queued_tokens: Estimated tokens of the jobs that wait.
        queued_jobs: Jobs that wait.
        other_jobs: Jobs in workers' hands, put off, set apart, or not adopted yet.
        num_workers: Workers that live.
        filled: How many workers' KV caches the running jobs fill.
        due: Seconds until a deadline, and how many jobs that have not ended have one by then.
    """

    queued_tokens: int
    queued_jobs: int
    other_jobs: int
    num_workers: int
    filled: float = 0.0
    due: Sequence[tuple[float, int]] = ()


@dataclass(frozen=True, slots=True)
class Limits:
    """
    What the operator wants.

    Args:
        target_s: What waits is to be done within so many seconds.
        min_workers, max_workers: Never less, never more.
    """

    target_s: float = 300.0
    min_workers: int = 0
    max_workers: int = 64


@dataclass(frozen=True, slots=True)
class Decision:
    """How many workers are wanted, and the reason in words."""

    desired_workers: int
    reason: str


def decide(demand: Demand, limits: Limits, tokens_per_s: float | None) -> Decision:
    """
    The least number of workers that empties the backlog in time, meets the deadlines, and keeps what runs.

    Args:
        tokens_per_s: Estimated tokens that one worker gets done; None where nobody knows yet.
    """
    wants = [(limits.min_workers, "min_workers")]
    if demand.queued_jobs or demand.other_jobs:
        wants.append((1, f"{demand.queued_jobs + demand.other_jobs:,} jobs have not ended"))
    if demand.filled > 0:
        # not all the workers that are there: what runs moves together when some of them drain
        wants.append(
            (math.ceil(demand.filled - 1e-6), f"running jobs fill the KV cache of {demand.filled:.1f} workers")
        )
    if demand.queued_jobs and not tokens_per_s:
        wants.append(
            (demand.num_workers, "no worker has been busy for long enough to know its rate: none is taken away")
        )
    elif demand.queued_jobs and tokens_per_s:
        wants.append(_to_empty(demand, limits, tokens_per_s))
        wants += _to_be_in_time(demand, tokens_per_s)
    # of equal numbers the first reason, which is the simplest
    number, reason = max(wants, key=lambda want: want[0])
    if number > limits.max_workers:
        return Decision(limits.max_workers, f"max_workers; wanted were {number:,}: {reason}")
    return Decision(number, reason if number else "nothing to do")


def _to_empty(demand: Demand, limits: Limits, tokens_per_s: float) -> tuple[int, str]:
    number = math.ceil(demand.queued_tokens / (tokens_per_s * limits.target_s))
    reason = (
        f"{demand.queued_tokens:,} tokens wait, to be done within {limits.target_s:g} s "
        f"at {tokens_per_s:,.0f} tokens/s a worker"
    )
    return number, reason


def _to_be_in_time(demand: Demand, tokens_per_s: float) -> list[tuple[int, str]]:
    return [
        (math.ceil(rate / tokens_per_s), f"{num_jobs:,} jobs have a deadline within {slack_s:,.0f} s")
        for slack_s, num_jobs, rate in _rates(demand)
    ]


def _rates(demand: Demand) -> Iterator[tuple[float, int, float]]:
    """For each deadline, the tokens a second by which all that is due by then ends: the earliest is served first."""
    tokens_a_job = demand.queued_tokens / demand.queued_jobs if demand.queued_jobs else 0.0
    for slack_s, num_jobs in demand.due:
        yield slack_s, num_jobs, num_jobs * tokens_a_job / max(1.0, slack_s)


def needed_tokens_per_s(demand: Demand) -> float:
    """Estimated tokens that have to end in a second, for all deadlines to be met."""
    return max((rate for _, _, rate in _rates(demand)), default=0.0)


class Autoscaler:
    """
    Follows a queue, and says how many workers it wants.

    What a worker gets done is learned while jobs wait, so that nobody idles; it is kept while they do not.

    Args:
        tokens_per_s: What a worker gets done, until that has been measured.
        clock: Monotonic, in seconds.
    """

    def __init__(
        self, limits: Limits, *, tokens_per_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits
        self._clock = clock

        # all the mutable state there is
        self.tokens_per_s = tokens_per_s
        self._busy_since: float | None = None

    def follow(self, survey: Survey) -> Decision:
        """Take a look at the queue, and decide."""
        busy_workers = sum(1 for fields in survey.workers.values() if int(fields.get("running", 0)) > 0)
        if not survey.queued or not busy_workers:
            self._busy_since = None
        elif self._busy_since is None:
            self._busy_since = self._clock()
        elif self._clock() - self._busy_since >= BUSY_S and survey.drain_tokens_per_s > 0:
            self.tokens_per_s = survey.drain_tokens_per_s / busy_workers
        return decide(demand_of(survey), self._limits, self.tokens_per_s)


def demand_of(survey: Survey) -> Demand:
    """What a queue wants done, of all that is known of it."""
    # no worker that is started now helps with what is due sooner
    stats, due, before_s, passed = survey.stats, [], float(HORIZONS_S[0]), 0
    for horizon_s, num_jobs in zip(HORIZONS_S, survey.due, strict=True):
        if num_jobs > passed:
            # as if all within the horizon were due when it begins
            due.append((before_s, num_jobs))
        before_s, passed = horizon_s, num_jobs
    return Demand(
        queued_tokens=survey.queued_tokens,
        queued_jobs=survey.queued,
        other_jobs=stats.running + stats.delayed + stats.suspects + stats.raw,
        num_workers=len(survey.workers),
        filled=sum(float(fields.get("kv_usage", 0)) for fields in survey.workers.values()),
        due=due,
    )
