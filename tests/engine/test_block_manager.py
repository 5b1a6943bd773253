"""Blocks: who gets which, who shares, and when they come back."""

import random

import numpy as np
import pytest

from engine.block_manager import BlockManager
from engine.free_list import FreeList
from engine.request import BlockCopy, Request, Sequence, Status
from engine.sampling_params import SamplingParams


def grow(blocks: BlockManager, *sequences: Sequence) -> None:
    blocks.grow(
        [sequence.block_table for sequence in sequences], np.array([s.newest_block for s in sequences], np.int32)
    )


def sequence_of(
    length: int, *, first: int = 0, salt: str | None = None, prompt_logprobs: int | None = None
) -> Sequence:
    prompt = np.arange(first, first + length, dtype=np.int32)
    params = SamplingParams(max_tokens=64, prompt_logprobs=prompt_logprobs)
    return Sequence(Request("r", prompt, params, cache_salt=salt), 0)


def started(blocks: BlockManager, sequence: Sequence, *, computed: bool = True) -> Sequence:
    """Admit a sequence as the scheduler does; `computed` also completes its prompt."""
    blocks.allocate(sequence, blocks.match_prefix(sequence))
    sequence.status = Status.RUNNING
    if computed:
        sequence.num_computed = sequence.num_tokens
        blocks.commit(sequence, sequence.num_tokens)
    return sequence


def num_cached(blocks: BlockManager, sequence: Sequence) -> int:
    """How many leading tokens the cache has."""
    return blocks.block_size * len(blocks.match_prefix(sequence))


def is_being_computed(blocks: BlockManager, sequence: Sequence) -> bool:
    return blocks.is_being_computed(sequence, blocks.match_prefix(sequence))


def preempted(blocks: BlockManager, sequence: Sequence) -> list[BlockCopy]:
    copies = blocks.swap_out(sequence)
    sequence.status = Status.SWAPPED
    return copies


def test_the_null_block_is_never_given() -> None:
    """All blocks but 0 can be had at once, in the order of their ids."""
    blocks = BlockManager(num_blocks=10, block_size=4)

    sequence = started(blocks, sequence_of(36))

    assert list(range(1, 10)) == sequence.block_table
    assert 0 == blocks.num_free_blocks
    assert 1.0 == blocks.usage


def test_equal_prompts_share_all_full_blocks_but_the_last_token() -> None:
    """The last token is always computed, so the block that it fills is not reused."""
    blocks = BlockManager(num_blocks=20, block_size=4)
    first = started(blocks, sequence_of(12))

    second = sequence_of(12)
    third = sequence_of(13)

    assert 8 == num_cached(blocks, second)
    assert 12 == num_cached(blocks, third)
    matched = blocks.match_prefix(third)
    assert 1 == blocks.num_blocks_to_start(third, matched)
    assert 12 == blocks.allocate(third, matched)
    assert first.block_table == third.block_table[:3]
    assert (25, 12) == (blocks.query_tokens, blocks.hit_tokens)
    blocks.check([first, third])


@pytest.mark.parametrize(
    "other",
    [sequence_of(13, salt="a"), sequence_of(13, first=1), sequence_of(13, prompt_logprobs=0)],
    ids=["salt", "tokens", "prompt_logprobs"],
)
def test_others_find_nothing(other: Sequence) -> None:
    """Another salt or other tokens hit nothing; prompt log-probabilities skip the cache."""
    blocks = BlockManager(num_blocks=20, block_size=4)
    started(blocks, sequence_of(13))

    assert 0 == num_cached(blocks, other)


def test_without_prefix_caching_nothing_is_shared() -> None:
    """The switch turns off reading, writing and waiting."""
    blocks = BlockManager(num_blocks=20, block_size=4, prefix_caching=False)
    started(blocks, sequence_of(12))

    assert 0 == num_cached(blocks, sequence_of(12))
    assert not is_being_computed(blocks, sequence_of(12))


