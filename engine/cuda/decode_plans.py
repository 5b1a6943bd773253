"""What the layers of a step read of its decodes: one plan for each window."""

import torch
from torch import Tensor

from engine.model.config import ModelConfig
from kernels.cascade_attention import Cascade
from kernels.decode_attention import PagedDecode
from kernels.decode_parts import cut_sequences, make_parts, programs_of


class DecodePlans:
    """
    Plans attention of decodes, and has the device cut long sequences.

    Args:
        cache_dtype: Of keys and values.
        block_tables: [num_slots, max_blocks] int32.
    """

    def __init__(
        self, config: ModelConfig, cache_dtype: torch.dtype, block_tables: Tensor, *, max_num_seqs: int
    ) -> None:
        self._block_tables = block_tables
        self._programs = programs_of(config.num_heads, config.num_kv_heads, config.head_dim, cache_dtype)
        self._parts = {
            window: make_parts(max_num_seqs, self._programs, config.num_heads, config.head_dim, block_tables.device)
            for window in frozenset(config.windows)
        }

    def plan(self, slots: Tensor, seq_lens: Tensor, cascade: Cascade | None) -> dict[int | None, PagedDecode]:
        """
        By window, what its layers read; the work of the device is queued.

        Args:
            slots, seq_lens: [num_rows] int32.
            cascade: For layers without a window: behind a window's start nobody sees the whole prefix.
        """
        plans = {}
        for window, memory in self._parts.items():
            parts = memory.rows(len(slots), self._programs)
            prefixes = cascade if window is None else None
            cut_sequences(parts, seq_lens, window, self._programs, prefixes)
            plans[window] = PagedDecode(self._block_tables, slots, seq_lens, window, parts, prefixes)
        return plans
