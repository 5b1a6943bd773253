"""
Decode attention on a GPU: one program reads a stretch of one sequence's keys and values.

The rows of a tile are gathered through the block table, so that a tile may span blocks. The query
heads of a KV head share what is read, as rows of one product. A tile may be cut into streams: each
has its own tokens or KV head, its own running maximum and its own sum, and streams meet after the
loop only, so that warps which hold a stream each never wait for one another's maxima.

In a step of decodes alone it rotates and stores the newest tokens too (`kernels.cuda.newest_token`).

Long sequences come in parts (`kernels.decode_parts`). Of the programs of a sequence that is cut, the
one which ends last joins them.

Sources: Kwon et al. 2023, arXiv:2309.06180; Dao et al. 2023, "Flash-Decoding" (splits).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda.early import let_next_start, starts_early, wait_for_previous
from kernels.cuda.launching import next_power_of_2, start_kernel
from kernels.cuda.newest_token import begin_with_newest, rotated_heads, slot_of_newest
from kernels.cuda.softmax_parts import LOWEST, deliver, met, transposed
from kernels.decode_attention import PagedDecode
from kernels.decode_config import decode_config
from kernels.decode_parts import PART_SHIFT as _PART_SHIFT
from kernels.decode_parts import DecodeParts
from kernels.newest_token import NewestTokens

PART_SHIFT = tl.constexpr(_PART_SHIFT)
ROW_MASK = tl.constexpr((1 << _PART_SHIFT) - 1)
LOG2_E = 1.4426950408889634
# float16 would lose probabilities times small scales of values among its subnormals
VALUE_GAIN = tl.constexpr(1024.0)
LARGEST_HALF = tl.constexpr(65504.0)
DOT_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def decode_attention_triton(
    query: Tensor,
    kv_cache: Tensor,
    plan: PagedDecode,
    scale: float,
    *,
    softcap: float = 0.0,
    kv_scales: Tensor | None = None,
    out: Tensor | None = None,
    newest: NewestTokens | None = None,
) -> Tensor:
    group_size = query.shape[1] // kv_cache.shape[2]
    config = decode_config(query.shape[2], group_size, kv_cache.dtype, len(query))
    return launch(query, kv_cache, plan, scale, softcap, kv_scales, config, out, newest)


def launch(
    query: Tensor,
    kv_cache: Tensor,
    plan: PagedDecode,
    scale: float,
    softcap: float,
    kv_scales: Tensor | None,
    config: dict[str, int],
    out: Tensor | None = None,
    newest: NewestTokens | None = None,
) -> Tensor:
    """
    Attend with a given configuration.

    Args:
        config: "tile", the tokens that a stream reads at once, 16 at least; "slices", the streams
            of a KV head; "heads", KV heads of a program, 1 where they do not divide evenly;
            "warps", as many as streams or, of one stream, any; "stages": block numbers are fetched
            ahead of keys, so 3 and 4 hold one tile of keys and values, 5 and 6 two, 7 and 8 three.
        newest: As `kernels.newest_token.rotates_inside` allows it.
    """
    num_seqs, num_heads, head_dim = query.shape
    num_kv_heads = kv_cache.shape[2]
    assert query.stride(2) == 1
    assert kv_cache.stride(4) == 1
    heads = config["heads"] if num_kv_heads % config["heads"] == 0 else 1

    if out is None:
        out = torch.empty(num_seqs, num_heads, head_dim, dtype=query.dtype, device=query.device)
    assert out.is_contiguous()
    parts = plan.parts
    scales = kv_cache if kv_scales is None else kv_scales
    # without a cap the scale takes scores to powers of two, with one to those of the tangent
    early = starts_early(num_seqs)
    exponent = LOG2_E * scale * (2.0 / softcap if softcap else 1.0)
    start_kernel(
        _decode_kernel,
        (num_kv_heads // heads, num_seqs if parts is None else len(parts.items)),
        out,
        *_tensors_of(parts),
        query,
        kv_cache,
        kv_scales,
        plan.block_tables,
        plan.slots,
        plan.seq_lens,
        plan.window or 2**30,
        exponent,
        LOG2_E * softcap,
        *query.stride()[:2],
        *kv_cache.stride()[:4],
        *scales.stride()[:3],
        plan.block_tables.stride(0),
        *_prefix_of(plan),
        *_newest_of(newest),
        **constants(query, kv_cache, config),
        HEADS=heads,
        SOFTCAP=softcap > 0,
        SCALED=kv_scales is not None,
        SPLIT=parts is not None,
        PREFIX_ROWS=plan.cascade.layout.tile_rows if plan.cascade is not None else 0,
        EARLY=early,
        num_warps=config["warps"],
        num_stages=config["stages"],
        launch_pdl=early,
    )
    return out


def _tensors_of(parts: DecodeParts | None) -> tuple[Tensor | None, ...]:
    if parts is None:
        return (None,) * 6
    return parts.items, parts.shares, parts.firsts, parts.outputs, parts.lses, parts.arrivals


def _prefix_of(plan: PagedDecode) -> tuple[Tensor | None, ...]:
    cascade = plan.cascade
    return (None, None, None) if cascade is None else (cascade.rows, cascade.outputs, cascade.lses)


def _newest_of(newest: NewestTokens | None) -> tuple[Tensor | int | None, ...]:
    if newest is None:
        return None, None, None, 0
    cos, sin = newest.rotation
    assert cos.stride() == sin.stride()
    assert cos.stride(2) == 1
    return newest.slot_mapping, cos, sin, cos.stride(0)


def constants(query: Tensor, kv_cache: Tensor, config: dict[str, int]) -> dict[str, Any]:
    """What of shapes, dtypes and configuration the kernel is compiled for."""
    group_size = query.shape[1] // kv_cache.shape[2]
    # fp8 becomes float16 by one instruction for two values; bfloat16 takes three
    dot_dtype = DOT_DTYPES.get(kv_cache.dtype, tl.float16)
    return {
        "GROUP_SIZE": group_size,
        "HEAD_DIM": query.shape[2],
        "BLOCK_SIZE": kv_cache.shape[3],
        # 16 rows are the least that matrix instructions take
        "BLOCK_M": max(16, next_power_of_2(group_size)),
        # where there is no product, the fewest that hold a group
        "BLOCK_G": next_power_of_2(group_size),
        "BLOCK_D": max(16, next_power_of_2(query.shape[2])),
        "TILE": config["tile"],
        "SLICES": config["slices"],
        "DOT_DTYPE": dot_dtype,
        "PRECISION": "ieee" if dot_dtype == tl.float32 else "tf32",
    }


@triton.jit(do_not_specialize=["window", "table_stride"])
def _decode_kernel(
    out,
    items,
    shares,
    firsts,
    part_outputs,
    part_lses,
    arrivals,
    query,
    kv_cache,
    kv_scales,
    block_tables,
    slots,
    seq_lens,
    window,
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
    prefix_rows,
    prefix_outputs,
    prefix_lses,
    slot_mapping,
    cos,
    sin,
    turn_stride,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    HEADS: tl.constexpr,
    SLICES: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
    SPLIT: tl.constexpr,
    PREFIX_ROWS: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    first_head = tl.program_id(0) * HEADS
    seq = tl.program_id(1)
    part = 0
    if SPLIT:
        item = tl.load(items + seq)
        if item < 0:
            return
        seq = item & ROW_MASK
        part = item >> PART_SHIFT
    STEP: tl.constexpr = TILE * SLICES
    start, stop, num_parts, first_item = _stretch(
        seq, part, seq_lens, window, shares, firsts, prefix_rows, SPLIT, PREFIX_ROWS
    )
    table = block_tables + tl.load(slots + seq).to(tl.int64) * table_stride

    heads, offsets = _streams(first_head, TILE, HEADS, SLICES)
    dims = tl.arange(0, BLOCK_D)
    asked = query + seq.to(tl.int64) * query_seq_stride
    if slot_mapping is None:
        q = _queries(asked, heads, query_head_stride, GROUP_SIZE, HEAD_DIM, BLOCK_M, BLOCK_D, DOT_DTYPE)
    else:
        slot = slot_of_newest(slot_mapping, seq, start, stop, part == num_parts - 1)
        turn = seq.to(tl.int64) * turn_stride
        q = rotated_heads(asked, heads, query_head_stride, cos + turn, sin + turn, GROUP_SIZE, HEAD_DIM, BLOCK_M, HEADS)

    highest = tl.full(q.shape[:-1], LOWEST, tl.float32)
    total = tl.zeros(q.shape[:-1], tl.float32)
    acc = tl.zeros(q.shape, tl.float32)
    if PREFIX_ROWS:
        highest, total, acc = _behind_prefix(
            prefix_rows + seq * 4, prefix_outputs, prefix_lses, part, num_parts, heads, highest, total, acc,
            GROUP_SIZE, HEAD_DIM, BLOCK_M, BLOCK_D, HEADS, SLICES, PREFIX_ROWS,
        )  # fmt: skip
        if SCALED:
            acc *= VALUE_GAIN
    if slot_mapping is not None:
        highest, total, acc = begin_with_newest(
            q, heads, kv_cache, cache_half_stride, cache_block_stride, cache_head_stride, cache_token_stride,
            slot, scale, softcap, GROUP_SIZE, BLOCK_SIZE, HEADS, SLICES, SOFTCAP, PRECISION,
        )  # fmt: skip
        # the others are in the cache
        stop -= (slot >= 0).to(tl.int32)
    for begin in range(start, stop, STEP):
        positions = begin + offsets
        seen = positions < stop
        # what lies past the end may never have been written: the last token is read in its place
        positions = tl.minimum(positions, stop - 1)
        blocks = tl.load(table + positions // BLOCK_SIZE).to(tl.int64)
        places = blocks * cache_block_stride + heads * cache_head_stride + positions % BLOCK_SIZE * cache_token_stride
        tokens = kv_cache + tl.expand_dims(places, -1) + dims
        k, v = _keys_values(tokens, cache_half_stride, HEAD_DIM, BLOCK_D)

        scores = tl.dot(q, transposed(k.to(DOT_DTYPE)), input_precision=PRECISION) * scale
        if SCALED:
            scaling = kv_scales + blocks * scale_block_stride + heads * scale_head_stride + positions % BLOCK_SIZE
            scores *= tl.expand_dims(tl.load(scaling), -2)
        if SOFTCAP:
            scores = softcap - 2.0 * softcap / (tl.exp2(scores) + 1.0)
        scores = tl.where(tl.expand_dims(seen, -2), scores, LOWEST)
        raised = tl.maximum(highest, tl.max(scores, -1))
        weights = tl.exp2(scores - tl.expand_dims(raised, -1))
        decay = tl.exp2(highest - raised)
        total = total * decay + tl.sum(weights, -1)
        if SCALED:
            value_scales = tl.minimum(tl.load(scaling + scale_half_stride) * VALUE_GAIN, LARGEST_HALF)
            weights *= tl.expand_dims(value_scales, -2)
        acc = tl.dot(weights.to(DOT_DTYPE), v.to(DOT_DTYPE), acc * tl.expand_dims(decay, -1), input_precision=PRECISION)
        highest = raised
    if SCALED:
        acc *= 1.0 / VALUE_GAIN
    total, highest, acc = met(highest, total, acc, BLOCK_M, BLOCK_D, HEADS, SLICES)
    deliver(
        out, part_outputs, part_lses, arrivals, seq, first_item, num_parts, highest, total, acc,
        GROUP_SIZE, HEAD_DIM, BLOCK_M, BLOCK_G, BLOCK_D, HEADS, SPLIT,
    )  # fmt: skip


@triton.jit
def _stretch(seq, part, seq_lens, window, shares, firsts, prefix_rows, SPLIT: tl.constexpr, PREFIX_ROWS: tl.constexpr):
    """Where the tokens of a program begin and end, how many parts its sequence has, and the first one's item."""
    stop = tl.load(seq_lens + seq)
    # the newest token sees the last `window` tokens: no key in the range needs a mask
    start = tl.maximum(stop - window, 0)
    if PREFIX_ROWS:
        # the tokens before it have been attended for all that share them; there is one behind it at least
        start = tl.load(prefix_rows + seq * 4)
    num_parts = 1
    first_item = seq
    if SPLIT:
        share = tl.load(shares + seq)
        first_item = tl.load(firsts + seq)
        num_parts = tl.load(firsts + seq + 1) - first_item
        start += part * share
        stop = tl.minimum(start + share, stop)
    return start, stop, num_parts, first_item


