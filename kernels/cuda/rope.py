"""Head norms, rotary position embedding and the cache write on a GPU, in one launch."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda.early import let_next_start, starts_early, wait_for_previous
from kernels.cuda.launching import next_power_of_2, start_kernel
from kernels.rope import HeadNorms

# elements of a program: 16 a thread, one wide load of each half of a head in half precision
TILE = 2048
NUM_WARPS = 4


def rope_and_store_triton(
    qkv: Tensor,
    rotation: tuple[Tensor, Tensor],
    slot_mapping: Tensor,
    kv_cache: Tensor,
    num_heads: int,
    norms: HeadNorms | None = None,
    kv_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.rope.rope_and_store`."""
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    num_tokens, heads_per_token = len(qkv), num_heads + 2 * num_kv_heads
    cos, sin = rotation
    assert qkv.stride(1) == cos.stride(2) == sin.stride(2) == kv_cache.stride(4) == 1, "heads must be adjacent memory"
    assert (kv_scales is not None) == (kv_cache.dtype.itemsize == 1), "an 8-bit cache, and no other, has scales"

    half = cos.shape[2] // 2
    tail = head_dim - 2 * half
    half_pad, tail_pad = next_power_of_2(half), next_power_of_2(tail) if tail else 0
    # no part has fewer elements than there are threads: two that held the same one, and change it in
    # place, could read it before and after
    rows_per_program = max(
        TILE // next_power_of_2(2 * half_pad + tail_pad), NUM_WARPS * 32 // min(half_pad, tail_pad or half_pad)
    )
    num_rows, early = num_tokens * heads_per_token, starts_early(num_tokens)
    start_kernel(
        _rope_and_store_kernel,
        (-(-num_rows // rows_per_program),),
        qkv,
        cos,
        sin,
        slot_mapping,
        kv_cache,
        kv_scales,
        None if norms is None else norms.query,
        None if norms is None else norms.key,
        0.0 if norms is None else norms.eps,
        num_rows,
        num_heads,
        num_kv_heads,
        qkv.stride(0),
        cos.stride(0),
        sin.stride(0),
        *kv_cache.stride()[:4],
        *((0, 0, 0) if kv_scales is None else kv_scales.stride()[:3]),
        HEAD_DIM=head_dim,
        HALF=half,
        BLOCK_SIZE=block_size,
        ROWS=rows_per_program,
        HALF_PAD=half_pad,
        TAIL_PAD=tail_pad,
        EARLY=early,
        num_warps=NUM_WARPS,
        launch_pdl=early,
    )
    query, key, value = qkv.view(num_tokens, heads_per_token, head_dim).split(
        (num_heads, num_kv_heads, num_kv_heads), dim=1
    )
    return query, key, value


@triton.jit(do_not_specialize=["num_rows", "num_heads", "num_kv_heads"])
def _rope_and_store_kernel(
    qkv,
    cos,
    sin,
    slot_mapping,
    kv_cache,
    kv_scales,
    query_weight,
    key_weight,
    eps,
    num_rows,
    num_heads,
    num_kv_heads,
    qkv_stride,
    cos_stride,
    sin_stride,
    cache_part_stride,
    cache_block_stride,
    cache_head_stride,
    cache_token_stride,
    scale_part_stride,
    scale_block_stride,
    scale_head_stride,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    HALF_PAD: tl.constexpr,
    TAIL_PAD: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    # a row is one head of one token: no program is half empty, whatever the number of heads
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_range = rows < num_rows
    heads_per_token = num_heads + 2 * num_kv_heads
    tokens, heads = (rows // heads_per_token).to(tl.int64), rows % heads_per_token
    is_query, is_value = heads < num_heads, heads >= num_heads + num_kv_heads

    # the two halves of the rotated part apart: a thread holds both elements of its pairs
    pairs = tl.arange(0, HALF_PAD)
    in_half = (pairs < HALF)[None, :]
    mask = in_range[:, None] & in_half
    source = qkv + (tokens * qkv_stride + heads * HEAD_DIM)[:, None]
    first = tl.load(source + pairs[None, :], mask=mask, other=0.0)
    second = tl.load(source + HALF + pairs[None, :], mask=mask, other=0.0)
    if TAIL_PAD > 0:
        past = 2 * HALF + tl.arange(0, TAIL_PAD)
        tail_mask = in_range[:, None] & (past < HEAD_DIM)[None, :]
        tail = tl.load(source + past[None, :], mask=tail_mask, other=0.0)

    if query_weight is not None:
        squares = _sum_of_squares(first) + _sum_of_squares(second)
        if TAIL_PAD > 0:
            squares += _sum_of_squares(tail)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        asked, plain = is_query[:, None], is_value[:, None]
        in_row = pairs < HALF
        first = _norm_part(first, scale, query_weight, key_weight, pairs, in_row, asked, plain)
        second = _norm_part(second, scale, query_weight, key_weight, HALF + pairs, in_row, asked, plain)
        if TAIL_PAD > 0:
            tail = _norm_part(tail, scale, query_weight, key_weight, past, past < HEAD_DIM, asked, plain)
            tail = tail.to(qkv.dtype.element_ty)

    turns = mask & ~is_value[:, None]
    angle = tl.load(cos + (tokens * cos_stride)[:, None] + pairs[None, :], mask=turns, other=1.0)
    # the second half of the sines is the plain one; a value turns by no angle
    lift = tl.load(sin + (tokens * sin_stride)[:, None] + HALF + pairs[None, :], mask=turns, other=0.0)
    x, y = first.to(tl.float32), second.to(tl.float32)
    dtype = qkv.dtype.element_ty
    # no compiler's choice what is rounded between: decode attention gives the same bits
    first, second = tl.fma(-y, lift, x * angle).to(dtype), tl.fma(x, lift, y * angle).to(dtype)
    changed, kept_first, kept_second = ~is_value, first, second
    if TAIL_PAD > 0:
        kept_tail = tail
    if kv_scales is not None:
        largest = tl.maximum(_largest(first), _largest(second))
        if TAIL_PAD > 0:
            largest = tl.maximum(largest, _largest(tail))
        # a head of zeros has a scale too; one that is not finite has none, for maxima pass over NaN
        scales = tl.maximum(largest / 448.0, 1e-12) + _zero_if_finite(first) + _zero_if_finite(second)
        if TAIL_PAD > 0:
            scales += _zero_if_finite(tail)
        # values change too: what is attended fresh is what later tokens will find in the cache
        changed = in_range
        kept_first, first = _round(first, scales, is_query, kv_cache.dtype.element_ty)
        kept_second, second = _round(second, scales, is_query, kv_cache.dtype.element_ty)
        if TAIL_PAD > 0:
            kept_tail, tail = _round(tail, scales, is_query, kv_cache.dtype.element_ty)
    tl.store(source + pairs[None, :], first, mask=mask & changed[:, None])
    tl.store(source + HALF + pairs[None, :], second, mask=mask & changed[:, None])
    if TAIL_PAD > 0 and (query_weight is not None or kv_scales is not None):
        tl.store(source + past[None, :], tail, mask=tail_mask & changed[:, None])

    slots = tl.load(slot_mapping + tokens, mask=in_range & ~is_query, other=-1)
    written = slots >= 0
    parts = is_value.to(tl.int64)
    cache_heads = heads - num_heads - tl.where(is_value, num_kv_heads, 0)
    blocks, offsets = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    if kv_scales is not None:
        place = parts * scale_part_stride + blocks * scale_block_stride + cache_heads * scale_head_stride + offsets
        tl.store(kv_scales + place, scales, mask=written)
    place = parts * cache_part_stride + blocks * cache_block_stride
    place += cache_heads * cache_head_stride + offsets * cache_token_stride
    target = kv_cache + place[:, None]
    tl.store(target + pairs[None, :], kept_first.to(kv_cache.dtype.element_ty), mask=written[:, None] & in_half)
    tl.store(target + HALF + pairs[None, :], kept_second.to(kv_cache.dtype.element_ty), mask=written[:, None] & in_half)
    if TAIL_PAD > 0:
        tl.store(target + past[None, :], kept_tail.to(kv_cache.dtype.element_ty), mask=written[:, None] & tail_mask)


@triton.jit
def _sum_of_squares(part):
    wide = part.to(tl.float32)
    return tl.sum(wide * wide, axis=1)


@triton.jit
def _norm_part(part, scale, query_weight, key_weight, cols, mask, is_query, is_value):
    """Scale, and multiply by the weight of the row's kind, in float32: the rotation rounds; values stay."""
    query_scale = tl.load(query_weight + cols, mask=mask, other=0.0).to(tl.float32)[None, :]
    key_scale = tl.load(key_weight + cols, mask=mask, other=0.0).to(tl.float32)[None, :]
    wide = part.to(tl.float32)
    return tl.where(is_value, wide, wide * scale * tl.where(is_query, query_scale, key_scale))


@triton.jit
def _largest(part):
    return tl.max(tl.abs(part.to(tl.float32)), axis=1)


@triton.jit
def _zero_if_finite(part):
    """0 for each row, NaN where anything of it is NaN or infinite."""
    return tl.sum(part.to(tl.float32) * 0.0, axis=1)


@triton.jit
def _round(part, scales, is_query, dtype: tl.constexpr):
    """What the cache takes of keys and values, and what of that is attended; queries stay as they are."""
    # the quotient can pass the largest float8 by a hair
    rounded = _to_nearest_e4m3(tl.minimum(tl.maximum(part.to(tl.float32) / scales[:, None], -448.0), 448.0))
    return rounded.to(dtype), tl.where(is_query[:, None], part, (rounded * scales[:, None]).to(part.dtype))


@triton.jit
def _to_nearest_e4m3(x):
    """
    Round float32 of up to 448 to what float8_e4m3fn has, ties to even.

    By arithmetic: an H200 gave other numbers for half of the elements that went to float8 and back in registers.
    """
    # 2 to the power of its exponent; from 2**-6 down the spacing stays the same
    power = tl.maximum((x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True), 0.015625)
    # its last bit is the spacing: an eighth of the power
    large = power * 1572864.0
    return (x + large) - large
