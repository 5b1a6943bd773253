"""A step says the same by chunk and by column."""

import numpy as np

from engine.block_manager import BlockManager
from engine.request import Chunk, Request, Sequence, Step
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from tests.support.fake_runner import FakeRunner, Turns, check_columns


def sequence_of(length: int, *, slot: int = -1, max_tokens: int = 8) -> Sequence:
    prompt = np.arange(100 * length, 101 * length, dtype=np.int32)
    sequence = Sequence(Request(f"r{length}", prompt, SamplingParams(max_tokens=max_tokens)), 0)
    sequence.slot = slot
    return sequence


def test_the_leading_decodes_are_columns() -> None:
    """A step that was made of chunks has the columns of those decodes that come first, and keeps the order."""
    first, second = Chunk(sequence_of(5, slot=3), 5, 1, True), Chunk(sequence_of(9, slot=0), 12, 1, True)
    prompt = Chunk(sequence_of(20, slot=2), 4, 16, True)
    late = Chunk(sequence_of(7, slot=1), 7, 1, True)

    step = Step(1, (first, second, prompt, late))

    assert (first, second, prompt, late) == step.chunks
    assert (prompt, late) == step.prefill_chunks
    assert ([3, 0], [5, 12]) == (step.decodes.slots.tolist(), step.decodes.starts.tolist())
    assert (np.int64, np.int32) == (step.decodes.slots.dtype, step.decodes.starts.dtype)
    assert (2, 4, 19) == (step.num_decodes, step.num_sampling, step.num_tokens)
    check_columns(step)


def test_one_token_alone_makes_no_decode() -> None:
    """The first chunk in a slot, and one that samples nothing, read more than the slot's newest token."""
    joins = Chunk(sequence_of(5, slot=3), 4, 1, True, join=True)
    piece = Chunk(sequence_of(9, slot=0), 3, 1, False)

    for chunk in (joins, piece):
        step = Step(1, (chunk,))

        assert (0, (chunk,)) == (step.num_decodes, step.prefill_chunks)
        check_columns(step)


def test_planned_steps_have_the_columns_of_their_chunks() -> None:
    """Decodes, the rest of a prompt and a prompt that starts, in one step."""
    scheduler = Scheduler(
        BlockManager(num_blocks=65, block_size=4), max_num_seqs=4, max_num_batched_tokens=10, max_model_len=200
    )
    turns = Turns(scheduler, FakeRunner(num_blocks=65, block_size=4), depth=2)
    for length in (4, 5, 18, 3):
        scheduler.add(sequence_of(length))

    steps = [step for step in (turns.take() for _ in range(6)) if step is not None]

    kinds = [(step.num_decodes, [(chunk.length, chunk.join) for chunk in step.prefill_chunks]) for step in steps]
    assert [(0, [(4, True), (5, True), (1, True)]), (2, [(8, False)]), (2, [(8, False)])] == kinds[:3]
    # the last token of a prompt that came in pieces is a decode: the slot's newest token is the prompt's last
    assert (3, [(3, True)]) == kinds[3]
    for step in steps:
        again = Step(step.step_id, step.chunks)
        assert step.decodes.sequences == again.decodes.sequences
        assert step.decodes.starts.tolist() == again.decodes.starts.tolist()
        assert step.prefill_chunks == again.prefill_chunks


def test_columns_keep_the_slots_of_the_plan() -> None:
    """A sequence that has ended since gave its slot up; the step in flight still names it."""
    scheduler = Scheduler(
        BlockManager(num_blocks=65, block_size=4), max_num_seqs=4, max_num_batched_tokens=10, max_model_len=200
    )
    turns = Turns(scheduler, FakeRunner(num_blocks=65, block_size=4), depth=2)
    sequences = [sequence_of(length) for length in (2, 3)]
    for sequence in sequences:
        scheduler.add(sequence)
    turns.take()
    step = turns.take()
    assert step is not None

    scheduler.abort(sequences[0])

    assert [1, 0] == step.decodes.slots.tolist()
    assert [-1, 1] == [sequence.slot for sequence in sequences]
