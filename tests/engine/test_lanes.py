"""Urgent requests among less urgent ones: what they take from these, when, and what they leave."""

from collections.abc import Callable

import numpy as np
import pytest

from engine.request import FinishReason, Request, Sequence, Status, Step
from engine.sampling_params import SamplingParams
from engine.scheduler import MAX_PARTIAL_PREFILLS, Scheduler
from tests.support.fake_runner import Turns, answer_token
from tests.support.planning import add, make_scheduler, make_turns, plan_of

INTERACTIVE, STANDARD, BULK = range(3)
MODES = pytest.mark.parametrize("mode", ["swap", "recompute"])
DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])


def add_bulk(
    scheduler: Scheduler, count: int, length: int, *, max_tokens: int = 150, priority: int = BULK
) -> list[Sequence]:
    """Queue prompts that share nothing."""
    return [
        add(scheduler, f"bulk{number}", length, max_tokens=max_tokens, first=10_000 + 1000 * number, priority=priority)
        for number in range(count)
    ]


def took_turns(turns: Turns, until: Callable[[], bool]) -> list[Step]:
    """The steps that were launched until something holds."""
    steps: list[Step] = []
    for _ in range(1000):
        if until():
            return steps
        step = turns.take()
        turns.scheduler.check()
        steps += [step] if step is not None else []
    raise AssertionError("it never holds")


def has_sampled(sequence: Sequence) -> bool:
    return sequence.num_tokens > sequence.num_prompt_tokens


def states(sequences: list[Sequence]) -> str:
    """One letter a sequence: r, w, s or f."""
    return "".join(sequence.status.value[0] for sequence in sequences)


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
