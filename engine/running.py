"""The sequences that hold a slot, and what is counted of them in columns, so that many advance at once."""

from array import array
from functools import partial

import numpy as np
from numpy.typing import NDArray

from engine.entries import Entry, EntryList
from engine.request import PRIORITIES, Decodes, Sequence, Step
from engine.token_table import TokenTable

Int32s = NDArray[np.int32]

_LEVELS = np.array([-np.inf, *PRIORITIES])


class Running:
    """
    Running sequences, the most urgent first, with their numbers by slot.

    A sequence's own counts and tokens are those of its slot while it is here: what is written on
    one side is read on the other. All that a step does to every sequence is done to whole columns,
    in the order of slots. The thread comes to it from a long wait, with cold caches: a line of memory
    for each sequence would take most of the time, and then each kind of operation that is not met
    anyway, so there are few kinds, of one type.

    Args:
        num_slots: Sequences that run at a time.
        block_size: Tokens of a KV block.
    """

    def __init__(self, num_slots: int, block_size: int) -> None:
        self.num_slots = num_slots
        self.block_size = block_size
        self.entries = EntryList()

        # by slot; 0 at a free one
        self._columns = np.zeros((6, num_slots), dtype=np.int32)
        self.num_tokens, self.num_computed, self._num_known, self.ends, self.room, self._newest_blocks = self._columns
        self._tokens = TokenTable(self._num_known)
        # newest step launched when the slot was last given up
        self._left_after = np.full(num_slots, -1, dtype=np.int64)
        self._last_left_after = -1
        self._sequences = np.full(num_slots, None, dtype=np.object_)
        # their block tables, so that these can grow without a look at the sequences
        self._tables = np.full(num_slots, None, dtype=np.object_)
        self._ones = np.ones(num_slots, dtype=np.int32)
        self._claims = np.zeros(num_slots, dtype=np.int32)
        # the last token of an answer that is ever computed, rounded up as claims are; 0 at a free slot
        self._farthest = np.zeros(num_slots, dtype=np.int32)
        # tokens at which its answer will probably end; 0 where nobody knows
        self._expected = np.zeros(num_slots, dtype=np.int32)
        # who needs the value of each token before the next one, as an answer in a grammar does
        self._stepwise = np.zeros(num_slots, dtype=np.bool_)
        self._num_stepwise = 0
        # by priority that capacity tells apart, who is less urgent: 1 or 0. The first row is of all; floats, which
        # multiply fast
        self._behind = np.zeros((1 + len(PRIORITIES), num_slots))
        # blocks of all their tables; one that several share counts for each
        self.num_blocks = 0

        # slots of `entries`, in their order; and what was made of it since the last one came or went
        self._order = array("q")
        self._slots: NDArray[np.int64] | None = None
        # all of them, the longest first
        self._members: tuple[NDArray[np.int64], list[Sequence]] | None = None
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

    def missing(self) -> Int32s:
        """[num_slots], tokens that are there to be computed; the last of an answer never is."""
        missing: Int32s = np.minimum(self.num_tokens, self.ends) - self.num_computed
        if self._num_stepwise:
            missing[self._held()] = 0
        return missing

    def waits(self) -> bool:
        """
        Whether those that wait for the value of a token in flight are as many as could go now, or more.

        All of them then go in one step, where two groups would go by turns for ever.
        """
        if not self._num_stepwise:
            return False
        missing = np.minimum(self.num_tokens, self.ends) > self.num_computed
        held = missing & self._held()
        return bool(held.any()) and 2 * int(held.sum()) >= int(missing.sum())

    def _held(self) -> NDArray[np.bool_]:
        held: NDArray[np.bool_] = self._stepwise & (self.num_tokens > self._num_known)
        return held

    def left(self) -> Int32s:
        """[num_slots], tokens that each will probably still get; 0 where nobody knows."""
        left: Int32s = np.maximum(self._expected - self.num_tokens, 0)
        return left

    def num_missing(self, place: int) -> int:
        """How many tokens are there to be computed of those before a place of the order, together."""
        return int(self.missing()[self.slots[:place]].sum())

    def going(self, missing: Int32s) -> NDArray[np.bool_]:
        """[num_slots], who misses one token, so that it can decode."""
        going: NDArray[np.bool_] = missing == self._ones
        return going

    def going_at(self, places: slice, missing: Int32s) -> NDArray[np.bool_]:
        """The same of those at some places of the order alone."""
        slots = self.slots[places]
        going = np.zeros(len(missing), dtype=np.bool_)
        going[slots] = missing[slots] == 1
        return going

    def claims(self, headroom: int) -> Int32s:
        """
        [num_slots], tokens in blocks that each has, or will when it has run for `headroom` tokens more, or to its end.

        The array is used again by the next call.
        """
        size, claims = self.block_size, self._claims
        np.add(self.num_tokens, headroom + size - 1, out=claims)
        np.minimum(claims, self._farthest, out=claims)
        # whole blocks; a mask takes half the time of a division
        if size & (size - 1):
            claims -= claims % size
        else:
            claims &= -size
        return np.maximum(claims, self.room, out=claims)

    def claims_behind(self, headroom: int) -> list[float]:
        """The claims of all, and of those behind each of `PRIORITIES`, added up."""
        sums: list[float] = self._behind.dot(self.claims(headroom)).tolist()
        return sums

    def full(self) -> NDArray[np.bool_]:
        """[num_slots], whether the next token begins a block that the sequence lacks; at a free slot anything."""
        full: NDArray[np.bool_] = self.num_computed == self.room
        return full

    def sequences_of(self, slots: NDArray[np.int64]) -> list[Sequence]:
        """Whose these slots are. The list is not to be changed."""
        chosen: list[Sequence] = self._sequences[slots].tolist()
        return chosen

    def tables_of(self, slots: NDArray[np.int64]) -> tuple[list[list[int]], Int32s]:
        """The block tables of these slots' sequences, and the last block of each."""
        tables: list[list[int]] = self._tables[slots].tolist()
        return tables, self._newest_blocks[slots]

    def join(self, entry: Entry) -> None:
        """Give a free slot to a sequence that has its blocks."""
        sequence, slot = entry.sequence, self._free_slots.pop()
        sequence.slot = slot
        self._tokens.put(slot, sequence.hand_over_tokens(partial(self._tokens.known, slot)))
        sequence.move_counts(self._columns[:3, slot])
        self.ends[slot] = entry.limit - 1
        self._farthest[slot] = entry.limit + self.block_size - 2
        self._expected[slot] = entry.expected
        self.room[slot] = len(sequence.block_table) * self.block_size
        self.num_blocks += len(sequence.block_table)
        self._behind[:, slot] = entry.priority > _LEVELS
        self._newest_blocks[slot] = sequence.newest_block
        self._stepwise[slot] = sequence.grammar is not None
        self._num_stepwise += sequence.grammar is not None
        self._sequences[slot], self._tables[slot] = sequence, sequence.block_table
        self._order.insert(self.entries.insert_sorted(entry), slot)
        self._slots = self._members = None

    def leave(self, entry: Entry, launched: int) -> None:
        """
        Take a sequence's slot from it.

        Args:
            launched: Newest step that may still compute it there.
        """
        sequence = entry.sequence
        slot = sequence.slot
        self._left_after[slot] = self._last_left_after = launched
        del self._order[self.entries.remove_sorted(entry)]
        self._sequences[slot] = self._tables[slot] = None
        self._free_slots.append(slot)
        self._left.append(slot)
        self._slots = self._members = None
        sequence.slot = -1
        # room for a token that is in flight
        sequence.keep_tokens(sequence.num_tokens)
        sequence.move_counts(np.empty(3, dtype=np.int32))
        self.num_blocks -= int(self.room[slot]) // self.block_size
        self._columns[:, slot] = self._farthest[slot] = self._expected[slot] = 0
        self._stepwise[slot] = False
        self._num_stepwise -= sequence.grammar is not None

    def grew(self, slots: NDArray[np.int64], blocks: NDArray[np.int64]) -> None:
        """Note the block that each of these slots' sequences got."""
        self.room[slots] += self.block_size
        self.num_blocks += len(slots)
        self._newest_blocks[slots] = blocks

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

    def advance(self, going: NDArray[np.bool_], count: int) -> Decodes:
        """
        Count one more token as computed, and the one after it as sampled; the longest sequence comes first.

        Args:
            going: [num_slots], whose: of those who miss a token. `count` of them.
        """
        slots, sequences = self._in_order(going, count)
        starts = self.num_computed[slots]
        added = going.astype(np.int32)
        self.num_computed += added
        self.num_tokens += added
        last = self.num_computed == self.ends
        return Decodes(sequences, slots, starts, blocks=self._newest_blocks[slots], last=last[slots])

    def learn(self, slots: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """
        Make the next token of each of these slots known.

        Args:
            token_ids: [len(slots)] int64.
        """
        self._tokens.learn(slots, token_ids)

    def check(self) -> None:
        """Raise AssertionError when slots, order or columns disagree with the sequences."""
        slots = [entry.sequence.slot for entry in self.entries]
        assert slots == list(self._order), f"slots {list(self._order)} for sequences in {slots}"
        assert sorted(self._free_slots + slots) == list(range(self.num_slots)), f"slots {slots} of {self.num_slots}"
        assert not self._columns[:, self._free_slots].any(), f"free slots {self._free_slots} are counted"
        room = int(self.room.sum())
        assert room == self.num_blocks * self.block_size, f"{self.num_blocks} blocks and room for {room} tokens"
        for entry in self.entries:
            sequence, slot = entry.sequence, entry.sequence.slot
            room, newest = len(sequence.block_table) * self.block_size, sequence.newest_block
            have = self._columns[:, slot].tolist()
            want = [sequence.num_tokens, sequence.num_computed, sequence.num_known, entry.limit - 1, room, newest]
            assert want == have, f"{sequence} has {want} and its slot {have}"
            assert sequence.num_computed <= room, f"{sequence} overruns"
            assert self._sequences[slot] is sequence, f"{sequence} is not the one of slot {slot}"
            assert self._tables[slot] is sequence.block_table, f"{sequence} has another table than slot {slot}"

    def _in_order(self, going: NDArray[np.bool_], count: int) -> tuple[NDArray[np.int64], list[Sequence]]:
        # as a rule all decode, and the same as in the step before: then no sequence is touched
        slots = self.slots
        if count < len(slots):
            slots = self._longest_first(slots[going[slots]])
            return slots, self.sequences_of(slots)
        if self._members is None:
            slots = self._longest_first(slots)
            self._members = slots, self.sequences_of(slots)
        return self._members

    def _longest_first(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        # the order in which attention starts: the longest would end alone if it came last
        return slots[np.argsort(-self.num_computed[slots], kind="stable")]
