"""Keys and values of cached tokens, from scattered blocks to adjacent rows, on a GPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda.launching import next_power_of_2, start_kernel

# elements of keys, and as many of values, of a program
TILE = 4096
NUM_WARPS = 4


def gather_kv_triton(
    kv_cache: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    key_start: Tensor,
    num_keys: int,
    kv_scales: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """See `kernels.gather_kv.gather_kv`."""
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    assert kv_cache.stride(4) == block_tables.stride(1) == 1, "heads and rows of the tables must be adjacent memory"
    assert (kv_scales is not None) == (kv_cache.dtype.itemsize == 1), "an 8-bit cache, and no other, has scales"
    shape, dtype = (num_keys, num_kv_heads, head_dim), out_dtype or kv_cache.dtype
    kept = tuple(torch.empty(shape, dtype=dtype, device=kv_cache.device) for _ in range(2))
    dim_pad = next_power_of_2(head_dim)
    tokens_per_program = max(1, TILE // dim_pad)
    start_kernel(
        _gather_kv_kernel,
        (-(-num_keys // tokens_per_program) * num_kv_heads,),
        kv_cache,
        kv_scales,
        block_tables,
        slots,
        key_start,
        *kept,
        num_keys,
        len(slots),
        len(slots).bit_length(),
        num_kv_heads,
        block_tables.stride(0),
        *kv_cache.stride()[:4],
        *((0, 0, 0) if kv_scales is None else kv_scales.stride()[:3]),
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        TOKENS=tokens_per_program,
        DIM_PAD=dim_pad,
        num_warps=NUM_WARPS,
    )
    return kept[0], kept[1]


@triton.jit(do_not_specialize=["num_keys", "num_seqs", "num_halvings", "num_kv_heads", "table_stride"])
def _gather_kv_kernel(
    kv_cache,
    kv_scales,
    block_tables,
    slots,
    key_start,
    keys,
    values,
    num_keys,
    num_seqs,
    num_halvings,
    num_kv_heads,
    table_stride,
    cache_part_stride,
    cache_block_stride,
    cache_head_stride,
    cache_token_stride,
    scale_part_stride,
    scale_block_stride,
    scale_head_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    # heads run fastest: neighbours read the same blocks and write the same rows
    head = tl.program_id(0) % num_kv_heads
    tokens = tl.program_id(0) // num_kv_heads * TOKENS + tl.arange(0, TOKENS)
    in_range = tokens < tl.minimum(num_keys, tl.load(key_start + num_seqs))

    # the last sequence that starts at or before the token: low always does, high never
    low, high = tl.zeros((TOKENS,), tl.int32), tl.zeros((TOKENS,), tl.int32) + num_seqs
    for _ in range(num_halvings):
        middle = (low + high) // 2
        before = tl.load(key_start + middle) <= tokens
        low, high = tl.where(before, middle, low), tl.where(before, high, middle)

    positions = tokens - tl.load(key_start + low)
    rows = tl.load(slots + low).to(tl.int64)
    blocks = tl.load(block_tables + rows * table_stride + positions // BLOCK_SIZE, mask=in_range, other=0).to(tl.int64)
    offsets = positions % BLOCK_SIZE

    cols = tl.arange(0, DIM_PAD)
    mask = in_range[:, None] & (cols < HEAD_DIM)[None, :]
    place = blocks * cache_block_stride + head * cache_head_stride + offsets * cache_token_stride
    source = kv_cache + place[:, None] + cols[None, :]
    # int64: the second part may begin past 2**31
    value_start = tl.full((), 1, tl.int64) * cache_part_stride
    key = tl.load(source, mask=mask, other=0.0)
    value = tl.load(source + value_start, mask=mask, other=0.0)
    if kv_scales is not None:
        scales = kv_scales + blocks * scale_block_stride + head * scale_head_stride + offsets
        value_scales = scales + tl.full((), 1, tl.int64) * scale_part_stride
        key = key.to(tl.float32) * tl.load(scales, mask=in_range, other=0.0)[:, None]
        value = value.to(tl.float32) * tl.load(value_scales, mask=in_range, other=0.0)[:, None]

    target = ((tokens.to(tl.int64) * num_kv_heads + head) * HEAD_DIM)[:, None] + cols[None, :]
    tl.store(keys + target, key.to(keys.dtype.element_ty), mask=mask)
    tl.store(values + target, value.to(values.dtype.element_ty), mask=mask)
