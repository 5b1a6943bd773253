"""
Rotary position embedding, with what stands around it: query and key norms, and the cache write.

Halves are rotated (GPT-NeoX order): element i pairs with element i + rotary_dim / 2.
Source: Su et al. 2021, arXiv:2104.09864.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.fp8_kv import as_bytes, dequantise_kv, quantise_kv
from kernels.rms_norm import rms_norm_reference


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights [head_dim] of the norms of query and key heads, and what is added to their mean squares."""

    query: Tensor
    key: Tensor
    eps: float


def rope_and_store(
    qkv: Tensor,
    rotation: tuple[Tensor, Tensor],
    slot_mapping: Tensor,
    kv_cache: Tensor,
    num_heads: int,
    norms: HeadNorms | None = None,
    kv_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """
    Norm and rotate queries and keys in place, and write keys and values to their slots.

    With a cache of eight bits, keys and values in `qkv` become what was stored of them: whether a
    token is attended fresh or from the cache, as where a prompt is cut, makes no difference.

    Args:
        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim].
        rotation: Two of [num_tokens, 1, rotary_dim] float32: the cosines of each token's angles,
            twice over, and their sines, negated and then plain. A head's elements past
            rotary_dim are not rotated.
        slot_mapping: [num_tokens] int64, block id * block_size + offset; -1 writes nothing.
        kv_cache: [2, num_blocks, num_kv_heads, block_size, head_dim].
        num_heads: Query heads.
        norms: Applied before the rotation.
        kv_scales: [2, num_blocks, num_kv_heads, block_size] float32, for a cache of float8_e4m3fn
            and for that alone: takes what a token's head was divided by before it was stored,
            its largest magnitude / 448.

    Returns:
        Query [num_tokens, num_heads, head_dim], key and value [num_tokens, num_kv_heads, head_dim]:
        views of `qkv`.
    """
    if qkv.is_cuda:
        from kernels.cuda.rope import rope_and_store_triton

        return rope_and_store_triton(qkv, rotation, slot_mapping, kv_cache, num_heads, norms, kv_scales)
    return rope_and_store_reference(qkv, rotation, slot_mapping, kv_cache, num_heads, norms, kv_scales)


def rope_and_store_reference(
    qkv: Tensor,
    rotation: tuple[Tensor, Tensor],
    slot_mapping: Tensor,
    kv_cache: Tensor,
    num_heads: int,
    norms: HeadNorms | None = None,
    kv_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    num_kv_heads, head_dim = kv_cache.shape[2], kv_cache.shape[4]
    heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, head_dim)
    num_rotated = num_heads + num_kv_heads
    query, key, value = heads[:, :num_heads], heads[:, num_heads:num_rotated], heads[:, num_rotated:]

    if norms is not None:
        query.copy_(rms_norm_reference(query, norms.query, norms.eps))
        key.copy_(rms_norm_reference(key, norms.key, norms.eps))
    cos, sin = rotation
    rotary_dim = cos.shape[-1]
    turned = heads[:, :num_rotated, :rotary_dim]
    swapped = turned.roll(rotary_dim // 2, -1)
    # in the width of the angles: half precision rounds once, at the copy
    turned.copy_(torch.addcmul(turned * cos, swapped, sin))
    keys_values = heads[:, num_heads:].view(-1, 2, num_kv_heads, head_dim)
    if kv_scales is None:
        _store(keys_values, slot_mapping, kv_cache)
    else:
        stored, scales = quantise_kv(keys_values)
        keys_values.copy_(dequantise_kv(stored, scales, keys_values.dtype))
        _store(as_bytes(stored), slot_mapping, as_bytes(kv_cache))
        _store(scales[..., None], slot_mapping, kv_scales[..., None])
    return query, key, value


def _store(keys_values: Tensor, slot_mapping: Tensor, kv_cache: Tensor) -> None:
    if int(slot_mapping.min()) < 0:
        written = slot_mapping >= 0
        keys_values, slot_mapping = keys_values[written], slot_mapping[written]
    by_token = kv_cache.transpose(2, 3)
    if not by_token.is_contiguous():
        blocks, offsets = slot_mapping // kv_cache.shape[3], slot_mapping % kv_cache.shape[3]
        kv_cache[:, blocks, :, offsets] = keys_values
        return
    # slots as one axis: the memory runs token by token (see engine/kv_cache.py)
    by_token.flatten(1, 2).index_copy_(1, slot_mapping, keys_values.transpose(0, 1))
