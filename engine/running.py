"""The sequences that hold a slot, and what is counted of them in columns, so that many advance at once."""

from array import array

import numpy as np
from numpy.typing import NDArray

from engine.entries import Entry, EntryList
from engine.request import Decodes, Sequence, Step


class Running:
    """
    Running sequences, the most urgent first, with their numbers by slot.

    A sequence's own `num_tokens` and `num_computed` are views of its slot in these columns
    while it is here: what is written on one side is read on the other.

    Args:
        num_slots: Sequences that run at a time.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.entries = EntryList()

        # by slot, all [num_slots]; what stands at a free slot means nothing
        self._counts = np.zeros((2, num_slots), dtype=np.int64)
        self.num_tokens, self.num_computed = self._counts
        self.limits = np.zeros(num_slots, dtype=np.int64)
        self.num_blocks = np.zeros(num_slots, dtype=np.int64)
        # newest step launched when the slot was last given up
        self._left_after = np.full(num_slots, -1, dtype=np.int64)
        self._sequences = np.full(num_slots, None, dtype=np.object_)

        # slots of `entries`, in their order
        self._order = array("i")
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._left: list[int] = []

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    @property
    def slots(self) -> NDArray[np.int32]:
        """[num running] int32, in order."""
        return np.array(self._order, dtype=np.int32)

    def join(self, entry: Entry) -> None:
        """Give a free slot to a sequence that has its blocks."""
        sequence, slot = entry.sequence, self._free_slots.pop()
        sequence.slot = slot
        sequence.move_counts(self._counts[:, slot])
        self.limits[slot] = entry.limit
        self.num_blocks[slot] = len(sequence.block_table)
        self._sequences[slot] = sequence
        self._order.insert(self.entries.insert_sorted(entry), slot)

    def leave(self, entry: Entry, launched: int) -> None:
        """
        Take a sequence's slot from it.

        Args:
            launched: Newest step that may still compute it there.
        """
        sequence = entry.sequence
        self._left_after[sequence.slot] = launched
        del self._order[self.entries.remove_sorted(entry)]
        self._sequences[sequence.slot] = None
        self._free_slots.append(sequence.slot)
        self._left.append(sequence.slot)
        sequence.slot = -1
        sequence.move_counts(np.empty(2, dtype=np.int64))

    def take_left(self) -> tuple[int, ...]:
        """The slots given up since this was last asked."""
        left, self._left = tuple(self._left), []
        return left

    def gone(self, step: Step) -> list[int]:
        """Which of a step's decodes, by row, have left their slots since it was launched."""
        rows: list[int] = np.flatnonzero(self._left_after[step.decode_slots] >= step.step_id).tolist()
        return rows

    def advance(self, slots: NDArray[np.int32]) -> Decodes:
        """Count one more token as computed, and the one after it as sampled, of each of these slots."""
        starts = self.num_computed[slots]
        num_tokens = self.num_tokens[slots] + 1
        self.num_computed[slots] = starts + 1
        self.num_tokens[slots] = num_tokens
        sequences: list[Sequence] = self._sequences[slots].tolist()
        return Decodes(sequences, slots, starts, last=num_tokens >= self.limits[slots])

    def check(self, block_size: int) -> None:
        """Raise AssertionError when slots, order or columns disagree with the sequences."""
        slots = [entry.sequence.slot for entry in self.entries]
        assert slots == list(self._order), f"slots {list(self._order)} for sequences in {slots}"
        assert sorted(self._free_slots + slots) == list(range(self.num_slots)), f"slots {slots} of {self.num_slots}"
        for entry in self.entries:
            sequence, slot = entry.sequence, entry.sequence.slot
            have = (self.num_tokens[slot], self.num_computed[slot], self.limits[slot], self.num_blocks[slot])
            want = (sequence.num_tokens, sequence.num_computed, entry.limit, len(sequence.block_table))
            assert want == have, f"{sequence} has {want} and its slot {have}"
            assert sequence.num_computed <= len(sequence.block_table) * block_size, f"{sequence} overruns"
            assert self._sequences[slot] is sequence, f"{sequence} is not the one of slot {slot}"
