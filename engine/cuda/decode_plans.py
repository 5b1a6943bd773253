"""What the layers of a step read of its decodes: one plan for each window."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.cuda.plan import ALIGNMENT, MAX_WINDOWS, split_start_for
from engine.model.config import ModelConfig
from kernels.cascade_attention import Cascade
from kernels.decode_attention import (
    PagedDecode,
    num_splits_for,
    plan_splits,
    programs_of,
    split_tokens_for,
    split_workspace,
)


class DecodePlans:
    """
    Plans attention of decodes, and tells the device how long sequences are cut.

    Args:
        block_tables: [num_slots, max_blocks] int32.
        max_model_len: Longest sequence.
    """

    def __init__(
        self,
        config: ModelConfig,
        cache_dtype: torch.dtype,
        block_tables: Tensor,
        *,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        self._config = config
        self._block_tables = block_tables
        self._longest = max_model_len
        # the whole sequence first; a place of its own for the number of each
        self._windows = sorted(frozenset(config.windows), key=lambda window: window or 0)
        assert len(self._windows) <= MAX_WINDOWS, f"layers see {self._windows}: of {MAX_WINDOWS} kinds at most"
        self._places = [split_start_for(max_num_seqs) + index * ALIGNMENT for index in range(len(self._windows))]
        self._programs = programs_of(config.num_heads, config.num_kv_heads, config.head_dim, cache_dtype)
        self._workspace = split_workspace(
            max_num_seqs, self._programs, config.num_heads, config.head_dim, max_model_len, block_tables.device
        )

    def fill(self, numbers: NDArray[np.int32], starts: NDArray[np.integer[Any]], num_saved: int) -> None:
        """
        Write into a packed step how many tokens of a sequence are not cut.

        Args:
            numbers: The host's buffer.
            starts: [num_decodes], the position of each one's token.
            num_saved: Tokens that need not be read, as others of the step read them.
        """
        for window, place in zip(self._windows, self._places, strict=True):
            if window is None:
                num_tokens = int(starts.sum()) + len(starts) - num_saved
            else:
                num_tokens = int(np.minimum(starts, window - 1).sum()) + len(starts)
            numbers[place] = split_tokens_for(num_tokens, self._programs)

    def plan(
        self, slots: Tensor, seq_lens: Tensor, sent: Tensor, cascade: Cascade | None
    ) -> dict[int | None, PagedDecode]:
        """
        By window, what its layers read.

        Args:
            slots, seq_lens: [num_rows] int32.
            sent: The packed step on the device.
            cascade: For layers without a window: behind a window's start nobody sees the whole prefix.
        """
        config, num_rows = self._config, len(slots)
        plans = {}
        for window, place in zip(self._windows, self._places, strict=True):
            longest = min(self._longest, window or self._longest)
            splits = plan_splits(
                num_rows,
                num_splits_for(num_rows * self._programs, config.head_dim, longest),
                sent[place : place + 1],
                self._workspace,
                config.num_heads,
                config.head_dim,
            )
            prefixes = cascade if window is None else None
            plans[window] = PagedDecode(self._block_tables, slots, seq_lens, window, splits, prefixes)
        return plans