def test_blocks_are_shared_only_once_they_are_computed() -> None:
    """Until then the next sequence of the same prompt is told to wait, and no longer than needed."""
    blocks = BlockManager(num_blocks=20, block_size=4)
    first = started(blocks, sequence_of(12), computed=False)
    second = sequence_of(12)

    assert 0 == num_cached(blocks, second)
    assert is_being_computed(blocks, second)
    assert not is_being_computed(blocks, sequence_of(4))
    assert not is_being_computed(blocks, sequence_of(12, prompt_logprobs=0))
    blocks.commit(first, 7)
    assert 4 == num_cached(blocks, second)
    assert is_being_computed(blocks, second)
    blocks.free(first)
    assert not is_being_computed(blocks, second)


def test_freed_blocks_stay_cached_until_they_are_needed() -> None:
    """What was used last is overwritten last."""
    blocks = BlockManager(num_blocks=7, block_size=4)
    for first in (0, 100):
        blocks.free(started(blocks, sequence_of(12, first=first)))
    assert 6 == blocks.num_free_blocks

    started(blocks, sequence_of(4, first=200))

    assert num_cached(blocks, sequence_of(13)) < 12
    assert 12 == num_cached(blocks, sequence_of(13, first=100))


def test_the_end_of_a_prefix_goes_before_its_beginning() -> None:
    """Of a prefix that was shared, no block is overwritten out of turn."""
    blocks = BlockManager(num_blocks=5, block_size=4)
    blocks.free(started(blocks, sequence_of(16)))
    blocks.free(started(blocks, sequence_of(17 - 1)))

    left = []
    for count in (1, 2, 3):
        intruder = started(blocks, sequence_of(4 * count, first=100 * count))
        blocks.free(intruder)
        left.append(num_cached(blocks, sequence_of(16)))

    assert left == sorted(left, reverse=True)
    assert 12 == left[0]


def test_an_answer_is_shared_when_its_sequence_lets_go() -> None:
    """Of the tokens that it knows the last may not be computed: the block that it fills is left out."""
    blocks = BlockManager(num_blocks=20, block_size=4)
    sequence = started(blocks, sequence_of(6))
    sequence.num_tokens += 6
    grow(blocks, sequence)
    sequence.extend(range(6, 12))
    again = sequence_of(13)

    assert 4 == num_cached(blocks, again)
    blocks.free(sequence)
    assert 8 == num_cached(blocks, again)
    blocks.check([])


def test_what_was_not_computed_or_is_distrusted_is_never_shared() -> None:
    """Neither the rest of a prompt whose sequence lets go early, nor an answer that went wrong."""
    blocks = BlockManager(num_blocks=20, block_size=4)
    early, wrong = started(blocks, sequence_of(12), computed=False), started(blocks, sequence_of(6, first=100))
    wrong.num_tokens += 6
    grow(blocks, wrong)
    wrong.extend(range(106, 111))
    blocks.discard(wrong)

    for sequence in (early, wrong):
        blocks.free(sequence)

    assert (0, 0) == (num_cached(blocks, sequence_of(13)), num_cached(blocks, sequence_of(13, first=100)))
    blocks.check([])


def test_a_hit_takes_its_block_from_the_free_ones() -> None:
    """Admission counts cached blocks that nobody references, for they are free until then."""
    blocks = BlockManager(num_blocks=7, block_size=4)
    blocks.free(started(blocks, sequence_of(12)))

    again = sequence_of(13)

    assert 4 == blocks.num_blocks_to_start(again, blocks.match_prefix(again))
    started(blocks, again)
    assert 2 == blocks.num_free_blocks
    blocks.check([again])


def test_what_is_shared_or_kept_is_won_late_or_never() -> None:
    """A block comes free with the last of its owners; one that is kept for another will have an owner still."""
    blocks = BlockManager(num_blocks=20, block_size=4)
    first, second, third = (started(blocks, sequence_of(length)) for length in (13, 13, 20))
    tables = [sequence.block_table for sequence in (first, second, third)]
    assert [1, 2, 3, 3, None] == [blocks.num_to_free(tables, wanted, kept=[]) for wanted in (1, 2, 3, 7, 8)]
    assert [1, 2, 3, None] == [blocks.num_to_free(tables, wanted, kept=tables[0][:3]) for wanted in (1, 2, 4, 5)]


