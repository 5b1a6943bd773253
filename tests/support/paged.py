"""A KV cache as it lies on a GPU, in scattered blocks; whatever nobody wrote is NaN."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.decode_attention import PagedDecode, SplitWorkspace, plan_splits

FP8_NAN = 0x7F
FP8_MAX = 448.0


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """
    Sequences of random tokens.

    Args:
        kv_cache: [2, num_blocks, num_kv_heads, block_size, head_dim].
        kv_scales: [2, num_blocks, num_kv_heads, block_size] float32 of an fp8 cache, else None.
        block_tables: [num_slots, max_blocks] int32.
        slots, seq_lens: [num_seqs] int32.
    """

    kv_cache: Tensor
    kv_scales: Tensor | None
    block_tables: Tensor
    slots: Tensor
    seq_lens: Tensor

    def plan(
        self, num_heads: int, window: int | None = None, num_splits: int = 1, split_tokens: int = 1
    ) -> PagedDecode:
        """With a workspace of its own, of NaN. As a rule what can be cut is, into as many parts as there may be."""
        head_dim, num_seqs, device = self.kv_cache.shape[4], len(self.seq_lens), self.kv_cache.device
        workspace = SplitWorkspace(
            torch.full((num_seqs * num_heads * num_splits * (head_dim + 1),), torch.nan, device=device),
            torch.zeros(num_seqs * self.kv_cache.shape[2], dtype=torch.int32, device=device),
        )
        max_tokens = torch.tensor([split_tokens], dtype=torch.int32, device=device)
        splits = plan_splits(num_seqs, num_splits, max_tokens, workspace, num_heads, head_dim)
        return PagedDecode(self.block_tables, self.slots, self.seq_lens, window, splits)


def paged_batch(
    seq_lens: list[int],
    *,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> PagedBatch:
    """Normal keys and values; in float8_e4m3fn with the scale of each token and head."""
    widths = [-(-length // block_size) for length in seq_lens]
    num_blocks = sum(widths) + 4
    shape = (2, num_blocks, num_kv_heads, block_size, head_dim)
    fp8 = dtype == torch.float8_e4m3fn
    stored = torch.full(shape, FP8_NAN, dtype=torch.uint8) if fp8 else torch.full(shape, torch.nan, dtype=dtype)
    scales = torch.full(shape[:4], torch.nan)
    stored[:, 0], scales[:, 0] = 0, 0
    block_tables = torch.zeros(len(seq_lens) + 3, max(widths) + 2, dtype=torch.int32)
    slots = (torch.randperm(len(seq_lens) + 2)[: len(seq_lens)] + 1).int()

    free = torch.randperm(num_blocks - 1) + 1
    for slot, width, length in zip(slots.tolist(), widths, seq_lens, strict=True):
        blocks, free = free[:width], free[width:]
        block_tables[slot, :width] = blocks
        positions = torch.arange(length)
        places, offsets = blocks[positions // block_size], positions % block_size
        tokens = torch.randn(length, 2, num_kv_heads, head_dim)
        if fp8:
            limits = tokens.abs().amax(-1) / FP8_MAX
            scales[:, places, :, offsets] = limits
            tokens = (tokens / limits[..., None]).to(dtype).view(torch.uint8)
        stored[:, places, :, offsets] = tokens.to(stored.dtype)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    return PagedBatch(
        (stored.view(dtype) if fp8 else stored).to(device),
        scales.to(device) if fp8 else None,
        *(x.to(device) for x in (block_tables, slots, lengths)),
    )
