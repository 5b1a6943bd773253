"""
How many jobs of each lane to claim now: what fits, and a small bounded look-ahead.

What fits a lane is what is free, and what preemption would free for it: a worker full of bulk
work has room for interactive jobs all the same. The look-ahead keeps the engine from idling
between a finish and the next pull. Its jobs are leased, wait inside the engine, and are the
first to go back on a drain.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.capacity import Capacity
from pagemill.messages import Room
from pagemill.schema import LANES, Lane

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
    What was claimed of a lane and has not reached the engine yet, so that its capacity does not know of it.

    Args:
        seqs: Answers that the jobs ask for; one a job until the intake has read it.
        tokens: Tokens that they may need, together.
    """

    seqs: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """
    The most that the next PULL may claim.

    Args:
        rooms: One a lane, the most urgent first; each at least as large as those behind it.
        starting: Lanes of which one more job could start at once, so that their bells are ours to hear.
    """

    rooms: tuple[Room, ...]
    starting: frozenset[Lane] = frozenset()

    def __bool__(self) -> bool:
        return any(self.rooms)


NO_ROOM = Room(0, 0)
NOTHING = Ask((NO_ROOM,) * len(LANES))


def decide(capacity: Capacity, transit: Sequence[Transit], look_ahead: LookAhead) -> Ask:
    """
    Return what to ask for.

    Args:
        transit: One a lane, the most urgent first.
    """
    rooms: list[Room] = []
    starting: list[Lane] = []
    seqs = tokens = 0
    for priority, lane in enumerate(LANES):
        # what is less urgent does not stand in the way of this lane, wherever it is
        more = capacity.freeable_by(priority)
        seqs += transit[priority].seqs
        tokens += transit[priority].tokens
        free_tokens = max(0, capacity.free_tokens + more.tokens - tokens)
        # without tokens a free place is no place: all that is pending counts as look-ahead
        num_fitting = capacity.free_seqs + more.seqs if free_tokens else 0
        # the engine's free places do not know of those who wait for them
        pending = capacity.waiting_seqs - more.passed + seqs
        rooms.append(_room(num_fitting, free_tokens, pending, look_ahead))
        if rooms[-1] and pending < num_fitting:
            starting.append(lane)
    return Ask(tuple(rooms), frozenset(starting))


def _room(num_fitting: int, free_tokens: int, pending: int, look_ahead: LookAhead) -> Room:
    """
    Three cases:
    1. places and tokens are free: these and the look-ahead;
    2. places or tokens are out: the look-ahead, each of its places with its share of
       the tokens, and in batches: not before half of it is empty;
    3. the look-ahead is full: nothing.
    """
    max_jobs = num_fitting + look_ahead.jobs - pending
    if max_jobs <= 0 or (pending >= num_fitting and pending > 0 and 2 * max_jobs < look_ahead.jobs):
        return NO_ROOM
    places = min(max_jobs, look_ahead.jobs)
    max_tokens = free_tokens + look_ahead.tokens * places // max(1, look_ahead.jobs)
    return Room(min(max_jobs, MAX_PULL), max_tokens) if max_tokens else NO_ROOM


def default_look_ahead(*, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> LookAhead:
    """
    What two steps could admit: two token budgets, and one job at least; an eighth of the places.
    """
    return LookAhead(jobs=max(4, max_num_seqs // 8), tokens=2 * max(max_num_batched_tokens, max_model_len))
