"""What the scheduler keeps of each sequence, of one pass over them, and of a step that comes back."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from math import inf

import numpy as np
from numpy.typing import NDArray

from engine.request import NO_DECODES, BlockCopy, Chunk, Decodes, Sequence, Status


@dataclass(slots=True, eq=False)
class Entry:
    """
    A sequence in the scheduler's care.

    Args:
        order: Priority, then what the queue's policy says: the smaller is served first and preempted last.
        limit: Number of tokens at which the answer ends at the latest.
        gate: Newest step launched when it was last preempted; it may not run again before that step
            has completed. -1 when it never was.
        expected: Number of tokens at which the answer will probably end; 0 where nobody knows.
    """

    sequence: Sequence
    order: tuple[int, ...]
    limit: int
    gate: int = -1
    expected: int = 0

    @property
    def priority(self) -> int:
        return self.order[0]

    @property
    def ends(self) -> bool:
        """Whether its last token is in flight already."""
        return self.sequence.num_tokens >= self.limit

    def set_back(self, gate: int) -> None:
        """Note that it was preempted."""
        self.gate = gate
        self.sequence.num_preemptions += 1


class EntryList(list[Entry]):
    """
    Entries sorted by `order`. `changes` counts what came and went, for those who keep a sum over them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.changes = 0

    def insert_sorted(self, entry: Entry) -> int:
        """Put an entry in its place, and return the place."""
        index = bisect_left(self, entry.order, key=_order)
        self.insert(index, entry)
        self.changes += 1
        return index

    def remove_sorted(self, entry: Entry) -> int:
        """Take out an entry that is in the list, and return where it was."""
        index = bisect_left(self, entry.order, key=_order)
        assert self[index] is entry, f"{entry.sequence} is not in this list"
        self.take(index)
        return index

    def take(self, index: int) -> None:
        """Take out the entry at a place."""
        del self[index]
        self.changes += 1

    def sequences(self) -> Iterable[Sequence]:
        return (entry.sequence for entry in self)

    def check(self, states: Collection[Status]) -> None:
        """Raise AssertionError when the order is wrong, or a sequence is in none of `states` or not as it should be."""
        orders = [entry.order for entry in self]
        assert orders == sorted(orders), f"out of order: {orders}"
        for sequence in self.sequences():
            assert sequence.status in states, f"{sequence} is in the wrong list"
            assert sequence.num_computed <= sequence.num_tokens, f"{sequence} is ahead of its tokens"
            assert sequence.num_known <= sequence.num_tokens, f"{sequence} knows tokens that nobody sampled"
            assert sequence.status is not Status.WAITING or not sequence.num_computed, f"{sequence} holds no KV"
            assert bool(sequence.host_blocks) == (sequence.status is Status.SWAPPED), f"{sequence} on the host"

    def place_behind(self, priority: float) -> int:
        """How many entries have this priority or a smaller one: the place of the first that is less urgent."""
        return len(self) if priority == inf else bisect_right(self, priority, key=_priority)

    def next_priority(self, priority: float) -> float:
        """The smallest that is larger than this one; infinite where there is none."""
        place = self.place_behind(priority)
        return self[place].priority if place < len(self) else inf


class Queue(EntryList):
    """Sequences that wait, with their numbers of tokens in columns: these do not change while they are here."""

    def __init__(self) -> None:
        super().__init__()
        self._num_tokens = array("q")
        # the last token of an answer is never computed
        self._ends = array("q")
        self._expected = array("q")

    def insert_sorted(self, entry: Entry) -> int:
        index = super().insert_sorted(entry)
        self._num_tokens.insert(index, entry.sequence.num_tokens)
        self._ends.insert(index, entry.limit - 1)
        self._expected.insert(index, entry.expected)
        return index

    def take(self, index: int) -> None:
        super().take(index)
        del self._num_tokens[index], self._ends[index], self._expected[index]

    def longest_first(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The tokens that each has, and those that it will probably get, at least one; most to get first."""
        num_tokens = np.array(self._num_tokens, dtype=np.int64)
        expected, ends = np.array(self._expected, dtype=np.int64), np.array(self._ends, dtype=np.int64)
        # where nobody knows, or more came than was expected, it may be all that there may be
        left = np.maximum(np.where(expected > num_tokens, expected, ends + 1) - num_tokens, 1)
        places = np.argsort(-left, kind="stable")
        return num_tokens[places], left[places]

    def claims(self, headroom: int, block_size: int) -> NDArray[np.int64]:
        """[len(self)], blocks that each will have when it has run for `headroom` tokens, or to its end."""
        num_tokens = np.array(self._num_tokens, dtype=np.int64)
        ahead = np.minimum(num_tokens + headroom, np.array(self._ends, dtype=np.int64))
        claims: NDArray[np.int64] = -(-np.maximum(num_tokens, ahead) // block_size)
        return claims


@dataclass(frozen=True, slots=True)
class Arrived:
    """
    The tokens of a completed step, by sequence that is still alive, in the order of `Step.sampling`.

    Args:
        sequences: Each with its token appended to the output, unless that is -1; not to be changed.
        token_ids: [len(sequences)] int64; -1 where the logits were not finite.
        last: [len(sequences)] bool: the answer ends by length with this token.
        failed: Whether any token is -1.
    """

    sequences: list[Sequence]
    token_ids: NDArray[np.int64]
    last: NDArray[np.bool_]
    failed: bool = False

    def __iter__(self) -> Iterator[tuple[Sequence, int]]:
        return zip(self.sequences, self.token_ids.tolist(), strict=True)


@dataclass(slots=True)
class Pass:
    """
    What one scheduling pass has left to give, and what it gave.

    Args:
        budget: Tokens that may still be computed in this step.
        chunks: Those that are not among `decodes`.
        num_stalled: Running sequences that wait for a block.
        num_partials: Prompts that will be in the middle of their prefill after this step.
        partial: The most urgent priority among those; infinite where there is none.
        crowded: Whether a running sequence was preempted because another one grew.
        closed: The most urgent priority of those that were preempted, or had their turn and could not start;
            of it, and behind it, nobody is admitted.
    """

    budget: int
    decodes: Decodes = NO_DECODES
    chunks: list[Chunk] = field(default_factory=list)
    swap_in: list[BlockCopy] = field(default_factory=list)
    num_stalled: int = 0
    num_partials: int = 0
    partial: float = inf
    crowded: bool = False
    closed: float = inf

    def add_decodes(self, decodes: Decodes) -> None:
        """Decode these too; they come behind those that are here."""
        self.decodes = self.decodes.followed_by(decodes) if self.decodes else decodes
        self.budget -= len(decodes)

    def add_chunk(self, sequence: Sequence, *, join: bool = False) -> None:
        """Compute as much of a sequence as the budget allows; without budget it stays a partial prefill."""
        wanted = sequence.num_tokens - sequence.num_computed
        length = min(wanted, self.budget)
        samples = length == wanted
        if not samples:
            self.num_partials += 1
            self.partial = min(self.partial, sequence.request.priority)
        if not length:
            return
        self.chunks.append(Chunk(sequence, sequence.num_computed, length, samples, join))
        self.budget -= length
        sequence.num_computed += length
        sequence.num_tokens += samples


def _order(entry: Entry) -> tuple[int, ...]:
    return entry.order


def _priority(entry: Entry) -> float:
    return entry.priority
