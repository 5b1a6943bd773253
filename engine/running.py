"""The sequences that hold a slot, and what is counted of them in columns, so that many advance at once."""

from array import array

import numpy as np
from numpy.typing import NDArray

from engine.entries import Entry, EntryList
from engine.request import Decodes, Sequence, Step

# tokens that each slot has room for at least
MIN_WIDTH = 256


class Running:
    """
    Running sequences, the most urgent first, with their numbers by slot.

    A sequence's own counts and tokens are views of its slot in these columns while it is
    here: what is written on one side is read on the other.

    Args:
        num_slots: Sequences that run at a time.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.entries = EntryList()

        # by slot; what stands at a free slot means nothing
        self._columns = np.zeros((num_slots, 5), dtype=np.int64)
        self.num_tokens, self.num_computed, self._num_known, self.limits, self.num_blocks = self._columns.T
        # [num_slots, width], wider when a sequence needs it
        self._tokens = np.empty((num_slots, 0), dtype=np.int32)
        # no sequence here knows more tokens; counted up without a look at them
        self._longest = 0
        # newest step launched when the slot was last given up
        self._left_after = np.full(num_slots, -1, dtype=np.int64)
        self._last_left_after = -1
        self._sequences = np.full(num_slots, None, dtype=np.object_)

        # slots of `entries`, in their order; and what was made of it since the last one came or went
        self._order = array("q")
        self._slots: NDArray[np.int64] | None = None
        self._members: list[Sequence] | None = None
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._left: list[int] = []

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    @property
    def slots(self) -> NDArray[np.int64]:
        """[num running] int64, in order; not to be changed."""
        if self._slots is None:
            self._slots = np.array(self._order, dtype=np.int64)
        return self._slots

    def counts(self) -> tuple[NDArray[np.int64], ...]:
        """num_tokens, num_computed, num_known, limits and num_blocks, all [num running] int64, in order."""
        return tuple(self._columns.take(self.slots, axis=0).T)

    def sequences_of(self, slots: NDArray[np.int64]) -> list[Sequence]:
        """Whose these slots are; slots come in order. The list is not to be changed."""
        # as a rule all decode, and the same as in the step before: then none is touched
        if len(slots) < len(self):
            chosen: list[Sequence] = self._sequences[slots].tolist()
            return chosen
        if self._members is None:
            self._members = self._sequences[slots].tolist()
        return self._members

    def join(self, entry: Entry) -> None:
        """Give a free slot to a sequence that has its blocks."""
        sequence, slot = entry.sequence, self._free_slots.pop()
        sequence.slot = slot
        self._longest = max(self._longest, sequence.num_known)
        self._widen(sequence.num_known)
        sequence.move_tokens(self._tokens[slot])
        sequence.move_counts(self._columns[slot, :3])
        self.limits[slot] = entry.limit
        self.num_blocks[slot] = len(sequence.block_table)
        self._sequences[slot] = sequence
        self._order.insert(self.entries.insert_sorted(entry), slot)
        self._slots = self._members = None

    def leave(self, entry: Entry, launched: int) -> None:
        """
        Take a sequence's slot from it.

        Args:
            launched: Newest step that may still compute it there.
        """
        sequence = entry.sequence
        self._left_after[sequence.slot] = self._last_left_after = launched
        del self._order[self.entries.remove_sorted(entry)]
        self._sequences[sequence.slot] = None
        self._free_slots.append(sequence.slot)
        self._left.append(sequence.slot)
        self._slots = self._members = None
        sequence.slot = -1
        sequence.move_counts(np.empty(3, dtype=np.int64))
        # room for a token that is in flight
        sequence.move_tokens(np.empty(sequence.num_tokens, dtype=np.int32))

    def shrink(self, num_slots: int) -> None:
        """Use fewer slots from now on; nobody may run."""
        assert not self.entries, f"{len(self.entries)} sequences run"
        self.num_slots = num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))

    def take_left(self) -> tuple[int, ...]:
        """The slots given up since this was last asked."""
        left, self._left = tuple(self._left), []
        return left

    def gone(self, step: Step) -> list[int]:
        """Which of a step's decodes, by row, have left their slots since it was launched."""
        if self._last_left_after < step.step_id:
            return []
        rows: list[int] = np.flatnonzero(self._left_after[step.decodes.slots] >= step.step_id).tolist()
        return rows

    def advance(self, slots: NDArray[np.int64]) -> Decodes:
        """Count one more token as computed, and the one after it as sampled, of each of these slots, in order."""
        num_tokens, starts, _, limits, _ = self._columns.take(slots, axis=0).T
        num_tokens = num_tokens + 1
        self.num_computed[slots] = starts + 1
        self.num_tokens[slots] = num_tokens
        return Decodes(self.sequences_of(slots), slots, starts, last=num_tokens >= limits)

    def learn(self, slots: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """
        Make the next token of each of these slots known.

        Args:
            token_ids: [len(slots)] int64; -1 where there is none.
        """
        if self._longest >= self._tokens.shape[1]:
            self._longest = int(self._num_known[self.slots].max(initial=0))
            self._widen(self._longest + 1)
        self._longest += 1
        known = self._num_known[slots]
        # one behind the last known is written in any case, and means nothing until it is counted
        self._tokens[slots, known] = token_ids
        self._num_known[slots] = known + (token_ids >= 0)

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
            known = int(self._num_known[slot])
            assert known == sequence.num_known <= self._longest, f"{sequence} and its slot know {known} tokens"
            assert sequence.keeps_tokens_in(self._tokens), f"{sequence} has tokens that its slot lacks"
            assert sequence.num_computed <= len(sequence.block_table) * block_size, f"{sequence} overruns"
            assert self._sequences[slot] is sequence, f"{sequence} is not the one of slot {slot}"

    def _widen(self, width: int) -> None:
        if width <= self._tokens.shape[1]:
            return
        self._tokens = np.empty((self.num_slots, max(2 * width, MIN_WIDTH)), dtype=np.int32)
        for entry in self.entries:
            entry.sequence.move_tokens(self._tokens[entry.sequence.slot])
