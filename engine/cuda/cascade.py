"""Which sequences of a step share a prefix, and what the device is told of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.cuda.plan import head_count_for
from engine.kv_cache import CacheShape
from engine.model.config import ModelConfig
from kernels.cascade_attention import (
    Cascade,
    CascadeLayout,
    SharedPrefix,
    cascade_layout,
    cascade_workspace,
    pack_prefixes,
    plan_cascade,
)

Int32s = NDArray[np.int32]
Slots = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class CascadeGate:
    """
    What is worth a pass of its own.

    Args:
        min_seqs: Sequences that share a prefix, two at least.
        min_tokens: Of the prefix.
    """

    min_seqs: int
    min_tokens: int


class _Cohort:
    """Slots, in the order they joined, whose tables begin with the same blocks."""

    __slots__ = ("blocks", "slots")

    def __init__(self, blocks: list[int]) -> None:
        self.blocks = blocks
        self.slots: dict[int, None] = {}


class SharedPrefixes:
    """
    Groups slots by the blocks that their tables begin with, as sequences come and go.

    A table is entered at doubling depths, under the block that it has there: those who have the same one
    are a cohort, and share what their tables have in common, which is that deep at least. A sequence costs
    a few look-ups when it joins and when it leaves, and one with a short table nothing. Running sequences
    hold their blocks, so a block means the same prefix as long as its cohort has a member.

    Args:
        min_seqs: Slots of a cohort that counts.
        min_blocks: Of a prefix that counts.
    """

    def __init__(self, *, min_seqs: int, min_blocks: int, block_size: int) -> None:
        self.min_seqs = min_seqs
        self.min_blocks = min_blocks
        self.block_size = block_size
        # by depth and the block there
        self._cohorts: dict[tuple[int, int], _Cohort] = {}
        self._joined: dict[int, list[tuple[int, int]]] = {}
        self._large: dict[tuple[int, int], _Cohort] = {}

    def __bool__(self) -> bool:
        """Whether there is a cohort that counts."""
        return bool(self._large)

    def join(self, slot: int, block_table: Sequence[int]) -> None:
        """Note the table of the sequence that now has a slot; blocks that it grows by later are its own."""
        self.leave(slot)
        depth, joined = self.min_blocks, []
        table = list(block_table) if depth <= len(block_table) else []
        while depth <= len(table):
            key = depth, table[depth - 1]
            if self._enter(key, slot, table):
                joined.append(key)
            depth *= 2
        if joined:
            self._joined[slot] = joined

    def leave(self, slot: int) -> None:
        """Forget a slot's sequence; nothing happens where there is none."""
        for key in self._joined.pop(slot, ()):
            cohort = self._cohorts[key]
            del cohort.slots[slot]
            if len(cohort.slots) == self.min_seqs - 1:
                del self._large[key]
            if not cohort.slots:
                del self._cohorts[key]

    def among(self, slots: Slots) -> list[SharedPrefix]:
        """
        What the sequences in these slots share, the most worthwhile first; each has one prefix at most.

        Args:
            slots: [num_rows], all different.
        """
        if not self._large:
            return []
        row_of = np.full(int(slots.max(initial=0)) + 1, -1)
        row_of[slots] = np.arange(len(slots))
        found = []
        for (depth, _), cohort in sorted(self._large.items(), reverse=True):
            members = np.fromiter(cohort.slots, np.int64, len(cohort.slots))
            rows = row_of[members[members < len(row_of)]]
            rows = rows[rows >= 0]
            length, count = len(cohort.blocks), len(rows)
            if count < self.min_seqs:
                continue
            # those of a deep cohort are in a shallower one too: a pass of their own reads a prefix more
            other = self._large.get((depth // 2, cohort.blocks[depth // 2 - 1]))
            if other is not None and (count - 1) * length <= count * len(other.blocks):
                continue
            found.append(SharedPrefix(int(slots[rows[0]]), length * self.block_size, rows))
            row_of[slots[rows]] = -1
        return sorted(found, key=lambda prefix: (len(prefix.rows) - 1) * prefix.num_tokens, reverse=True)

    def check(self, tables: dict[int, list[int]]) -> None:
        """Raise AssertionError when the books disagree with the tables of all slots that are taken."""
        seen: dict[tuple[int, int], set[int]] = {}
        for slot, keys in self._joined.items():
            assert slot in tables, f"slot {slot} has left"
            for key in keys:
                seen.setdefault(key, set()).add(slot)
        members = {key: set(cohort.slots) for key, cohort in self._cohorts.items()}
        assert seen == members, f"{seen} and {members}"
        for (depth, block), cohort in self._cohorts.items():
            assert depth <= len(cohort.blocks), f"{depth} blocks deep with {len(cohort.blocks)}"
            assert cohort.blocks[depth - 1] == block, f"block {block} is not at depth {depth}"
            for slot in cohort.slots:
                assert tables[slot][: len(cohort.blocks)] == cohort.blocks, f"slot {slot} has another prefix"
        large = {key for key, cohort in self._cohorts.items() if len(cohort.slots) >= self.min_seqs}
        assert large == set(self._large), f"{large} and {set(self._large)}"

    def _enter(self, key: tuple[int, int], slot: int, table: list[int]) -> bool:
        cohort = self._cohorts.get(key)
        if cohort is None:
            cohort = self._cohorts[key] = _Cohort(table)
        else:
            common = _num_common(cohort.blocks, table)
            # the same tokens by way of other blocks, some of which were computed twice
            if common < key[0]:
                return False
            if common < len(cohort.blocks):
                cohort.blocks = cohort.blocks[:common]
        cohort.slots[slot] = None
        if len(cohort.slots) == self.min_seqs:
            self._large[key] = cohort
        return True


class StepCascade:
    """
    Keeps the device's numbers about shared prefixes in step with who decodes.

    They lie behind the head of the packed step, and are sent when they have changed, or when what lies
    behind them is sent.

    Args:
        dtype: What the model computes in.
        shape: Of the KV cache; how many blocks it has does not matter.
        gate: None for no passes, as where all layers have windows, or a head has no kernel.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        shape: CacheShape,
        gate: CascadeGate | None,
        max_num_seqs: int,
        device: torch.device,
    ) -> None:
        # steps in which somebody shared a prefix, and the tokens that need not be read in the newest of them
        self.num_steps = self.num_saved = 0
        self._head_dim = config.head_dim
        self._layout: CascadeLayout | None = None
        if gate is not None and None in config.windows:
            self._layout = cascade_layout(
                max_num_seqs, config.num_heads, config.num_kv_heads, config.head_dim, shape.dtype
            )
        self.num_numbers = self._layout.num_numbers if self._layout else 0
        start = head_count_for(max_num_seqs)
        self._section = slice(start, start + self.num_numbers)
        if gate is None or self._layout is None:
            return
        min_blocks = -(-max(gate.min_tokens, self._layout.unit) // shape.block_size)
        self.prefixes = SharedPrefixes(min_seqs=gate.min_seqs, min_blocks=min_blocks, block_size=shape.block_size)
        self._workspace = cascade_workspace(self._layout, config.head_dim, dtype, device)
        self._numbers = np.zeros(self.num_numbers, dtype=np.int32)
        # whose rows `_numbers` are about, whether any of them share something, and whether the device has them
        self._slots: Slots | None = None
        self._shares = self._sent = False

    def __bool__(self) -> bool:
        """Whether there are such passes at all."""
        return self._layout is not None

    def join(self, slot: int, block_table: list[int]) -> None:
        """Note who has a slot now."""
        if self._layout:
            self.prefixes.join(slot, block_table)

    def leave(self, slot: int) -> None:
        """Note that a slot was given up, if it was known to be taken."""
        if self._layout:
            self.prefixes.leave(slot)

    def fill(self, numbers: Int32s, count: int, slots: Slots) -> tuple[int, bool]:
        """
        Write into a packed step what the device does not know of its decodes.

        Args:
            numbers: The host's buffer.
            count: Of them are the step's own.
            slots: [num_decodes]; the same array until a sequence joins or leaves.

        Returns:
            How many of them the device has to know, and whether decodes share a prefix.
        """
        shares = self._look(slots)
        behind = count > self._section.start
        if shares and (behind or not self._sent):
            numbers[self._section] = self._numbers
            self._sent = True
            return max(count, self._section.stop), shares
        # what is sent without being filled in is another step's
        if behind:
            self._sent = False
        return count, shares

    def plan(self, sent: Tensor, num_rows: int) -> Cascade:
        """
        What the layers of a step without a window read.

        Args:
            sent: The packed step on the device.
        """
        assert self._layout is not None
        return plan_cascade(self._layout, sent[self._section], self._workspace, num_rows, self._head_dim)

    def clear(self, sent: Tensor) -> None:
        """Tell the device that nobody shares anything."""
        sent[self._section].zero_()
        self._sent = False

    def _look(self, slots: Slots) -> bool:
        if self._layout is None or not self.prefixes:
            self._slots = None
            return False
        if self._slots is not slots:
            self._slots, self._sent = slots, False
            found = self.prefixes.among(slots)
            self.num_saved = sum((len(prefix.rows) - 1) * prefix.num_tokens for prefix in found)
            self._shares = bool(found) and pack_prefixes(self._layout, found, len(slots), self._numbers) > 0
        self.num_steps += self._shares
        return self._shares


def _num_common(one: list[int], other: list[int]) -> int:
    """Leading elements that two lists have in common."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