@triton.jit
def _streams(first_head, TILE: tl.constexpr, HEADS: tl.constexpr, SLICES: tl.constexpr):
    """The KV head of each stream, and the tokens it has of a step."""
    if HEADS * SLICES == 1:
        heads = first_head + tl.zeros([1], tl.int32)
        offsets = tl.arange(0, TILE)
    else:
        streams = tl.arange(0, HEADS * SLICES)
        heads = (first_head + streams % HEADS)[:, None]
        offsets = (streams // HEADS * TILE)[:, None] + tl.arange(0, TILE)[None, :]
    return heads, offsets


@triton.jit
def _queries(
    query, heads, head_stride,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """A sequence's queries of each stream's KV head, in the dtype of products."""
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    q = tl.load(
        query + tl.expand_dims(heads * GROUP_SIZE + rows, -1) * head_stride + dims,
        mask=(rows < GROUP_SIZE)[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    if q.dtype != DOT_DTYPE:
        q = tl.minimum(tl.maximum(q.to(tl.float32), -LARGEST_HALF), LARGEST_HALF)
    return q.to(DOT_DTYPE)


@triton.jit
def _behind_prefix(
    row, outputs, lses, part, num_parts, heads, highest, total, acc,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr, SLICES: tl.constexpr, PREFIX_ROWS: tl.constexpr,
):  # fmt: skip
    """Begin with what the pass over shared prefixes found for a sequence: each part with its share of the items."""
    num_kv_heads = tl.num_programs(0) * HEADS
    num_items = tl.load(row + 2)
    first = tl.load(row + 1).to(tl.int64)
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    mask = rows < GROUP_SIZE
    if SLICES > 1:
        # the first slice of each head
        mask = mask[None, :] & (tl.arange(0, HEADS * SLICES) < HEADS)[:, None]
    offsets = heads * PREFIX_ROWS + (tl.load(row + 3) * GROUP_SIZE + rows)
    for item in range(part, num_items, num_parts):
        places = (first + item) * num_kv_heads * PREFIX_ROWS + offsets
        logs = tl.load(lses + places, mask=mask, other=LOWEST)
        found = tl.load(
            outputs + tl.expand_dims(places * HEAD_DIM, -1) + dims,
            mask=tl.expand_dims(mask, -1) & (dims < HEAD_DIM),
            other=0.0,
        )
        raised = tl.maximum(highest, logs)
        decay = tl.exp2(highest - raised)
        weights = tl.exp2(logs - raised)
        total = total * decay + weights
        acc = acc * tl.expand_dims(decay, -1) + found * tl.expand_dims(weights, -1)
        highest = raised
    return highest, total, acc


@triton.jit
def _keys_values(tokens, half_stride, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """The keys of a tile and its values."""
    if BLOCK_D == HEAD_DIM:
        k = tl.load(tokens)
        v = tl.load(tokens + half_stride)
    else:
        mask = tl.arange(0, BLOCK_D) < HEAD_DIM
        k = tl.load(tokens, mask=mask, other=0.0)
        v = tl.load(tokens + half_stride, mask=mask, other=0.0)
    return k, v
