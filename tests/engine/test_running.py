"""The columns of what runs."""

import numpy as np
import pytest

from engine.entries import Entry
from engine.request import Decodes, Request, Sequence, Step
from engine.running import Running
from engine.sampling_params import SamplingParams


def entry_of(arrival: int, *, length: int = 6, limit: int = 20) -> Entry:
    sequence = Sequence(Request(f"r{arrival}", np.arange(length, dtype=np.int32), SamplingParams()), 0)
    sequence.block_table = [2 * arrival + 1, 2 * arrival + 2]
    sequence.num_computed = length - 1
    return Entry(sequence, (0, arrival), limit)


def joined(running: Running, *arrivals: int, limit: int = 20) -> list[Entry]:
    entries = [entry_of(arrival, limit=limit) for arrival in arrivals]
    for entry in entries:
        running.join(entry)
    return entries


def advance_all(running: Running) -> Decodes:
    going = np.zeros(running.num_slots, dtype=np.bool_)
    going[running.slots] = True
    return running.advance(going, len(running))


def test_a_sequence_and_its_slot_are_one() -> None:
    """What either side counts the other one reads, and a sequence takes its numbers with it when it leaves."""
    running = Running(3, block_size=4)
    (entry,) = joined(running, 0)
    sequence = entry.sequence
    advance_all(running)
    sequence.num_tokens += 2

    assert (9, 6) == (running.num_tokens[sequence.slot], running.num_computed[sequence.slot])
    running.leave(entry, launched=1)
    joined(running, 1)

    assert (9, 6, 3) == (sequence.num_tokens, sequence.num_computed, sequence.num_in_flight)
    assert (0,) == running.take_left()


def test_slots_stand_in_the_order_of_urgency() -> None:
    """However sequences come and go, rows are theirs from the most urgent to the least."""
    running = Running(4, block_size=4)
    entries = joined(running, 5, 2, 9, 1)
    running.leave(entries[1], launched=0)
    entries += joined(running, 3)

    assert [1, 3, 5, 9] == [entry.order[1] for entry in running.entries]
    assert [entry.sequence.slot for entry in running.entries] == running.slots.tolist()
    running.check()


def test_decodes_stand_in_the_order_of_their_lengths() -> None:
    """
    The longest first, all of them or some, with their own slots; those of one length by urgency.
    """
    running = Running(5, block_size=4)
    entries = [entry_of(arrival, length=length) for arrival, length in enumerate((6, 8, 7, 8))]
    for entry in entries:
        running.join(entry)

    for computed in ([7, 7, 6, 5], [8, 8, 7, 6]):
        decodes = advance_all(running)
        assert [entries[place].sequence for place in (1, 3, 2, 0)] == decodes.sequences
        assert computed == decodes.starts.tolist()
        assert [sequence.slot for sequence in decodes.sequences] == decodes.slots.tolist()
    some = np.zeros(5, dtype=np.bool_)
    some[[entries[place].sequence.slot for place in (0, 2, 3)]] = True
    assert [9, 8, 7] == running.advance(some, 3).starts.tolist()


def test_the_last_token_is_known_before_it_is_sampled() -> None:
    """The step that samples the last token that an answer may have says so."""
    running = Running(2, block_size=4)
    joined(running, 0, limit=8)
    joined(running, 1, limit=9)

    last = [advance_all(running).last.tolist() for _ in range(2)]

    assert [[False, False], [True, False]] == last


def test_the_rows_that_have_gone_are_found() -> None:
    """A slot given up since the launch counts as gone, also when another sequence has it by now."""
    running = Running(2, block_size=4)
    old, young = joined(running, 0, 1)
    running.leave(young, launched=3)
    (heir,) = joined(running, 2)
    before = Step(3, (), decodes=advance_all(running))
    after = Step(4, (), decodes=before.decodes)

    assert old.sequence.slot != heir.sequence.slot
    assert ([1], []) == (running.gone(before), running.gone(after))


def test_tokens_of_many_become_known_at_once() -> None:
    """Each sequence gets the token of its slot, and what it has is its own when it leaves."""
    running = Running(3, block_size=4)
    first, second = joined(running, 4, 2)
    slots = running.slots
    for rows, tokens in ([0, 1], [70, 71]), ([0], [72]), ([0, 1], [73, 74]):
        advance_all(running)
        running.learn(slots[rows], np.array(tokens, dtype=np.int64))
    running.check()

    # the most urgent one comes first
    assert ([71, 74], [70, 72, 73]) == (first.sequence.output, second.sequence.output)
    running.leave(first, launched=3)
    (heir,) = joined(running, 5)
    advance_all(running)
    running.learn(running.slots, np.array([75, 76], dtype=np.int64))

    assert ([71, 74], [70, 72, 73, 75], [76]) == tuple(one.sequence.output for one in (first, second, heir))


def test_rows_grow_with_the_longest() -> None:
    """However long an answer becomes, nothing of it or of the others is lost."""
    running = Running(2, block_size=4)
    entries = joined(running, 0, 1, limit=2000)
    running.leave(entries.pop(), launched=0)
    entries += joined(running, 2, limit=2000)
    tokens = np.arange(1500)
    for token in tokens:
        running.learn(running.slots, np.array([token, token + 1], dtype=np.int64))

    assert [tokens.tolist(), (tokens + 1).tolist()] == [entry.sequence.output for entry in entries]


def test_check_says_both_sides() -> None:
    """A table that grew behind the column's back is found."""
    running = Running(2, block_size=4)
    (entry,) = joined(running, 0)
    entry.sequence.block_table.append(9)

    with pytest.raises(AssertionError, match=r"has \[6, 5, 6, 19, 12, 9\] and its slot"):
        running.check()
