"""
Rotary position embedding, with what stands around it: query and key norms, and the cache write.

Halves are rotated (GPT-NeoX order): element i pairs with element i + rotary_dim / 2.
Source: Su et al. 2021, arXiv:2104.09864.
"""

from torch import Tensor

from kernels.rms_norm import rms_norm_reference


def rope_and_store(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    kv_cache: Tensor,
    *,
    num_heads: int,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """
    Norm and rotate queries and keys in place, and write keys and values to their slots.

    Args:
        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim].
        cos_sin: [max_positions, rotary_dim], the cosines, then the sines; the rest of a head
            beyond rotary_dim is not rotated.
        positions: [num_tokens] int64.
        slot_mapping: [num_tokens] int64, block id * block_size + offset; -1 writes nothing.
        kv_cache: [2, num_blocks, num_kv_heads, block_size, head_dim].
        num_heads: Query heads.
        norms: Weights [head_dim] of the query norm and the key norm, applied before the rotation.
        eps: Of these norms.

    Returns:
        Query [num_tokens, num_heads, head_dim], key and value [num_tokens, num_kv_heads, head_dim]:
        views of `qkv`.
    """
    return rope_and_store_reference(
        qkv, cos_sin, positions, slot_mapping, kv_cache, num_heads=num_heads, norms=norms, eps=eps
    )


def rope_and_store_reference(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    kv_cache: Tensor,
    *,
    num_heads: int,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    num_kv_heads, head_dim = kv_cache.shape[2], kv_cache.shape[4]
    heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, head_dim)
    num_rotated = num_heads + num_kv_heads
    query, key, value = heads[:, :num_heads], heads[:, num_heads:num_rotated], heads[:, num_rotated:]

    if norms is not None:
        query.copy_(rms_norm_reference(query, norms[0], eps))
        key.copy_(rms_norm_reference(key, norms[1], eps))
    _rotate(heads[:, :num_rotated], cos_sin.index_select(0, positions).unsqueeze(1))
    _store(key, value, slot_mapping, kv_cache)
    return query, key, value


def _rotate(heads: Tensor, cos_sin: Tensor) -> None:
    rotary_dim = cos_sin.shape[-1]
    cos, sin = cos_sin.chunk(2, dim=-1)
    first, second = heads[..., :rotary_dim].chunk(2, dim=-1)
    # the table's type where it is wider: half precision rounds once, at the copy
    turned = first * cos - second * sin
    second.copy_(second * cos + first * sin)
    first.copy_(turned)


def _store(key: Tensor, value: Tensor, slot_mapping: Tensor, kv_cache: Tensor) -> None:
    if int(slot_mapping.min()) < 0:
        written = slot_mapping >= 0
        key, value, slot_mapping = key[written], value[written], slot_mapping[written]
    block_size = kv_cache.shape[3]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    for cache, rows in zip(kv_cache, (key, value), strict=True):
        cache.transpose(1, 2).index_put_((blocks, offsets), rows)
