"""Urgent requests among less urgent ones: what they take from these, when, and what they leave."""

from collections.abc import Callable

import numpy as np
import pytest

from engine.request import FinishReason
from engine.scheduler import MAX_PARTIAL_PREFILLS, Scheduler
from tests.support.fake_runner import answer_token
from tests.support.planning import add, add_bulk, has_sampled, make_scheduler, make_turns, plan_of, states, took_turns

INTERACTIVE, STANDARD, BULK = range(3)
MODES = pytest.mark.parametrize("mode", ["swap", "recompute"])
DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])


def out_of_slots(mode: str) -> tuple[Scheduler, Callable[[], bool]]:
    scheduler = make_scheduler(num_blocks=300, num_host_blocks=300, max_num_seqs=6, preemption=mode)
    add_bulk(scheduler, 9, 12)
    return scheduler, lambda: scheduler.num_running == 6


def out_of_blocks(mode: str) -> tuple[Scheduler, Callable[[], bool]]:
    scheduler = make_scheduler(num_blocks=61, num_host_blocks=300, max_num_seqs=32, preemption=mode)
    add_bulk(scheduler, 20, 12)
    return scheduler, lambda: scheduler.num_running > 1 and scheduler.blocks.num_free_blocks < 3


def out_of_budget(mode: str) -> tuple[Scheduler, Callable[[], bool]]:
    scheduler = make_scheduler(
        num_blocks=700, num_host_blocks=300, max_num_seqs=20, max_num_batched_tokens=16, preemption=mode
    )
    add_bulk(scheduler, 16, 8)
    return scheduler, lambda: all(map(has_sampled, scheduler.running)) and scheduler.num_running == 16


def in_the_middle_of_prefills(mode: str) -> tuple[Scheduler, Callable[[], bool]]:
    scheduler = make_scheduler(
        num_blocks=200, num_host_blocks=300, max_num_seqs=8, max_num_batched_tokens=16, preemption=mode
    )
    add_bulk(scheduler, 8, 150, max_tokens=20)
    return scheduler, lambda: scheduler.num_running == MAX_PARTIAL_PREFILLS


FLOODS = pytest.mark.parametrize("flood", [out_of_slots, out_of_blocks, out_of_budget, in_the_middle_of_prefills])


@MODES
@DEPTHS
@FLOODS
def test_a_flood_delays_an_urgent_request_by_the_steps_in_flight_alone(
    flood: Callable[[str], tuple[Scheduler, Callable[[], bool]]], depth: int, mode: str
) -> None:
    """
    The next step that is launched computes as much of its prompt as a step can, and so on until its first token.
    """
    scheduler, is_full = flood(mode)
    turns = make_turns(scheduler, depth=depth)
    took_turns(turns, is_full)
    bulk = scheduler.running
    urgent = add(scheduler, "u", 30, max_tokens=5)
    budget = scheduler.max_num_batched_tokens

    steps = took_turns(turns, lambda: has_sampled(urgent))

    pieces = [chunk for step in steps for chunk in plan_of(step) if chunk[0] == "u"]
    assert [("u", start, min(budget, 30 - start)) for start in range(0, 30, budget)] == pieces
    assert len(steps) == len(pieces)
    turns.run()
    assert [answer_token("u", 0, position) for position in range(30, 35)] == urgent.output
    for sequence in bulk:
        name, start, stop = sequence.request.request_id, sequence.num_prompt_tokens, sequence.num_known
        assert [answer_token(name, 0, position) for position in range(start, stop)] == sequence.output
        assert FinishReason.LENGTH is sequence.finish_reason


@DEPTHS
@FLOODS
def test_urgent_requests_that_come_together_start_together(
    flood: Callable[[str], tuple[Scheduler, Callable[[], bool]]], depth: int
) -> None:
    """
    As many as the budget of a step has tokens for, whatever room there is for the first of them.
    """
    scheduler, is_full = flood("swap")
    turns = make_turns(scheduler, depth=depth)
    took_turns(turns, is_full)
    urgent = [add(scheduler, name, 4, max_tokens=5) for name in "uvw"]

    steps = took_turns(turns, lambda: all(map(has_sampled, urgent)))

    assert [("u", 0, 4), ("v", 0, 4), ("w", 0, 4)] == [chunk for chunk in plan_of(steps[0]) if chunk[0] in "uvw"]
    assert 1 == len(steps)


def test_decodes_of_the_same_priority_come_before_prompts() -> None:
    """
    Only less urgent work makes way: who is being answered keeps their pace.
    """
    scheduler = make_scheduler(max_num_batched_tokens=8)
    turns = make_turns(scheduler)
    for name, priority in (("a", INTERACTIVE), ("s", STANDARD), ("b", BULK)):
        add(scheduler, name, 2, max_tokens=20, priority=priority)
    turns.take()
    add(scheduler, "u", 12, max_tokens=4)

    steps = [plan_of(turns.take()) for _ in range(2)]

    assert [("a", 2, 1), ("u", 0, 7)] == steps[0]
    assert [("a", 3, 1), ("s", 2, 1), ("b", 2, 1), ("u", 7, 5)] == steps[1]


