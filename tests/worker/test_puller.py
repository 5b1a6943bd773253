"""How many jobs of each lane the worker asks for: decisions without a queue."""

from itertools import pairwise, product

from engine.capacity import Capacity, Freeable
from pagemill.messages import Room
from worker.puller import MAX_PULL, NO_ROOM, Ask, LookAhead, Transit, decide, default_look_ahead

AHEAD = LookAhead(jobs=8, tokens=800)
IDLE = (Transit(), Transit(), Transit())


def capacity(
    *, free_seqs: int, free_tokens: int, waiting_seqs: int = 0, freeable: tuple[Freeable, ...] = ()
) -> Capacity:
    return Capacity(
        free_seqs=free_seqs,
        free_tokens=free_tokens,
        waiting_seqs=waiting_seqs,
        total_tokens=10_000,
        max_model_len=1_000,
        freeable=freeable,
    )


def standard(ask: Ask) -> Room:
    return ask.rooms[1]


def test_an_idle_engine_is_filled_and_gets_its_look_ahead() -> None:
    """
    With places and tokens free, the worker asks for all of them and the look-ahead, of any lane.
    """
    ask = decide(capacity(free_seqs=16, free_tokens=5_000), IDLE, AHEAD)

    assert (Room(24, 5_800),) * 3 == ask.rooms
    assert {"interactive", "standard", "bulk"} == ask.starting


def test_jobs_in_transit_count_as_taken() -> None:
    """
    What the engine has not seen yet is subtracted from what it says is free.
    """
    transit = (Transit(), Transit(seqs=10, tokens=4_000), Transit())
    ask = decide(capacity(free_seqs=16, free_tokens=5_000), transit, AHEAD)

    assert Room(max_jobs=14, max_tokens=1_800) == standard(ask)


def test_what_is_less_urgent_and_in_transit_stands_in_nobodys_way() -> None:
    """
    Jobs on their way into the engine count for their own lane and those behind it alone.
    """
    transit = (Transit(), Transit(seqs=10, tokens=4_000), Transit(seqs=1, tokens=900))
    ask = decide(capacity(free_seqs=16, free_tokens=5_000), transit, AHEAD)

    assert (Room(24, 5_800), Room(14, 1_800), Room(13, 900)) == ask.rooms


def test_a_full_engine_gets_the_look_ahead_alone() -> None:
    """
    With no place free, the jobs that may wait are asked for, and no more; no bell is ours to hear.
    """
    ask = decide(capacity(free_seqs=0, free_tokens=3_000), IDLE, AHEAD)

    assert Room(max_jobs=8, max_tokens=3_800) == standard(ask)
    assert not ask.starting


def test_a_full_look_ahead_asks_for_nothing() -> None:
    """
    When as many jobs wait as may, nothing is claimed.
    """
    assert not decide(capacity(free_seqs=0, free_tokens=3_000, waiting_seqs=8), IDLE, AHEAD)


def test_bulk_leaves_room_for_what_is_urgent() -> None:
    """
    An engine full of bulk work, with more of it waiting, has room for urgent jobs and hears their bells.
    """
    bulk = Freeable(seqs=16, tokens=5_000, passed=8)
    full = capacity(free_seqs=0, free_tokens=0, waiting_seqs=8, freeable=(bulk, bulk))
    ask = decide(full, IDLE, AHEAD)

    assert (Room(24, 5_800), Room(24, 5_800), NO_ROOM) == ask.rooms
    assert {"interactive", "standard"} == ask.starting


def test_urgent_work_is_not_preempted_by_its_like() -> None:
    """
    What runs in a lane leaves no room for more of that lane.
    """
    full = capacity(free_seqs=0, free_tokens=0, waiting_seqs=8, freeable=(Freeable(seqs=4, tokens=900, passed=8),))
    ask = decide(full, IDLE, AHEAD)

    assert (Room(12, 1_700), NO_ROOM, NO_ROOM) == ask.rooms


