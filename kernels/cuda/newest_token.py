"""
The newest token of a decode, where attention rotates and stores it itself: device functions.

The key and the value are two more rows of the tile of queries, so that all are rotated at once. The token is
attended as what the running softmax begins with, by products of that tile with itself. Its place in the cache
is for later steps: no program of the same launch reads it there.
"""

import triton
import triton.language as tl

from kernels.cuda.softmax_parts import LOWEST, transposed


@triton.jit
def rotated_heads(
    qkv, heads, head_stride, cos, sin, GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """
    A token's queries of each stream's KV head, then its key, then its value; the rows behind them are zeros.

    They have the bits that `kernels.cuda.rope` gives them, but for the sign of a value's zeros.

    Args:
        qkv, cos, sin: Pointers to the token's row, and to its cosines and sines.
        heads: The KV head of each stream.
    """
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)
    num_kv_heads = tl.num_programs(0) * HEADS
    # keys lie behind all queries, and values behind all keys
    behind = num_kv_heads * rows
    places = tl.where(rows < GROUP_SIZE, heads * GROUP_SIZE + rows, behind + heads)
    source = qkv + tl.expand_dims(places, -1) * head_stride
    mask = (rows < GROUP_SIZE + 2)[:, None]
    # all loads before what waits for any of them
    x = tl.load(source + dims, mask=mask, other=0.0)
    # the other element of each pair
    y = tl.load(source + (dims + HEAD_DIM // 2) % HEAD_DIM, mask=mask, other=0.0)
    angle, lift = tl.load(cos + dims), tl.load(sin + dims)
    # a value turns by no angle; sines have the signs that they take
    turns = (rows <= GROUP_SIZE)[:, None]
    angle = tl.where(turns, angle[None, :], 1.0)
    lift = tl.where(turns, lift[None, :], 0.0)
    return tl.fma(y.to(tl.float32), lift, x.to(tl.float32) * angle).to(x.dtype)


@triton.jit
def slot_of_newest(slot_mapping, seq, start, stop, is_last):
    """Where a program's stretch ends with the newest token, the token's slot, and -1 elsewhere and in padding."""
    return tl.where((start < stop) & is_last, tl.load(slot_mapping + seq), -1)


@triton.jit
def begin_with_newest(
    tile, heads, kv_cache, half_stride, block_stride, head_stride, token_stride, slot, scale, softcap,
    GROUP_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, SLICES: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """
    Store the newest token, and begin the running softmax of its sequence with it.

    Args:
        tile: As `rotated_heads` gives it, [BLOCK_M, HEAD_DIM] or [streams, BLOCK_M, HEAD_DIM].
        slot: -1 stores nothing, and begins with nothing.

    Returns:
        Maxima, sums and outputs of the rows; those of rows that are no queries mean nothing.
    """
    BLOCK_M: tl.constexpr = tile.shape[-2]
    rows = tl.arange(0, BLOCK_M)
    fresh = slot >= 0
    if SLICES > 1:
        # the first slice of each head
        fresh = (tl.arange(0, HEADS * SLICES) < HEADS)[:, None] & fresh
    places = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * token_stride
    places += heads * head_stride + (rows - GROUP_SIZE).to(tl.int64) * half_stride
    stored = fresh & (rows >= GROUP_SIZE) & (rows < GROUP_SIZE + 2)
    target = kv_cache + tl.expand_dims(places, -1) + tl.arange(0, tile.shape[-1])
    tl.store(target, tile, mask=tl.expand_dims(stored, -1))

    products = tl.dot(tile, transposed(tile), input_precision=PRECISION)
    scores = tl.sum(tl.where(rows == GROUP_SIZE, products, 0.0), -1) * scale
    if SOFTCAP:
        scores = softcap - 2.0 * softcap / (tl.exp2(scores) + 1.0)
    # so low that its weight is zero beside nothing at all
    scores = tl.where(fresh, scores, 2.0 * LOWEST)
    highest = tl.maximum(scores, LOWEST)
    total = tl.exp2(scores - highest)
    # that times the value; what is not finite elsewhere stays out of it
    is_value = fresh & (rows == GROUP_SIZE + 1)
    weights = tl.where(rows == GROUP_SIZE + 1, tl.expand_dims(total, -1), 0.0)
    value = tl.where(tl.expand_dims(is_value, -1), tile, 0.0)
    acc = tl.dot(weights.to(tile.dtype), value, input_precision=PRECISION)
    return highest, total, acc
