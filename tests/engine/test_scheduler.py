"""What the scheduler promises, one rule at a time."""

from collections.abc import Callable

import numpy as np
import pytest

from engine.block_manager import BlockManager
from engine.policy import Preemption, PreemptionPolicy
from engine.request import FinishReason, Request, Sequence, Status
from engine.sampling_params import SamplingParams
from engine.scheduler import MAX_PARTIAL_PREFILLS, Scheduler
from tests.support.fake_runner import FakeRunner, Turns, answer_token
from tests.support.planning import add, make_scheduler, make_turns, plan_of


def test_decodes_come_before_prompts_and_share_the_budget() -> None:
    """A long prompt gets what the running sequences leave of the step."""
    scheduler = make_scheduler(max_num_batched_tokens=10)
    turns = make_turns(scheduler)
    add(scheduler, "a", 5)
    add(scheduler, "b", 20)

    steps = [plan_of(turns.take()) for _ in range(3)]

    assert [("a", 0, 5), ("b", 0, 5)] == steps[0]
    assert [("a", 5, 1), ("b", 5, 9)] == steps[1]
    assert [("a", 6, 1), ("b", 14, 6)] == steps[2]


def test_a_chunk_samples_only_at_the_last_token() -> None:
    """Pieces of a prompt sample nothing; `join` marks the first piece alone."""
    scheduler = make_scheduler(max_num_batched_tokens=8)
    turns = make_turns(scheduler)
    add(scheduler, "a", 20)

    chunks = [step.chunks[0] for step in (turns.take() for _ in range(4)) if step is not None]

    assert [False, False, True, True] == [chunk.samples for chunk in chunks]
    assert [True, False, False, False] == [chunk.join for chunk in chunks]


def test_prompts_in_the_middle_of_their_prefill_are_few() -> None:
    """With several pieces under way no other long prompt begins."""
    scheduler = make_scheduler(num_blocks=400, max_num_batched_tokens=8)
    turns = make_turns(scheduler)
    for name in "abcd":
        add(scheduler, name, 60)
        turns.take()

        partials = [s for s in scheduler.running if s.num_computed < s.num_prompt_tokens]
        assert len(partials) <= MAX_PARTIAL_PREFILLS


def test_more_urgent_requests_go_first() -> None:
    """By priority, and in the order of arrival within one."""
    scheduler = make_scheduler(max_num_seqs=1)
    turns = make_turns(scheduler)
    for name, priority in (("a", 1), ("b", 0), ("c", 0), ("d", -1)):
        add(scheduler, name, 4, max_tokens=2, priority=priority)

    finished = [sequence.request.request_id for sequence in turns.run()]

    assert ["d", "b", "c", "a"] == finished


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_step_is_spent_on_a_token_past_the_end(depth: int) -> None:
    """An end by length is known before the last token is."""
    scheduler = make_scheduler(max_model_len=30)
    turns = make_turns(scheduler, depth=depth)
    sequences = [add(scheduler, "a", 5, max_tokens=3), add(scheduler, "b", 25, max_tokens=90)]

    turns.run()

    assert [3, 5] == [len(sequence.output) for sequence in sequences]
    assert 5 + 2 + 25 + 4 == turns.runner.num_computed_tokens


@pytest.mark.parametrize(("length", "generated"), [(28, 2), (29, 1)])
def test_the_longest_prompts_still_get_their_tokens(length: int, generated: int) -> None:
    """A prompt one short of max_model_len gives exactly one token."""
    scheduler = make_scheduler(max_model_len=30)
    turns = make_turns(scheduler)
    sequence = add(scheduler, "a", length)

    turns.run()

    assert generated == len(sequence.output)
    assert FinishReason.LENGTH is sequence.finish_reason


@pytest.mark.parametrize("length", [30, 31, 5000])
def test_a_sequence_without_room_for_a_token_ends_at_once(length: int) -> None:
    """It is reported with LENGTH and stops nobody."""
    scheduler = make_scheduler(max_model_len=30)
    sequence = add(scheduler, "a", length)

    assert [sequence] == scheduler.overgrown
    assert FinishReason.LENGTH is sequence.finish_reason
    assert scheduler.has_work
    assert scheduler.schedule() is None


def test_admission_leaves_room_for_the_growth_of_what_runs() -> None:
    """The second prompt would fit now, but not with what both need in the next tokens."""
    scheduler = make_scheduler(num_blocks=11, headroom=16)
    turns = make_turns(scheduler)
    add(scheduler, "a", 16, max_tokens=40)
    add(scheduler, "b", 16, max_tokens=40)

    turns.take()

    assert (1, 1) == (scheduler.num_running, scheduler.num_waiting)


def test_a_shared_prefix_is_computed_once() -> None:
    """Sharers wait while the first computes it, and let others pass."""
    scheduler = make_scheduler(max_num_batched_tokens=64)
    turns = make_turns(scheduler)
    for name in ("a", "b", "c"):
        add(scheduler, name, 17, first=0)
    add(scheduler, "other", 10)

    steps = [plan_of(turns.take()) for _ in range(2)]
    turns.run()

    assert [("a", 0, 17), ("other", 0, 10)] == steps[0]
    assert [("b", 16, 1), ("c", 16, 1)] == [chunk for chunk in steps[1] if chunk[0] in "bc"]
    assert 32 == scheduler.blocks.hit_tokens


