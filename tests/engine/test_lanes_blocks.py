"""Blocks that urgent requests take from less urgent ones: from how many, and what is worth a wait."""

import numpy as np
import pytest

from engine.request import FinishReason, Request, Sequence, Status
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from tests.support.planning import add, add_bulk, has_sampled, make_scheduler, make_turns, plan_of, states, took_turns

BULK = 2
MODES = pytest.mark.parametrize("mode", ["swap", "recompute"])
DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])


@MODES
@DEPTHS
def test_no_more_give_way_than_must(mode: str, depth: int) -> None:
    """
    The older ones run on where the younger ones' blocks are enough, and nobody comes and goes meanwhile.
    """
    scheduler = make_scheduler(num_blocks=51, num_host_blocks=51, preemption=mode, headroom=4)
    turns = make_turns(scheduler, depth=depth)
    bulk = add_bulk(scheduler, 5, 36, max_tokens=4 * 4)
    took_turns(turns, lambda: states(bulk[:4]) == "rrrr")
    urgent = add(scheduler, "u", 30, max_tokens=12)

    joined = [
        chunk.sequence.request.request_id
        for step in took_turns(turns, lambda: urgent.finished)
        for chunk in step.chunks
        if chunk.join
    ]

    assert "u" == joined[0]
    assert 1 == sum(scheduler.num_preemptions.values())
    assert len(joined) == len(set(joined))
    turns.run()
    assert "fffff" == states(bulk)


def test_nobody_gives_way_in_vain() -> None:
    """
    Where all that is less urgent is too little, it runs on; also when it only looks like enough, as it is shared.
    """
    scheduler = make_scheduler(num_blocks=31, headroom=0)
    turns = make_turns(scheduler)
    add(scheduler, "a", 60, max_tokens=30)
    turns.take()
    bulk = [add(scheduler, name, 41, max_tokens=3, first=0, priority=BULK) for name in ("b1", "b2", "b3")]
    turns.take()
    turns.take()
    assert "rrr" == states(bulk)
    # 15 to 18 blocks of the 30 are a's, and 10 of the others' 13 are shared
    urgent = add(scheduler, "u", 60, max_tokens=3)

    took_turns(turns, lambda: "r" not in states(bulk))

    assert ("fff", Status.WAITING) == (states(bulk), urgent.status)
    assert 0 == sum(scheduler.num_preemptions.values())


def add_after(scheduler: Scheduler, other: Sequence, num_shared: int, length: int, *, max_tokens: int = 3) -> Sequence:
    """Queue an urgent prompt that begins as another one does."""
    own = np.arange(500_000, 500_000 + length - num_shared, dtype=np.int32)
    prompt = np.concatenate([other.request.prompt[:num_shared], own])
    sequence = Sequence(Request("u", prompt, SamplingParams(max_tokens=max_tokens)), 0)
    scheduler.add(sequence)
    return sequence


@DEPTHS
def test_nobody_gives_way_for_blocks_that_the_urgent_prompt_shares_with_them(depth: int) -> None:
    """
    They are no gain: it needs them itself, whether others have them too or not.
    """
    scheduler = make_scheduler(num_blocks=31, headroom=0)
    turns = make_turns(scheduler, depth=depth)
    standing = add(scheduler, "a", 40, max_tokens=12)
    bulk = add(scheduler, "b", 41, max_tokens=12, first=0, priority=BULK)
    took_turns(turns, lambda: has_sampled(standing) and bulk.num_known > bulk.num_prompt_tokens)
    # 10 blocks are shared; of the 10 others that it wants 8 at most are free, and bulk has less than 2 more
    urgent = add_after(scheduler, bulk, 40, 80)

    steps = [turns.take() for _ in range(4)]

    assert (0, "rrw") == (sum(scheduler.num_preemptions.values()), states([standing, bulk, urgent]))
    # nor is a step put off for what would not be enough
    assert None not in steps
    turns.run()
    assert "fff" == states([standing, bulk, urgent])


@pytest.mark.parametrize("depth", [2, 3])
def test_no_step_is_put_off_for_shared_blocks_that_come_back(depth: int) -> None:
    """
    Also of those that have ended under a step in flight the urgent prompt wants what it shares for itself.
    """
    scheduler = make_scheduler(num_blocks=33, headroom=0)
    turns = make_turns(scheduler, depth=depth)
    standing = add(scheduler, "a", 40, max_tokens=12)
    bulk = [
        add(scheduler, name, length, max_tokens=30, first=first, priority=BULK)
        for name, length, first in (("b", 41, 0), ("c", 5, 900))
    ]
    took_turns(turns, lambda: has_sampled(standing) and bulk[0].num_known > bulk[0].num_prompt_tokens)
    add_after(scheduler, bulk[0], 40, 88)
    scheduler.abort(bulk[0])

    steps = [turns.take() for _ in range(4)]

    assert None not in steps
    assert 0 == sum(scheduler.num_preemptions.values())


