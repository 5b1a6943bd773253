"""What an engine says it could take, by priority."""

from math import inf

import numpy as np
import pytest

from engine.block_manager import BlockManager
from engine.capacity import Freeable
from engine.claims import MAX_REFUSALS, Claims
from engine.entries import Entry, Queue
from engine.policy import Headroom
from engine.request import Request, Sequence
from engine.running import Running
from engine.sampling_params import SamplingParams
from tests.support.planning import add, make_scheduler, make_turns

INTERACTIVE, STANDARD, BULK = range(3)


def entry_of(priority: int, arrival: int) -> Entry:
    sequence = Sequence(Request("r", np.arange(6, dtype=np.int32), SamplingParams(), priority=priority), 0)
    sequence.block_table = [2 * arrival + 1, 2 * arrival + 2]
    return Entry(sequence, (priority, arrival), limit=20)


def test_what_runs_and_waits_behind_a_priority_can_be_had() -> None:
    """
    Seats and blocks of who runs, and what was promised to them and to those who wait; nothing of one's like.
    """
    scheduler = make_scheduler(num_blocks=101, max_num_seqs=4, headroom=16)
    turns = make_turns(scheduler)
    for name, priority in (("a", INTERACTIVE), ("b", STANDARD), ("c", BULK), ("d", BULK)):
        add(scheduler, name, 16, max_tokens=40, priority=priority)
    turns.take()
    add(scheduler, "e", 16, max_tokens=40, priority=BULK)

    capacity = scheduler.capacity()

    # each of those that run has 17 tokens in 4 blocks, and will need 5 more; who waits 8
    assert (0, 4 * (100 - 4 * 9 - 8)) == (capacity.free_seqs, capacity.free_tokens)
    assert (Freeable(3, 4 * (3 * 9 + 8), 1), Freeable(2, 4 * (2 * 9 + 8), 1), Freeable()) == capacity.freeable


@pytest.mark.parametrize(
    ("running", "waiting", "partial", "levels"),
    [
        ((INTERACTIVE, BULK), (), inf, (inf,)),
        ((INTERACTIVE, BULK), (), BULK, (inf,)),
        ((INTERACTIVE, STANDARD, BULK), (), STANDARD, (STANDARD, inf)),
        ((STANDARD, BULK), (INTERACTIVE,), BULK, (INTERACTIVE, STANDARD, inf)),
        ((STANDARD, BULK), (BULK,), STANDARD, (STANDARD, inf)),
        ((STANDARD, STANDARD), (STANDARD,), STANDARD, (inf,)),
        ((), (INTERACTIVE, BULK), inf, (inf,)),
    ],
)
def test_all_is_planned_at_once_unless_a_prompt_is_more_urgent_than_others_that_run(
    running: tuple[int, ...], waiting: tuple[int, ...], partial: float, levels: tuple[float, ...]
) -> None:
    """
    Decodes of any priority go before a prompt in pieces that is no more urgent than they.
    """
    seats, queue = Running(4, block_size=4), Queue()
    claims = Claims(BlockManager(num_blocks=20, block_size=4), seats, queue, Headroom())
    for put, priorities in ((seats.join, running), (queue.insert_sorted, waiting)):
        for arrival, priority in enumerate(priorities):
            put(entry_of(priority, arrival))

    assert levels == claims.levels(partial)


def seated(*tokens_and_ends: tuple[int, int], num_blocks: int) -> tuple[Claims, Running]:
    """Sequences that run, by the tokens that each has and those at which it will probably end; blocks of 4."""
    blocks = BlockManager(num_blocks=num_blocks + 1, block_size=4)
    running, queue = Running(8, block_size=4), Queue()
    for arrival, (num_tokens, end) in enumerate(tokens_and_ends):
        running.join(allocated(blocks, arrival, num_tokens, end))
    return Claims(blocks, running, queue, Headroom()), running


def allocated(blocks: BlockManager, arrival: int, num_tokens: int, end: int) -> Entry:
    prompt = np.arange(num_tokens, dtype=np.int32) + 1000 * arrival
    sequence = Sequence(Request("r", prompt, SamplingParams(max_tokens=100), priority=BULK), 0)
    blocks.allocate(sequence, [])
    return Entry(sequence, (BULK, arrival), limit=num_tokens + 100, expected=end)


def waiting(num_tokens: int, end: int) -> Entry:
    sequence = Sequence(Request("r", np.arange(num_tokens, dtype=np.int32), SamplingParams(), priority=BULK), 0)
    return Entry(sequence, (BULK, 99), limit=500, expected=end)


def test_a_refusal_does_not_outlive_its_reason() -> None:
    """
    Nobody leaves, but the one that runs comes nearer to its end: what waits is looked at again before long.
    """
    claims, running = seated((16, 800), num_blocks=300)
    entry = waiting(16, 1000)
    assert not claims.will_fit(entry, [])

    running.num_tokens[running.slots[0]] = 716
    answers = [claims.will_fit(entry, []) for _ in range(MAX_REFUSALS)]

    assert [False] * (MAX_REFUSALS - 1) + [True] == answers


