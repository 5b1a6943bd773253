"""A KV cache as it lies on a GPU, in scattered blocks; whatever nobody wrote is NaN."""

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.decode_attention import PagedDecode
from kernels.decode_parts import PART_SHIFT, DecodeParts

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

    def plan(self, num_heads: int, window: int | None = None, longest_part: int | None = None) -> PagedDecode:
        """
        With results of parts that are NaN until they are written.

        Args:
            longest_part: Tokens that are not cut, whatever the batch; None cuts nothing.
        """
        plain = PagedDecode(self.block_tables, self.slots, self.seq_lens, window, None)
        return plain if longest_part is None else cut(plain, num_heads, self.kv_cache, longest_part)


def cut(plan: PagedDecode, num_heads: int, kv_cache: Tensor, longest_part: int) -> PagedDecode:
    """The plan in parts of so many tokens at most, with its cascade if it has one."""
    _, _, num_kv_heads, _, head_dim = kv_cache.shape
    lengths = plan.seq_lens.clamp(max=plan.window or 2**30)
    if plan.cascade is not None:
        lengths = lengths - plan.cascade.rows[: len(lengths), 0]
    counts = [max(1, -(-length // longest_part)) for length in lengths.tolist()]
    firsts = list(itertools.accumulate(counts, initial=0))
    found = [row | part << PART_SHIFT for row, count in enumerate(counts) for part in range(count)]
    device = plan.seq_lens.device
    memory = DecodeParts(
        # two programs more than there are parts
        items=torch.tensor([*found, -1, -1], dtype=torch.int32, device=device),
        shares=torch.full_like(plan.seq_lens, longest_part),
        firsts=torch.tensor(firsts, dtype=torch.int32, device=device),
        outputs=torch.full((len(found) + 2, num_heads, head_dim), torch.nan, device=device),
        lses=torch.full((len(found) + 2, num_heads), torch.nan, device=device),
        arrivals=torch.zeros(len(counts) * num_kv_heads, dtype=torch.int32, device=device),
    )
    return replace(plan, parts=memory)


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
