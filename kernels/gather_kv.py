"""Keys and values of cached tokens, from scattered blocks to adjacent rows."""

import torch
from torch import Tensor

from kernels.fp8_kv import as_bytes, dequantise_kv


def gather_kv(
    kv_cache: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    key_start: Tensor,
    num_keys: int,
    kv_scales: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """
    Copy each sequence's first cached tokens to adjacent rows, sequence after sequence.

    Args:
        kv_cache: [2, num_blocks, num_kv_heads, block_size, head_dim].
        block_tables: [num_slots, max_blocks] int32.
        slots: [num_seqs] int32, each sequence's row of `block_tables`.
        key_start: [num_seqs + 1] int32: sequence i is copied to the rows from key_start[i] to
            key_start[i + 1], so their difference says how many tokens of it.
        num_keys: key_start[num_seqs], for a device is not asked.
        kv_scales: [2, num_blocks, num_kv_heads, block_size] float32, what each token's head of
            an 8-bit cache is multiplied by; None for a cache of another dtype.
        out_dtype: None for that of the cache.

    Returns:
        Keys and values, each [num_keys, num_kv_heads, head_dim], contiguous.
    """
    if kv_cache.is_cuda:
        from kernels.cuda.gather_kv import gather_kv_triton

        return gather_kv_triton(kv_cache, block_tables, slots, key_start, num_keys, kv_scales, out_dtype)
    return gather_kv_reference(kv_cache, block_tables, slots, key_start, num_keys, kv_scales, out_dtype)


def gather_kv_reference(
    kv_cache: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    key_start: Tensor,
    num_keys: int,
    kv_scales: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    block_size = kv_cache.shape[3]
    tokens = torch.arange(num_keys, device=kv_cache.device)
    rows = torch.searchsorted(key_start, tokens, right=True) - 1
    positions = tokens - key_start[rows]
    blocks, offsets = block_tables[slots[rows], positions // block_size].long(), positions % block_size
    gathered, dtype = as_bytes(kv_cache)[:, blocks, :, offsets].view(kv_cache.dtype), out_dtype or kv_cache.dtype
    if kv_scales is not None:
        gathered = dequantise_kv(gathered, kv_scales[:, blocks, :, offsets], dtype)
    keys, values = gathered.to(dtype).unbind(1)
    return keys.contiguous(), values.contiguous()


def cached_tokens(
    kv_cache: Tensor, kv_scales: Tensor | None, block_table: Tensor, positions: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """
    Read some tokens of one sequence: what the references of attention have keys and values from.

    Args:
        block_table: [max_blocks] int32.
        positions: [num_tokens] int64.

    Returns:
        Keys and values, each [num_tokens, num_kv_heads, head_dim], scaled.
    """
    block_size = kv_cache.shape[3]
    blocks, offsets = block_table[positions // block_size].long(), positions % block_size
    stored = torch.stack([as_bytes(half).transpose(1, 2)[blocks, offsets] for half in kv_cache]).view(kv_cache.dtype)
    if kv_scales is None:
        keys, values = stored.to(dtype)
    else:
        # to the very numbers that other ways to read the cache make of it
        scales = torch.stack([half.transpose(1, 2)[blocks, offsets] for half in kv_scales])
        keys, values = dequantise_kv(stored, scales, dtype)
    return keys, values