@pytest.mark.parametrize(("num_blocks", "fits"), [(16, False), (17, True)])
def test_who_is_let_in_fits_until_the_first_ends(num_blocks: int, fits: bool) -> None:
    """
    Most is needed just before two of them end: 36 tokens, 8 more of each, and half a block for each.
    """
    claims, _ = seated((16, 24), (16, 56), num_blocks=num_blocks)

    assert fits == claims.will_fit(waiting(4, 12), [])


@pytest.mark.parametrize(("num_blocks", "fits"), [(781, False), (782, True)])
def test_what_is_needed_much_later_keeps_nobody_out(num_blocks: int, fits: bool) -> None:
    """
    Three long answers, which will have three times the blocks that there are, are counted as they will be in 1,024
    steps: 16 tokens and 1,024 more each, and half a block.
    """
    claims, _ = seated((16, 3000), (16, 3000), num_blocks=num_blocks)

    assert fits == claims.will_fit(waiting(16, 3000), [])


def test_one_that_will_be_gone_leaves_its_blocks_to_the_others() -> None:
    """
    The longest alone may have what all together never need at one time.
    """
    claims, _ = seated((32, 34), (8, 9), num_blocks=20)

    assert claims.will_fit(waiting(8, 60), [])


def test_lengths_that_nobody_knows_do_not_keep_anybody_out() -> None:
    """
    What will be needed is not known then, and the headroom alone has to do.
    """
    claims, _ = seated((32, 0), (8, 0), num_blocks=12)

    assert claims.will_fit(waiting(4, 0), [])
    assert not claims.will_fit(waiting(4, 30), [])


def test_who_takes_nearly_all_by_itself_is_not_kept_out_for_ever() -> None:
    """
    It would wait until nobody runs, which more urgent work may never let happen.
    """
    claims, _ = seated((8, 60), num_blocks=20)

    assert not claims.will_fit(waiting(8, 72), [])
    assert claims.will_fit(waiting(8, 73), [])


def test_who_was_too_large_may_fit_when_somebody_has_gone() -> None:
    """
    The answer is kept for as long as nobody comes or goes.
    """
    claims, running = seated((16, 60), (16, 60), num_blocks=30)
    late = waiting(8, 60)
    assert [False, False] == [claims.will_fit(late, []) for _ in range(2)]

    running.leave(running.entries[0], 0)

    assert claims.will_fit(late, [])


def test_what_was_promised_twice_is_no_gain() -> None:
    """
    Where those who wait want more than is free, that much of what could be taken is missing already.
    """
    scheduler = make_scheduler(num_blocks=31, max_num_seqs=4, headroom=0)
    turns = make_turns(scheduler)
    add(scheduler, "a", 60, max_tokens=20, priority=BULK)
    turns.take()
    add(scheduler, "b", 80, max_tokens=20, priority=STANDARD)

    capacity = scheduler.capacity()

    # of 30 blocks a will need 16 and b wants 20
    assert 0 == capacity.free_tokens
    assert (4 * 30, 4 * 10) == (capacity.freeable[INTERACTIVE].tokens, capacity.freeable[STANDARD].tokens)
    assert (1, 1) == (capacity.freeable[INTERACTIVE].seqs, capacity.freeable[INTERACTIVE].passed)


def test_blocks_that_bulk_shares_are_counted_once() -> None:
    """
    More than there is cannot come free.
    """
    scheduler = make_scheduler(num_blocks=41, max_num_seqs=8, headroom=0)
    turns = make_turns(scheduler)
    for name in "abcdef":
        add(scheduler, name, 81, max_tokens=3, first=0, priority=BULK)
    turns.take()
    turns.take()
    turns.take()
    assert 6 == scheduler.num_running

    capacity = scheduler.capacity()

    assert capacity.free_tokens + capacity.freeable[INTERACTIVE].tokens == capacity.total_tokens


@pytest.mark.parametrize("priority", [-1, 0, 7])
def test_priorities_beyond_the_three_count_too(priority: int) -> None:
    """
    A larger one is behind all of them, a smaller one behind none.
    """
    scheduler = make_scheduler(headroom=0)
    turns = make_turns(scheduler)
    add(scheduler, "a", 8, max_tokens=1, priority=priority)
    add(scheduler, "b", 8, max_tokens=9, priority=priority)
    turns.take()

    gains = [gain.seqs for gain in scheduler.capacity().freeable]

    assert ([1, 1, 1] if priority == 7 else [0, 0, 0]) == gains
    assert Freeable() == scheduler.capacity().freeable_by(8)


def test_who_asks_is_told_of_every_change() -> None:
    """
    Counts are kept from one call to the next, and not for longer than they are right.
    """
    scheduler = make_scheduler(max_num_seqs=2)
    turns = make_turns(scheduler)
    sequences = [add(scheduler, name, 8, max_tokens=9, priority=BULK) for name in "abc"]
    seen = []
    for act in (turns.take, lambda: scheduler.abort(sequences[2]), lambda: scheduler.abort(sequences[0]), turns.run):
        act()
        gain = scheduler.capacity().freeable[STANDARD]
        seen.append((gain.seqs, gain.passed))

    assert [(2, 1), (2, 0), (1, 0), (0, 0)] == seen
