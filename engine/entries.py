"""What the scheduler keeps of each sequence, of one pass over them, and of a step that comes back."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.request import NO_DECODES, BlockCopy, Chunk, Decodes, Sequence


@dataclass(slots=True, eq=False)
class Entry:
    """
    A sequence in the scheduler's care.

    Args:
        order: (priority, arrival): the smaller is served first and preempted last.
        limit: Number of tokens at which the answer ends at the latest.
        gate: Newest step launched when it was last preempted; it may not run again before that step
            has completed. -1 when it never was.
    """

    sequence: Sequence
    order: tuple[int, int]
    limit: int
    gate: int = -1

    @property
    def ends(self) -> bool:
        """Whether its last token is in flight already."""
        return self.sequence.num_tokens >= self.limit


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
    """

    budget: int
    decodes: Decodes = NO_DECODES
    chunks: list[Chunk] = field(default_factory=list)
    swap_in: list[BlockCopy] = field(default_factory=list)
    num_stalled: int = 0
    num_preempted: int = 0
    num_partials: int = 0

    def add_chunk(self, sequence: Sequence, *, join: bool = False) -> None:
        """Compute as much of a sequence as the budget allows; without budget it stays a partial prefill."""
        wanted = sequence.num_tokens - sequence.num_computed
        length = min(wanted, self.budget)
        samples = length == wanted
        self.num_partials += not samples
        if not length:
            return
        self.chunks.append(Chunk(sequence, sequence.num_computed, length, samples, join))
        self.budget -= length
        sequence.num_computed += length
        sequence.num_tokens += samples


def _order(entry: Entry) -> tuple[int, int]:
    return entry.order
