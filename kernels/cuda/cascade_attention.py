"""
The pass over shared prefixes on a GPU: one program multiplies a tile of rows with a chunk of their prefix.

As many rows as a tile has make it a product for the large matrix instructions, and every key is read once
for all of them. Prefixes are whole tiles of keys, so that nothing is hidden and no load has a mask over tokens.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernels.cascade_attention import Cascade, CascadeLayout, cascade_config
from kernels.cuda.decode_attention import DOT_DTYPES, LARGEST_HALF, LOG2_E, VALUE_GAIN
from kernels.cuda.early import let_next_start, starts_early, wait_for_previous
from kernels.cuda.launching import next_power_of_2, start_kernel
from kernels.cuda.softmax_parts import LOWEST


def attend_prefixes_triton(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    cascade: Cascade,
    scale: float,
    *,
    softcap: float = 0.0,
    kv_scales: Tensor | None = None,
) -> None:
    config = cascade_config(query.shape[2], query.shape[1] // kv_cache.shape[2], kv_cache.dtype)
    launch(query, kv_cache, block_tables, cascade, scale, softcap, kv_scales, config)


def launch(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    cascade: Cascade,
    scale: float,
    softcap: float,
    kv_scales: Tensor | None,
    config: dict[str, int],
) -> None:
    """
    Attend with a given configuration.

    Args:
        config: "rows" and "tile" as in the layout of `cascade`; "warps" and "stages".
    """
    layout, num_kv_heads = cascade.layout, kv_cache.shape[2]
    assert query.stride(2) == 1
    assert kv_cache.stride(4) == 1
    assert (config["rows"], config["tile"]) == (layout.tile_rows, layout.unit)
    early = starts_early(len(query))
    scales = kv_cache if kv_scales is None else kv_scales
    # without a cap the scale takes scores to powers of two, with one to those of the tangent
    exponent = LOG2_E * scale * (2.0 / softcap if softcap else 1.0)
    start_kernel(
        _prefix_kernel,
        (num_kv_heads, cascade.max_items),
        cascade.outputs,
        cascade.lses,
        query,
        kv_cache,
        kv_scales,
        block_tables,
        cascade.items,
        cascade.members,
        exponent,
        LOG2_E * softcap,
        *query.stride()[:2],
        *kv_cache.stride()[:4],
        *scales.stride()[:3],
        block_tables.stride(0),
        **constants(query, kv_cache, layout),
        SOFTCAP=softcap > 0,
        SCALED=kv_scales is not None,
        EARLY=early,
        num_warps=config["warps"],
        num_stages=config["stages"],
        launch_pdl=early,
    )


def constants(query: Tensor, kv_cache: Tensor, layout: CascadeLayout) -> dict[str, Any]:
    """What of shapes, dtypes and layout the kernel is compiled for."""
    # fp8 becomes float16 by one instruction for two values; bfloat16 takes three
    dot_dtype = DOT_DTYPES.get(kv_cache.dtype, tl.float16)
    return {
        "GROUP_SIZE": query.shape[1] // kv_cache.shape[2],
        "HEAD_DIM": query.shape[2],
        "BLOCK_SIZE": kv_cache.shape[3],
        "TILE_SEQS": layout.tile_seqs,
        "BLOCK_M": layout.tile_rows,
        "BLOCK_D": max(16, next_power_of_2(query.shape[2])),
        "TILE": layout.unit,
        "DOT_DTYPE": dot_dtype,
        "PRECISION": "ieee" if dot_dtype == tl.float32 else "tf32",
    }


@triton.jit(do_not_specialize=["table_stride"])
def _prefix_kernel(
    outputs,
    lses,
    query,
    kv_cache,
    kv_scales,
    block_tables,
    items,
    members,
    scale,
    softcap,
    query_seq_stride,
    query_head_stride,
    cache_half_stride,
    cache_block_stride,
    cache_head_stride,
    cache_token_stride,
    scale_half_stride,
    scale_block_stride,
    scale_head_stride,
    table_stride,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_SEQS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    slot = tl.load(items + item * 4)
    start = tl.load(items + item * 4 + 1)
    stop = tl.load(items + item * 4 + 2)
    tile = tl.load(items + item * 4 + 3)
    # a graph launches as many as a batch can need
    if start >= stop:
        return
    table = block_tables + slot.to(tl.int64) * table_stride

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    seqs = tl.load(members + tile * TILE_SEQS + rows // GROUP_SIZE, mask=rows < TILE_SEQS * GROUP_SIZE, other=-1)
    real = (seqs >= 0)[:, None] & (dims < HEAD_DIM)[None, :]
    heads = kv_head * GROUP_SIZE + rows % GROUP_SIZE
    queries = query + (seqs.to(tl.int64) * query_seq_stride + heads * query_head_stride)[:, None] + dims[None, :]
    q = tl.load(queries, mask=real, other=0.0)
    if q.dtype != DOT_DTYPE:
        q = tl.minimum(tl.maximum(q.to(tl.float32), -LARGEST_HALF), LARGEST_HALF)
    q = q.to(DOT_DTYPE)

    highest = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for begin in range(start, stop, TILE):
        positions = begin + tl.arange(0, TILE)
        blocks = tl.load(table + positions // BLOCK_SIZE).to(tl.int64)
        places = blocks * cache_block_stride + kv_head * cache_head_stride + positions % BLOCK_SIZE * cache_token_stride
        tokens = kv_cache + places[:, None] + dims[None, :]
        if BLOCK_D == HEAD_DIM:
            k = tl.load(tokens)
            v = tl.load(tokens + cache_half_stride)
        else:
            k = tl.load(tokens, mask=(dims < HEAD_DIM)[None, :], other=0.0)
            v = tl.load(tokens + cache_half_stride, mask=(dims < HEAD_DIM)[None, :], other=0.0)

        scores = tl.dot(q, tl.trans(k.to(DOT_DTYPE)), input_precision=PRECISION) * scale
        if SCALED:
            scaling = kv_scales + blocks * scale_block_stride + kv_head * scale_head_stride + positions % BLOCK_SIZE
            scores *= tl.load(scaling)[None, :]
        if SOFTCAP:
            scores = softcap - 2.0 * softcap / (tl.exp2(scores) + 1.0)
        raised = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - raised[:, None])
        decay = tl.exp2(highest - raised)
        total = total * decay + tl.sum(weights, 1)
        if SCALED:
            value_scales = tl.minimum(tl.load(scaling + scale_half_stride) * VALUE_GAIN, LARGEST_HALF)
            weights *= value_scales[None, :]
        acc = tl.dot(weights.to(DOT_DTYPE), v.to(DOT_DTYPE), acc * decay[:, None], input_precision=PRECISION)
        highest = raised
    if SCALED:
        acc *= 1.0 / VALUE_GAIN

    # a program has a token at least, so `total` is not 0
    place = ((item * tl.num_programs(0) + kv_head) * BLOCK_M + rows).to(tl.int64)
    tl.store(outputs + place[:, None] * HEAD_DIM + dims[None, :], acc / total[:, None], mask=real)
    tl.store(lses + place, highest + tl.log2(total), mask=seqs >= 0)