def test_free_places_without_tokens_do_not_grow_the_look_ahead() -> None:
    """
    When tokens are short, waiting jobs count against the look-ahead however many places are free.
    """
    assert not decide(capacity(free_seqs=40, free_tokens=0, waiting_seqs=8), IDLE, AHEAD)
    ask = decide(capacity(free_seqs=40, free_tokens=0, waiting_seqs=4), IDLE, AHEAD)
    assert Room(max_jobs=4, max_tokens=400) == standard(ask)


def test_the_look_ahead_is_refilled_in_batches() -> None:
    """
    Less than half of the look-ahead is not worth a call while no place would stay empty.
    """
    assert not decide(capacity(free_seqs=0, free_tokens=500, waiting_seqs=5), IDLE, AHEAD)
    assert decide(capacity(free_seqs=0, free_tokens=500, waiting_seqs=4), IDLE, AHEAD)


def test_an_empty_place_is_filled_at_once() -> None:
    """
    A free place that no pending job will take is worth a call of its own.
    """
    ask = decide(capacity(free_seqs=2, free_tokens=500, waiting_seqs=1), IDLE, LookAhead(jobs=0, tokens=0))

    assert Room(max_jobs=1, max_tokens=500) == standard(ask)


def test_without_look_ahead_only_what_fits_is_asked() -> None:
    """
    A look-ahead of 0 claims what fits now and nothing else.
    """
    none = LookAhead(jobs=0, tokens=0)

    assert Room(3, 500) == standard(decide(capacity(free_seqs=3, free_tokens=500), IDLE, none))
    assert not decide(capacity(free_seqs=3, free_tokens=0), IDLE, none)


def test_one_call_claims_a_bounded_number() -> None:
    """
    However much is free, one call asks for no more than MAX_PULL jobs.
    """
    ask = decide(capacity(free_seqs=1_000, free_tokens=9_000), IDLE, AHEAD)

    assert {MAX_PULL} == {room.max_jobs for room in ask.rooms}


def test_what_waits_stays_bounded() -> None:
    """
    Whatever the engine says, the jobs pending after a pull are at most free places and look-ahead.
    """
    for free_seqs, free_tokens, waiting in product((0, 1, 7, 32), (0, 1, 900, 10_000), range(0, 40, 3)):
        state = capacity(free_seqs=free_seqs, free_tokens=free_tokens, waiting_seqs=waiting)
        for room in filter(None, decide(state, IDLE, AHEAD).rooms):
            assert waiting + room.max_jobs <= free_seqs + AHEAD.jobs
            assert room.max_tokens <= free_tokens + AHEAD.tokens


def test_urgent_lanes_have_the_larger_rooms() -> None:
    """
    A lane may always use what the lanes behind it may.
    """
    gains = [Freeable(), Freeable(seqs=3, tokens=700), Freeable(seqs=9, tokens=4_000, passed=6)]
    moving = [Transit(), Transit(seqs=4, tokens=600)]
    for free, waiting, (more, less), transit in product(
        (0, 5), (6, 20), [(gains[2], gains[1]), (gains[2], gains[0]), (gains[1], gains[0])], product(moving, repeat=3)
    ):
        state = capacity(free_seqs=free, free_tokens=free * 90, waiting_seqs=waiting, freeable=(more, less))
        for urgent, behind in pairwise(decide(state, transit, AHEAD).rooms):
            assert urgent.max_jobs >= behind.max_jobs
            assert urgent.max_tokens >= behind.max_tokens


def test_the_default_look_ahead_takes_the_longest_job() -> None:
    """
    Whatever the model's context, one job of that length fits into the look-ahead.
    """
    look_ahead = default_look_ahead(max_num_seqs=64, max_num_batched_tokens=512, max_model_len=8_192)

    assert LookAhead(jobs=8, tokens=16_384) == look_ahead