@MODES
def test_the_youngest_of_the_least_urgent_gives_way(mode: str) -> None:
    """
    One for each slot that is wanted: the last of bulk, and standard work when no bulk is left.
    """
    scheduler = make_scheduler(num_blocks=300, num_host_blocks=300, max_num_seqs=4, preemption=mode)
    turns = make_turns(scheduler)
    others = [
        add(scheduler, name, 6, max_tokens=60, priority=priority)
        for name, priority in (("a", BULK), ("b", STANDARD), ("c", BULK), ("d", STANDARD))
    ]
    turns.take()

    seen = []
    for name in "uvwx":
        add(scheduler, name, 6, max_tokens=60)
        turns.take()
        seen.append(states(others).replace("s", "w"))

    assert ["rrwr", "wrwr", "wrww", "wwww"] == seen


@DEPTHS
@pytest.mark.parametrize("priority", [STANDARD, BULK])
def test_nobody_takes_anything_from_their_like(priority: int, depth: int) -> None:
    """
    Of an equal or a smaller priority: they wait for each other, as if there were no lanes.
    """
    scheduler = make_scheduler(num_blocks=21, max_num_seqs=3, headroom=0)
    turns = make_turns(scheduler, depth=depth)
    running = [add(scheduler, name, 20, max_tokens=4, priority=priority) for name in "abc"]
    running += [add(scheduler, "d", 8, max_tokens=4, priority=INTERACTIVE)]
    took_turns(turns, lambda: all(map(has_sampled, running)))
    late = add(scheduler, "e", 20, max_tokens=4, priority=BULK)

    took_turns(turns, lambda: late.finished)

    assert [*running, late] == sorted(turns.finished, key=[*running, late].index)
    assert late is turns.finished[-1]
    assert 1 >= sum(scheduler.num_preemptions.values())


@MODES
def test_who_gave_way_comes_back_when_there_is_room(mode: str) -> None:
    """
    Once for each time, in the old order, and not before what is urgent has ended.
    """
    scheduler = make_scheduler(num_blocks=300, num_host_blocks=300, max_num_seqs=2, preemption=mode)
    turns = make_turns(scheduler)
    bulk = add_bulk(scheduler, 3, 8, max_tokens=40)
    turns.take()
    urgent = [add(scheduler, name, 8, max_tokens=10) for name in "uv"]

    steps = took_turns(turns, lambda: all(one.finished for one in bulk))

    joined = [chunk.sequence for step in steps for chunk in step.chunks if chunk.join]
    assert [*urgent, bulk[0], bulk[1], bulk[2]] == joined
    assert 2 == sum(scheduler.num_preemptions.values())


def test_less_urgent_work_does_not_slip_in_before_urgent_work_that_waits() -> None:
    """
    A prompt that waits for another to compute their prefix will start soon: what came in now would have to go again.
    """
    scheduler = make_scheduler(num_blocks=300, max_num_batched_tokens=16, max_num_seqs=4)
    turns = make_turns(scheduler)
    for name in "uv":
        add(scheduler, name, 40, max_tokens=4, first=0)
    bulk = add(scheduler, "b", 4, max_tokens=20, priority=BULK)
    like = add(scheduler, "w", 4, max_tokens=20)

    seen = []
    for _ in range(4):
        turns.take()
        seen.append(states([like, bulk]))

    assert ["ww", "ww", "rw", "rr"] == seen


def test_urgent_prompts_do_not_wait_for_less_urgent_ones_to_compute_their_prefix() -> None:
    """
    Theirs goes on with what the budget has left, which may be little for long.
    """
    scheduler = make_scheduler(num_blocks=300, max_num_batched_tokens=16)
    turns = make_turns(scheduler)
    add(scheduler, "b", 90, max_tokens=4, first=0, priority=BULK)
    turns.take()
    add(scheduler, "u", 90, max_tokens=4, first=0)

    steps = [plan_of(turns.take()) for _ in range(3)]

    # what has been computed is shared all the same
    assert [[("u", 16, 16)], [("u", 32, 16)], [("u", 48, 16)]] == steps


@DEPTHS
def test_preemption_by_lanes_teaches_the_headroom_nothing(depth: int) -> None:
    """
    It does not say that too many were admitted.
    """
    scheduler = make_scheduler(num_blocks=300, num_host_blocks=300, max_num_seqs=2)
    turns = make_turns(scheduler, depth=depth)
    add_bulk(scheduler, 2, 8)
    turns.take()
    add(scheduler, "u", 8, max_tokens=10)

    took_turns(turns, lambda: sum(scheduler.num_preemptions.values()) > 0)

    assert 16 == scheduler.headroom.tokens


@MODES
def test_all_end_under_a_steady_stream_of_urgent_requests(mode: str) -> None:
    """
    Bulk gets what these leave, and never less than what it had: each urgent request costs one preemption at most.
    """
    rng = np.random.default_rng(0)
    scheduler = make_scheduler(num_blocks=61, num_host_blocks=100, max_num_seqs=8, preemption=mode)
    turns = make_turns(scheduler, depth=2)
    bulk = add_bulk(scheduler, 12, 16, max_tokens=40)
    urgent = []
    for number in range(60):
        urgent.append(add(scheduler, f"u{number}", 8, max_tokens=4, first=100 * number))
        for _ in range(int(rng.integers(1, 6))):
            turns.take()
            scheduler.check()

    turns.run()

    assert {"f"} == {*states(bulk + urgent)}
    assert sum(scheduler.num_preemptions.values()) <= 60
    assert turns.runner.num_computed_tokens <= 1.5 * sum(one.num_known for one in bulk + urgent)
