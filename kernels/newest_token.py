"""
Decode attention that rotates queries, and rotates and stores the newest keys, itself.

Beside prompts, or where more than a rotation is to be done, `kernels.rope` does it in a launch of its own.
"""

from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from kernels.decode_attention import DecodePlan, PagedDecode, decode_attention
from kernels.rope import HeadNorms, rope_and_store

# the least that a product of matrices takes of each dimension: of a head's elements none may be padding
LEAST_DIM = 16
# of one KV head: its key and its value are rows of the same tile
MOST_QUERIES = LEAST_DIM - 2


@dataclass(frozen=True, slots=True)
class NewestTokens:
    """
    What decode attention is given of tokens that are not in the cache yet, beside their queries.

    Their keys and values lie behind the queries, in the same rows.

    Args:
        rotation, slot_mapping: As `kernels.rope.rope_and_store` gets them.
    """

    rotation: tuple[Tensor, Tensor]
    slot_mapping: Tensor


def rotates_inside(
    plan: DecodePlan | PagedDecode,
    kv_cache: Tensor,
    dtype: torch.dtype,
    num_heads: int,
    rotary_dim: int,
    norms: HeadNorms | None,
) -> TypeGuard[PagedDecode]:
    """
    Whether `rotate_and_attend` can do a layer of a step that has decodes alone.

    It cannot where heads are normed, turned in a part, padded or too many for a tile, where the cache rounds, where
    prefixes are attended before, which takes queries that are rotated, and with the plan of a CPU.

    Args:
        dtype: Of queries, keys and values.
        num_heads: Query heads.
        norms: What heads are normed with before they are rotated.
    """
    _, _, num_kv_heads, _, head_dim = kv_cache.shape
    return (
        isinstance(plan, PagedDecode)
        and plan.cascade is None
        and norms is None
        and kv_cache.dtype == dtype
        and rotary_dim == head_dim >= LEAST_DIM
        and head_dim.bit_count() == 1
        and num_heads <= MOST_QUERIES * num_kv_heads
    )


def rotate_and_attend(
    qkv: Tensor,
    rotation: tuple[Tensor, Tensor],
    slot_mapping: Tensor,
    kv_cache: Tensor,
    plan: PagedDecode,
    num_heads: int,
    scale: float,
    *,
    softcap: float = 0.0,
) -> Tensor:
    """
    Write each sequence's newest key and value to its slot, and attend to what it then has in the cache.

    Args:
        qkv: [num_seqs, (num_heads + 2 * num_kv_heads) * head_dim]; means nothing afterwards.
        rotation: Two of [num_seqs, 1, head_dim] float32; with `slot_mapping`, as `rope_and_store` gets them.
        slot_mapping: [num_seqs] int64, of each sequence's last token; -1 writes nothing.
        plan, scale, softcap: As `decode_attention` gets them; `rotates_inside` says for which plans.

    Returns:
        [num_seqs, num_heads, head_dim], contiguous.
    """
    if qkv.is_cuda:
        from kernels.cuda.decode_attention import decode_attention_triton

        query = qkv.view(len(qkv), -1, kv_cache.shape[4])[:, :num_heads]
        newest = NewestTokens(rotation, slot_mapping)
        return decode_attention_triton(query, kv_cache, plan, scale, softcap=softcap, newest=newest)
    return rotate_and_attend_reference(qkv, rotation, slot_mapping, kv_cache, plan, num_heads, scale, softcap=softcap)


def rotate_and_attend_reference(
    qkv: Tensor,
    rotation: tuple[Tensor, Tensor],
    slot_mapping: Tensor,
    kv_cache: Tensor,
    plan: PagedDecode,
    num_heads: int,
    scale: float,
    *,
    softcap: float = 0.0,
) -> Tensor:
    query, _, _ = rope_and_store(qkv, rotation, slot_mapping, kv_cache, num_heads)
    return decode_attention(query, kv_cache, plan, scale, softcap=softcap)