@MODES
@DEPTHS
def test_what_an_urgent_prompt_shares_with_bulk_is_its_own_when_they_have_gone(mode: str, depth: int) -> None:
    """
    It goes on from there, and takes the blocks that it lacks beyond those from as many as it must.
    """
    scheduler = make_scheduler(num_blocks=41, num_host_blocks=40, headroom=0, preemption=mode)
    turns = make_turns(scheduler, depth=depth)
    bulk = add_bulk(scheduler, 2, 40, max_tokens=30)
    bulk += [add(scheduler, "b", 41, max_tokens=30, first=0, priority=BULK)]
    took_turns(turns, lambda: all(sequence.num_known > sequence.num_prompt_tokens for sequence in bulk))
    urgent = add_after(scheduler, bulk[-1], 40, 100)

    steps = took_turns(turns, lambda: has_sampled(urgent))

    assert [("u", 40, 60)] == [chunk for chunk in plan_of(steps[0]) if chunk[0] == "u"]
    assert "rww" == states(bulk).replace("s", "w")
    turns.run()
    assert "fff" == states(bulk)


@DEPTHS
def test_a_prompt_as_large_as_the_cache_takes_all_of_it(depth: int) -> None:
    """
    Even the room to grow, which is kept for those alone who cannot be preempted.
    """
    scheduler = make_scheduler(num_blocks=21, num_host_blocks=21, preemption="swap")
    turns = make_turns(scheduler, depth=depth)
    bulk = add_bulk(scheduler, 3, 8, max_tokens=30)
    took_turns(turns, lambda: any(map(has_sampled, bulk)))
    urgent = add(scheduler, "u", 78, max_tokens=2)

    steps = took_turns(turns, lambda: has_sampled(urgent))

    assert ["u"] == [name for name, _, _ in plan_of(steps[0])]
    turns.run()
    assert "fff" == states(bulk)
    assert 2 == len(urgent.output)


@DEPTHS
def test_a_prompt_that_cannot_grow_even_in_the_whole_cache_starts_at_once(depth: int) -> None:
    """
    No room to grow is kept where there will be none, also when it begins as those do that give way.
    """
    scheduler = make_scheduler(num_blocks=21)
    turns = make_turns(scheduler, depth=depth)
    bulk = add(scheduler, "b", 20, max_tokens=30, first=0, priority=BULK)
    took_turns(turns, lambda: bulk.num_known > bulk.num_prompt_tokens)
    urgent = add_after(scheduler, bulk, 16, 76, max_tokens=20)

    steps = took_turns(turns, lambda: has_sampled(urgent))

    assert [("u", 16, 60)] == plan_of(steps[0])
    turns.run()
    assert (5, FinishReason.LENGTH) == (len(urgent.output), urgent.finish_reason)
    assert "f" == states([bulk])


@pytest.mark.parametrize("depth", [2, 3])
def test_a_step_is_put_off_for_blocks_of_those_that_have_ended(depth: int) -> None:
    """
    They come back when no step is in flight, and then nobody has to go.
    """
    scheduler = make_scheduler(num_blocks=31, headroom=0)
    turns = make_turns(scheduler, depth=depth)
    bulk = [add(scheduler, name, length, max_tokens=30, priority=BULK) for name, length in (("a", 80), ("b", 4))]
    took_turns(turns, lambda: all(map(has_sampled, bulk)))
    urgent = add(scheduler, "u", 60, max_tokens=3)
    scheduler.abort(bulk[0])

    steps = took_turns(turns, lambda: has_sampled(urgent))

    assert ["b", "u"] == [name for name, _, _ in plan_of(steps[0])]
    assert 0 == sum(scheduler.num_preemptions.values())


@pytest.mark.parametrize("depth", [2, 3])
def test_no_step_is_put_off_for_a_prompt_that_has_to_wait_for_another_urgent_one(depth: int) -> None:
    """
    Together they do not fit, so the first one starts in the next step.
    """
    scheduler = make_scheduler(num_blocks=21, max_num_batched_tokens=100, headroom=0)
    turns = make_turns(scheduler, depth=depth)
    bulk = add(scheduler, "b", 8, max_tokens=30, priority=BULK)
    took_turns(turns, lambda: has_sampled(bulk))
    add(scheduler, "u", 8, max_tokens=4)
    add(scheduler, "v", 76, max_tokens=3)

    assert ["u"] == [name for name, _, _ in plan_of(turns.take()) if name in "uv"]
