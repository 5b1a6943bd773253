"""
The newest token of a decode, where attention rotates and stores it itself: device functions.

It is attended from registers, as what the running softmax begins with. Nobody waits for its key to come back
from the cache, where no program of the same launch looks for it.
"""

import triton
import triton.language as tl

from kernels.cuda.softmax_parts import LOWEST


@triton.jit
def turned(heads, mask, cos, sin, HEAD_DIM: tl.constexpr):
    """
    Heads turned by one token's angles, with the bits that `kernels.cuda.rope` gives them.

    Args:
        heads: Pointers to their first elements, 1 the last of their dimensions.
        mask: Broadcasts to the elements; None is all.
        cos, sin: Pointers to the token's.
    """
    dims = tl.arange(0, HEAD_DIM)
    # the other element of each pair; a sine has the sign that it takes
    pairs = (dims + HEAD_DIM // 2) % HEAD_DIM
    x = tl.load(heads + dims, mask=mask)
    y = tl.load(heads + pairs, mask=mask)
    angle, lift = tl.load(cos + dims), tl.load(sin + dims)
    return tl.fma(y.to(tl.float32), lift, x.to(tl.float32) * angle).to(x.dtype)


@triton.jit
def slot_of_newest(slot_mapping, seq, start, stop, is_last):
    """Where a program's stretch ends with the newest token, the token's slot, and -1 elsewhere and in padding."""
    return tl.where((start < stop) & is_last, tl.load(slot_mapping + seq), -1)


@triton.jit
def begin_with_newest(
    q, key, value, head_stride, cos, sin, heads, kv_cache, half_stride, block_stride, token_stride,
    slot, scale, softcap,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, SLICES: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """
    Store the newest token, and begin the running softmax of its sequence with it.

    Args:
        q: [BLOCK_M, HEAD_DIM] of a stream, or [streams, BLOCK_M, HEAD_DIM].
        key, value: Pointers to the token's first heads, neither turned nor stored.
        heads: The KV head of each stream.
        kv_cache: Pointers to these heads in the first block.
        slot: -1 stores nothing, and begins with nothing.

    Returns:
        Maxima, sums and outputs of the rows.
    """
    places = tl.expand_dims(heads * head_stride, -1)
    dims = tl.arange(0, HEAD_DIM)
    k = turned(key + places, None, cos, sin, HEAD_DIM)
    v = tl.load(value + places + dims)
    fresh = slot >= 0
    if SLICES > 1:
        # the first slice of each head
        fresh = (tl.arange(0, HEADS * SLICES) < HEADS)[:, None] & fresh
    target = kv_cache + (slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * token_stride)
    target = tl.expand_dims(target, -1) + dims
    stored = tl.expand_dims(fresh, -1) if SLICES > 1 else fresh
    tl.store(target, k, mask=stored)
    tl.store(target + half_stride, v, mask=stored)

    scores = tl.sum(q.to(tl.float32) * k.to(tl.float32), -1) * scale
    if SOFTCAP:
        scores = softcap - 2.0 * softcap / (tl.exp2(scores) + 1.0)
    highest = tl.where(fresh, scores, LOWEST)
    total = tl.where(fresh, tl.full(scores.shape, 1.0, tl.float32), 0.0)
    acc = tl.where(stored, tl.broadcast_to(v.to(tl.float32), q.shape), 0.0)
    return highest, total, acc
