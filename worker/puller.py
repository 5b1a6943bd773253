"""
How many jobs to claim now: what fits, and a small bounded look-ahead.

The look-ahead keeps the engine from idling between a finish and the next pull. Its jobs are
leased, wait inside the engine, and are the first to go back on a drain.
"""

from dataclasses import dataclass

from engine.request import Capacity

# one PULL claims no more: a script that runs long holds up everyone else
MAX_PULL = 64


@dataclass(frozen=True, slots=True)
class LookAhead:
    """
    What may be claimed beyond what fits.

    Args:
        jobs: Jobs that may wait inside the engine.
        tokens: Tokens that they may need, together.
    """

    jobs: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Transit:
    """
    What was claimed and has not reached the engine yet, so that its capacity does not know of it.

    Args:
        seqs: Answers that the jobs ask for; one a job until the intake has read it.
        tokens: Tokens that they may need, together.
    """

    seqs: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """The most that the next PULL may claim."""

    max_jobs: int
    max_tokens: int


def decide(capacity: Capacity, transit: Transit, look_ahead: LookAhead) -> Ask | None:
    """
    Return what to ask for, or None when the worker has enough.

    Three cases:
    1. places and tokens are free: ask for these and for the look-ahead;
    2. places or tokens are out: fill the look-ahead, each of its places with its share of
       the tokens, and in batches: not before half of it is empty;
    3. the look-ahead is full: nothing.
    """
    # the engine's free places do not know of those who wait for them
    pending = capacity.waiting_seqs + transit.seqs
    free_tokens = max(0, capacity.free_tokens - transit.tokens)
    # without tokens a free place is no place: all that is pending counts as look-ahead
    num_fitting = capacity.free_seqs if free_tokens else 0
    max_jobs = num_fitting + look_ahead.jobs - pending
    if max_jobs <= 0:
        return None
    if pending >= num_fitting and pending > 0 and 2 * max_jobs < look_ahead.jobs:
        return None
    places = min(max_jobs, look_ahead.jobs)
    max_tokens = free_tokens + look_ahead.tokens * places // max(1, look_ahead.jobs)
    return Ask(min(max_jobs, MAX_PULL), max_tokens) if max_tokens else None


def default_look_ahead(*, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> LookAhead:
    """
    What two steps could admit: two token budgets, and one job at least; an eighth of the places.
    """
    return LookAhead(jobs=max(4, max_num_seqs // 8), tokens=2 * max(max_num_batched_tokens, max_model_len))