def test_the_cached_prompt_tokens_are_those_of_the_first_admission() -> None:
    """Preemption does not make a sequence look cached."""
    scheduler = make_scheduler(num_blocks=16, preemption="recompute", headroom=0)
    turns = make_turns(scheduler)
    sequences = [add(scheduler, name, 20, max_tokens=20) for name in "ab"]

    turns.run()

    assert scheduler.num_preemptions[Preemption.RECOMPUTE]
    assert [0, 0] == [sequence.num_cached for sequence in sequences]
    assert [20, 20] == [sequence.num_prompt_tokens for sequence in sequences]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_two_sequences_of_three_fifths_of_the_pool_both_end(preemption: str, depth: int) -> None:
    """The older one never gives way, so that one of them always advances."""
    scheduler = make_scheduler(num_blocks=21, num_host_blocks=20, preemption=preemption, headroom=0)
    turns = make_turns(scheduler, depth=depth)
    old, young = add(scheduler, "a", 8, max_tokens=40), add(scheduler, "b", 8, max_tokens=40)

    turns.run(max_turns=200)

    assert [old, young] == turns.finished
    assert [answer_token("b", 0, position) for position in range(8, 48)] == young.output
    assert {preemption} == {kind for kind, count in scheduler.num_preemptions.items() if count}
    scheduler.check()


def test_the_least_urgent_is_preempted_first() -> None:
    """A larger priority number gives way before a later arrival."""
    scheduler = make_scheduler(num_blocks=16, preemption="recompute", headroom=0)
    turns = make_turns(scheduler)
    sequences = [
        add(scheduler, name, 16, max_tokens=30, priority=priority) for name, priority in (("a", 0), ("b", 5), ("c", 0))
    ]
    while not sum(scheduler.num_preemptions.values()):
        turns.take()

    assert [Status.RUNNING, Status.WAITING, Status.RUNNING] == [sequence.status for sequence in sequences]


def test_nobody_passes_a_sequence_that_was_preempted() -> None:
    """What it let go is for those that run, even where a later prompt would fit."""
    scheduler = make_scheduler(num_blocks=12, preemption="recompute", headroom=0)
    turns = make_turns(scheduler)
    add(scheduler, "a", 16, max_tokens=30)
    victim = add(scheduler, "b", 16, max_tokens=30)
    while scheduler.blocks.num_free_blocks:
        turns.take()
    small = add(scheduler, "c", 1)
    while not sum(scheduler.num_preemptions.values()):
        turns.take()
    while victim.status is Status.WAITING:
        assert Status.WAITING is small.status
        turns.take()

    assert [Status.RUNNING, Status.RUNNING] == [victim.status, small.status]


def test_a_lone_sequence_that_cannot_grow_ends_by_length() -> None:
    """With the whole pool to itself it keeps every token that it could compute."""
    scheduler = make_scheduler(num_blocks=6)
    turns = make_turns(scheduler, depth=2)
    sequence = add(scheduler, "a", 10, max_tokens=90)

    turns.run()

    assert FinishReason.LENGTH is sequence.finish_reason
    assert 21 == sequence.num_known
    assert 5 == scheduler.blocks.num_free_blocks


def preempted_in_flight() -> tuple[Turns, Sequence]:
    """A sequence that was swapped out while its first token is in flight; no step has carried the copies yet."""
    scheduler = make_scheduler(num_blocks=8, num_host_blocks=8, preemption="swap", headroom=0)
    turns = make_turns(scheduler, depth=2)
    add(scheduler, "a", 16, max_tokens=8)
    young = add(scheduler, "b", 9, max_tokens=16)
    turns.take()
    assert scheduler.schedule() is None
    return turns, young


def test_a_token_in_flight_is_kept_over_preemption() -> None:
    """The step that sampled it was launched before, and the sequence resumes only after it."""
    turns, young = preempted_in_flight()
    assert (Status.SWAPPED, 1, []) == (young.status, young.num_in_flight, young.output)

    turns.run()

    assert [answer_token("b", 0, position) for position in range(9, 25)] == young.output


def running(turns: Turns) -> Sequence:
    sequence = add(turns.scheduler, "x", 8)
    turns.take()
    return sequence


def waiting(turns: Turns) -> Sequence:
    return add(turns.scheduler, "x", 8)


def swapped(turns: Turns) -> Sequence:
    add(turns.scheduler, "a", 12, max_tokens=30)
    sequence = add(turns.scheduler, "x", 12, max_tokens=30)
    while sequence.status is not Status.SWAPPED:
        turns.take()
    return sequence


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("state", [running, waiting, swapped])
def test_abort_is_safe_in_every_state(state: Callable[[Turns], Sequence], depth: int) -> None:
    """Late tokens are dropped, all memory comes back, and a second abort does nothing."""
    scheduler = make_scheduler(num_blocks=9, num_host_blocks=9, preemption="swap", headroom=0)
    turns = make_turns(scheduler, depth=depth)
    sequence = state(turns)
    output = list(sequence.output)

    scheduler.abort(sequence)
    scheduler.finish(sequence, FinishReason.STOP)
    turns.run()

    assert FinishReason.ABORT is sequence.finish_reason
    assert output == sequence.output
    assert (8, 9) == (scheduler.blocks.num_free_blocks, scheduler.blocks.num_free_host_blocks)
    scheduler.check()


