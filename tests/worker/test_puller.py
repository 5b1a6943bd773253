"""How many jobs the worker asks for: decisions without a queue."""

from itertools import product

from engine.request import Capacity
from worker.puller import MAX_PULL, Ask, LookAhead, Transit, decide, default_look_ahead

AHEAD = LookAhead(jobs=8, tokens=800)


def capacity(*, free_seqs: int, free_tokens: int, waiting_seqs: int = 0) -> Capacity:
    return Capacity(
        free_seqs=free_seqs,
        free_tokens=free_tokens,
        waiting_seqs=waiting_seqs,
        total_tokens=10_000,
        max_model_len=1_000,
    )


def test_an_idle_engine_is_filled_and_gets_its_look_ahead() -> None:
    """
    With places and tokens free, the worker asks for all of them and the look-ahead.
    """
    ask = decide(capacity(free_seqs=16, free_tokens=5_000), Transit(), AHEAD)

    assert Ask(max_jobs=24, max_tokens=5_800) == ask


def test_jobs_in_transit_count_as_taken() -> None:
    """
    What the engine has not seen yet is subtracted from what it says is free.
    """
    ask = decide(capacity(free_seqs=16, free_tokens=5_000), Transit(seqs=10, tokens=4_000), AHEAD)

    assert Ask(max_jobs=14, max_tokens=1_800) == ask


def test_a_full_engine_gets_the_look_ahead_alone() -> None:
    """
    With no place free, the jobs that may wait are asked for, and no more.
    """
    ask = decide(capacity(free_seqs=0, free_tokens=3_000), Transit(), AHEAD)

    assert Ask(max_jobs=8, max_tokens=3_800) == ask


def test_a_full_look_ahead_asks_for_nothing() -> None:
    """
    When as many jobs wait as may, nothing is claimed.
    """
    assert decide(capacity(free_seqs=0, free_tokens=3_000, waiting_seqs=8), Transit(), AHEAD) is None


def test_free_places_without_tokens_do_not_grow_the_look_ahead() -> None:
    """
    When tokens are short, waiting jobs count against the look-ahead however many places are free.
    """
    assert decide(capacity(free_seqs=40, free_tokens=0, waiting_seqs=8), Transit(), AHEAD) is None
    ask = decide(capacity(free_seqs=40, free_tokens=0, waiting_seqs=4), Transit(), AHEAD)
    assert Ask(max_jobs=4, max_tokens=400) == ask


def test_the_look_ahead_is_refilled_in_batches() -> None:
    """
    Less than half of the look-ahead is not worth a call while no place would stay empty.
    """
    assert decide(capacity(free_seqs=0, free_tokens=500, waiting_seqs=5), Transit(), AHEAD) is None
    assert decide(capacity(free_seqs=0, free_tokens=500, waiting_seqs=4), Transit(), AHEAD) is not None


def test_an_empty_place_is_filled_at_once() -> None:
    """
    A free place that no pending job will take is worth a call of its own.
    """
    ask = decide(capacity(free_seqs=2, free_tokens=500, waiting_seqs=1), Transit(), LookAhead(jobs=0, tokens=0))

    assert Ask(max_jobs=1, max_tokens=500) == ask


def test_without_look_ahead_only_what_fits_is_asked() -> None:
    """
    A look-ahead of 0 claims what fits now and nothing else.
    """
    none = LookAhead(jobs=0, tokens=0)

    assert Ask(max_jobs=3, max_tokens=500) == decide(capacity(free_seqs=3, free_tokens=500), Transit(), none)
    assert decide(capacity(free_seqs=3, free_tokens=0), Transit(), none) is None


def test_one_call_claims_a_bounded_number() -> None:
    """
    However much is free, one call asks for no more than MAX_PULL jobs.
    """
    ask = decide(capacity(free_seqs=1_000, free_tokens=9_000), Transit(), AHEAD)

    assert ask is not None
    assert MAX_PULL == ask.max_jobs


def test_what_waits_stays_bounded() -> None:
    """
    Whatever the engine says, the jobs pending after a pull are at most free places and look-ahead.
    """
    for free_seqs, free_tokens, waiting in product((0, 1, 7, 32), (0, 1, 900, 10_000), range(0, 40, 3)):
        state = capacity(free_seqs=free_seqs, free_tokens=free_tokens, waiting_seqs=waiting)
        ask = decide(state, Transit(), AHEAD)

        if ask is not None:
            assert waiting + ask.max_jobs <= free_seqs + AHEAD.jobs
            assert ask.max_tokens <= free_tokens + AHEAD.tokens


def test_the_default_look_ahead_takes_the_longest_job() -> None:
    """
    Whatever the model's context, one job of that length fits into the look-ahead.
    """
    look_ahead = default_look_ahead(max_num_seqs=64, max_num_batched_tokens=512, max_model_len=8_192)

    assert LookAhead(jobs=8, tokens=16_384) == look_ahead