def test_freed_blocks_come_back_when_the_newest_step_has_completed() -> None:
    """Steps in flight may still touch them, so that nobody gets them before."""
    blocks = BlockManager(num_blocks=7, block_size=4)
    sequence = started(blocks, sequence_of(12))
    blocks.launched(1)
    blocks.launched(2)

    blocks.free(sequence)

    assert (3, 3) == (blocks.num_free_blocks, blocks.num_fenced_blocks)
    blocks.completed(1)
    assert 3 == blocks.num_free_blocks
    blocks.check([])
    blocks.completed(2)
    assert (6, 0) == (blocks.num_free_blocks, blocks.num_fenced_blocks)
    blocks.check([])


def test_a_block_computed_twice_is_cached_once() -> None:
    """The second copy belongs to its sequence alone and holds nothing for others when it is free."""
    blocks = BlockManager(num_blocks=9, block_size=4)
    first, second = (started(blocks, sequence_of(8, prompt_logprobs=0)) for _ in range(2))
    blocks.check([first, second])

    third = started(blocks, sequence_of(9))

    assert first.block_table == third.block_table[:2]
    assert set(second.block_table).isdisjoint(third.block_table)
    for sequence in (second, first, third):
        blocks.free(sequence)
    blocks.check([])


def test_distrusted_blocks_are_not_shared() -> None:
    """After `discard` nothing of a sequence is found any more."""
    blocks = BlockManager(num_blocks=9, block_size=4)
    sequence = started(blocks, sequence_of(12))

    blocks.discard(sequence)

    assert 0 == num_cached(blocks, sequence_of(13))
    blocks.check([sequence])


def test_swap_copies_what_was_computed_and_what_the_cache_lost() -> None:
    """Out go the computed blocks; in come those that are not in the prefix cache any more."""
    blocks = BlockManager(num_blocks=7, block_size=4, num_host_blocks=5)
    sequence = started(blocks, sequence_of(14))
    sequence.extend([0])
    table = sequence.block_table

    out = preempted(blocks, sequence)
    intruder = started(blocks, sequence_of(16, first=100))
    blocks.free(intruder)

    assert table == [copy.device_block for copy in out]
    host = list(sequence.host_blocks)
    assert (1, 4) == (blocks.num_free_host_blocks, len(host))
    matched = blocks.match_prefix(sequence)
    assert len(matched) < 3
    into = blocks.swap_in(sequence, matched)
    assert list(zip(sequence.block_table, host, strict=True))[len(matched) :] == [
        (copy.device_block, copy.host_block) for copy in into
    ]
    assert table[: len(matched)] == sequence.block_table[: len(matched)]


def test_host_blocks_come_back_when_the_copies_are_done() -> None:
    """The step that copies them in is the next one to be launched."""
    blocks = BlockManager(num_blocks=7, block_size=4, num_host_blocks=3)
    sequence = started(blocks, sequence_of(12))
    blocks.launched(1)
    preempted(blocks, sequence)
    blocks.completed(1)
    blocks.swap_in(sequence, blocks.match_prefix(sequence))

    blocks.check([sequence])
    assert 0 == blocks.num_free_host_blocks
    blocks.launched(2)
    blocks.completed(2)
    assert 3 == blocks.num_free_host_blocks


def test_a_swapped_sequence_reads_the_cache_even_with_prompt_logprobs() -> None:
    """Their logits have been computed: there is nothing left to skip."""
    blocks = BlockManager(num_blocks=7, block_size=4, num_host_blocks=3)
    sequence = started(blocks, sequence_of(12, prompt_logprobs=0))
    sequence.extend([0])

    preempted(blocks, sequence)

    assert [] == blocks.swap_in(sequence, blocks.match_prefix(sequence))


def test_check_says_both_numbers() -> None:
    """A table that nobody knows of shows as references without owners."""
    blocks = BlockManager(num_blocks=7, block_size=4)
    started(blocks, sequence_of(4))

    with pytest.raises(AssertionError, match="block 1 has 0 owners and 1 references"):
        blocks.check([])