def test_an_aborted_swap_is_not_copied() -> None:
    """A copy that no step has carried yet must not overwrite the next owner's host block."""
    turns, young = preempted_in_flight()

    turns.scheduler.abort(young)
    steps = [turns.take() for _ in range(3)]

    assert {()} == {step.swap_out for step in steps if step is not None}
    turns.run()
    assert 0 == turns.runner.num_copied_blocks


def test_logits_that_are_not_finite_end_one_sequence() -> None:
    """Its token is handed on as -1, its blocks are not shared, and others go on."""
    scheduler = make_scheduler()
    turns = make_turns(scheduler, bad=frozenset({("a", 0, 14)}))
    bad, good = add(scheduler, "a", 12), add(scheduler, "b", 12)

    turns.run()

    assert (FinishReason.ERROR, 2) == (bad.finish_reason, len(bad.output))
    assert (FinishReason.LENGTH, 8) == (good.finish_reason, len(good.output))
    again = Sequence(bad.request, 0)
    assert [] == scheduler.blocks.match_prefix(again)


def test_slots_are_given_up_before_they_are_taken() -> None:
    """A step that names a slot in `left` may give it to the next sequence at once."""
    scheduler = make_scheduler(max_num_seqs=1)
    turns = make_turns(scheduler)
    add(scheduler, "a", 4, max_tokens=1)
    add(scheduler, "b", 4, max_tokens=1)

    steps = [turns.take(), turns.take()]

    assert [(), (0,)] == [step.left for step in steps if step is not None]
    assert [True, True] == [step.chunks[0].join for step in steps if step is not None]


def test_capacity_counts_what_runs_and_what_waits() -> None:
    """Free memory is what neither of them has, will need soon, or asks for; seats are free of what runs."""
    scheduler = make_scheduler(num_blocks=65, max_num_seqs=4, headroom=16)
    turns = make_turns(scheduler)
    empty = scheduler.capacity()
    add(scheduler, "a", 16, max_tokens=40)
    turns.take()
    add(scheduler, "b", 16, max_tokens=40)

    capacity = scheduler.capacity()

    assert (4, 256, 0, 256, 200) == (
        empty.free_seqs,
        empty.free_tokens,
        empty.waiting_seqs,
        empty.total_tokens,
        empty.max_model_len,
    )
    assert (3, 1) == (capacity.free_seqs, capacity.waiting_seqs)
    # 17 and 16 tokens, and 16 more of each, in blocks of 4
    assert 256 - 36 - 32 == capacity.free_tokens


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_memory_is_used_and_not_wasted_while_jobs_wait(preemption: str) -> None:
    """Over 90 % of the blocks are referenced, under 4 % of their slots are empty, and preemption is rare."""
    rng = np.random.default_rng(0)
    num_seqs, block_size, num_blocks = 120, 16, 40 * 24
    # a lognormal with sigma 1 has the mean exp(mu + 1/2)
    lengths = [np.clip(rng.lognormal(np.log(mean) - 0.5, 1, num_seqs), 4, 1024).astype(int) for mean in (220, 200)]
    blocks = BlockManager(num_blocks=num_blocks, block_size=block_size, num_host_blocks=num_blocks)
    scheduler = Scheduler(
        blocks,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        max_model_len=2048,
        preemption=PreemptionPolicy(preemption),
    )
    runner = FakeRunner(num_blocks=num_blocks, block_size=block_size, num_host_blocks=num_blocks)
    length_of = {f"r{index}": int(length) for index, length in enumerate(lengths[1])}

    def ends(sequence: Sequence, _: int) -> FinishReason | None:
        return FinishReason.STOP if len(sequence.output) >= length_of[sequence.request.request_id] else None

    turns = Turns(scheduler, runner, ends=ends)
    for index, length in enumerate(lengths[0]):
        # the scheduler knows no more than a limit that few answers reach
        prompt = rng.integers(0, 30_000, length).astype(np.int32)
        scheduler.add(Sequence(Request(f"r{index}", prompt, SamplingParams(max_tokens=1024)), 0))
    usage, waste = [], []
    turns.take()
    while scheduler.num_waiting + scheduler.num_swapped:
        turns.take()
        held = scheduler.running
        referenced = {block for sequence in held for block in sequence.block_table}
        usage.append(blocks.usage)
        waste.append(1 - sum(sequence.num_computed for sequence in held) / (len(referenced) * block_size))

    assert np.mean(usage) > 0.90
    assert np.mean(waste) < 0.04
    assert sum(scheduler.num_preemptions.values()) <= num_seqs // 10