def test_tables_grow_in_one_piece_where_the_pool_has_room() -> None:
    """A new table begins some way behind the last one, so that both can grow."""
    blocks = BlockManager(num_blocks=100, block_size=4)
    first, second = (started(blocks, sequence_of(8, first=first)) for first in (0, 100))
    for _ in range(6):
        grow(blocks, first, second)

    for sequence in (first, second):
        begin = sequence.block_table[0]
        assert list(range(begin, begin + 8)) == sequence.block_table


def test_young_content_is_worth_more_than_a_run() -> None:
    """The next id is left alone when it was cached a moment ago."""
    free = FreeList(20)
    free.push_last([*range(5, 20), 2, 3, 4])

    assert [5] == free.pop(1, after=1)
    assert 2 in free


def test_many_blocks_go_as_they_would_one_by_one() -> None:
    """Blocks pushed, removed or popped together leave the free list as the same ones do one after the other."""
    rng = random.Random(0)
    many, single, free = FreeList(60), FreeList(60), set[int]()
    for _ in range(3_000):
        outside = rng.sample(sorted(set(range(1, 60)) - free), rng.randint(0, 59 - len(free)))
        action = rng.choice(["first", "last", "remove", "pop"])
        if action == "first":
            many.push_first(outside)
            for block in outside:
                single.push_first([block])
            free |= set(outside)
        elif action == "last":
            kept = [rng.random() < 0.2 for _ in outside]
            many.push_last(outside, kept=np.array(kept, dtype=np.bool_))
            for block, keep in zip(outside, kept, strict=True):
                single.push_last([block], kept=np.array([keep]))
            free |= set(outside)
        elif action == "remove":
            blocks = rng.sample(sorted(free), rng.randint(0, min(3, len(free))))
            many.remove(blocks)
            for block in blocks:
                single.remove([block])
            free -= set(blocks)
        else:
            count, after, room = rng.randint(0, len(free)), rng.randint(0, 59), rng.randint(0, 9)
            taken = list[int]()
            while len(taken) < count:
                # the room behind a run is counted from its beginning
                taken += single.pop(1, after=taken[-1] if taken else after, room=room + count - len(taken) - 1)
            assert taken == many.pop(count, after=after, room=room)
            free -= set(taken)
        many.check()
        assert len(free) == len(many)
    assert single.pop(len(free)) == many.pop(len(free))


def test_a_block_is_not_free_twice() -> None:
    """Blocks of which one is on the list already are refused."""
    free = FreeList(9)
    free.push_first([1, 2])

    with pytest.raises(AssertionError, match=r"1 of blocks .* free already"):
        free.push_last([3, 2])


def test_the_free_list_agrees_with_a_plain_one() -> None:
    """Whatever is pushed, popped and removed, no block is lost and none comes twice."""
    rng = random.Random(0)
    free, model = FreeList(40), set[int]()
    for _ in range(3_000):
        outside = sorted(set(range(1, 40)) - model)
        action = rng.choice(["first", "last", "remove", "pop", "behind"])
        if action in ("first", "last") and outside:
            block = rng.choice(outside)
            (free.push_first if action == "first" else free.push_last)([block])
            model.add(block)
        elif action == "remove" and model:
            block = rng.choice(sorted(model))
            free.remove([block])
            model.remove(block)
        elif action == "pop":
            count = rng.randint(0, len(model))
            taken = free.pop(count, after=rng.randint(0, 39), room=rng.randint(0, 9))
            assert count == len(set(taken) & model)
            model -= set(taken)
        elif action == "behind":
            wanted = rng.randint(0, len(model))
            behind = np.array(rng.sample(range(40), wanted), dtype=np.int32)
            taken = free.pop_behind(behind, room=rng.randint(0, 9))[0].tolist()
            assert set(taken) <= model
            assert len(set(taken)) == len(taken)
            model -= set(taken)
        free.check()
        assert len(model) == len(free)
        assert [block in model for block in range(40)] == [block in free for block in range(40)]
