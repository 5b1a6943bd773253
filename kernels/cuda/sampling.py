"""
Temperature, min-p, top-k, top-p and the draw in two launches, one program a row, without a sort.

The first launch takes rows with top-k or top-p, the second all others; a row that is not a
launch's own costs it nothing. Every row is read once for its peak, which settles a greedy row,
and once more for the draw. A filtered row is read the second time to list its candidates: during
the first pass each lane kept its largest logit, and a cutoff that as many lanes reach as tokens
are wanted is reached by those tokens and hardly any more. The filters and the draw then work on
the list. Where the list cannot hold what the filters keep (a flat row and a top-p near 1, a
large top-k, many equal logits) the threshold is searched in the row itself, by three pivots a
pass, and the row is read once more for the draw.

The probability of a set is summed in fixed point: exact in any order, so that a row gives the
same token however its candidates were listed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda.random_draws import gumbel_of, natural_log, position_keys, uniform_draws
from kernels.cuda.row_scan import (
    INF,
    KEY_SHIFTS,
    NO_ID,
    begin_list,
    cutoff_of_lanes,
    end_list,
    first_of_largest,
    is_finite,
    key_value,
    lane_peaks,
    largest_reaching,
    list_candidates,
    order_key,
    read_list,
    row_tile,
)
from kernels.sampling import MIN_TEMPERATURE

# of a row without top-k and top-p: many small programs on a multiprocessor
PEAK_BLOCK = 4096
DRAW_BLOCK = 2048
DRAW_WARPS = 8

# of a filtered row: one large program, so that the rows in work stay in the second-level cache
FILTER_BLOCK = 8192
FILTER_WARPS = 16
# a search sums in int64, of which fewer fit in registers
SEARCH_BLOCK = 4096
# tiles on their way at a time: they wait in shared memory, idle here, not in registers
STAGES = 3
CAPACITY = 2048

_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)
# weights are at most 1 and a row has less than 2**21 tokens: sums stay under 2**63
_FIXED_POINT = tl.constexpr(float(1 << 42))
# the peak's score: 0 and its noise, which is over -2.9
_LEAST_SCORE = tl.constexpr(-3.0)


def sample_triton(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, keys: Tensor
) -> Tensor:
    """As `sample_reference`; logits of bf16, fp16 or float32, rows of any stride; options too."""
    return _launch(logits, None, temperature, top_k, top_p, min_p, keys, None)


def sample_slots_triton(
    logits: Tensor, slots: Tensor, knobs: Tensor, top_k: Tensor, streams: Tensor, positions: Tensor
) -> Tensor:
    """As `sample_slots_reference`; options and streams are read by slot in the kernels."""
    temperature, top_p, min_p = (knobs[:, column] for column in range(3))
    return _launch(logits, slots, temperature, top_k, top_p, min_p, streams, positions)


def _launch(
    logits: Tensor,
    slots: Tensor | None,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    streams: Tensor,
    positions: Tensor | None,
) -> Tensor:
    rows, vocab = logits.shape
    assert logits.stride(1) == 1
    assert streams.stride() == (2, 1)
    assert temperature.dtype == top_p.dtype == min_p.dtype == torch.float32
    picked = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return picked

    counts = torch.empty(rows, dtype=torch.int32, device=logits.device)
    lists = torch.empty(rows, CAPACITY, dtype=torch.int32, device=logits.device)
    options = (slots, temperature, top_k, top_p, min_p, streams, positions)
    strides = (temperature.stride(0), top_k.stride(0), top_p.stride(0), min_p.stride(0))
    _filter_kernel[(rows,)](
        logits, picked, counts, lists, *options, logits.stride(0), vocab, *strides,
        SHIFT=KEY_SHIFTS[logits.dtype], BLOCK=FILTER_BLOCK, SEARCH_BLOCK=SEARCH_BLOCK, CAPACITY=CAPACITY,
        STAGES=STAGES, num_warps=FILTER_WARPS,
    )  # fmt: skip
    _draw_kernel[(rows,)](
        logits, picked, *options, logits.stride(0), vocab, *strides,
        PEAK_BLOCK=PEAK_BLOCK, BLOCK=DRAW_BLOCK, num_warps=DRAW_WARPS,
    )  # fmt: skip
    return picked


@triton.jit
def _draw_kernel(
    logits_ptr, picked_ptr,
    slots_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, streams_ptr, positions_ptr,
    row_stride, vocab, temperature_stride, top_k_stride, top_p_stride, min_p_stride,
    PEAK_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows that are greedy, or have neither top-k nor top-p."""
    row = tl.program_id(0).to(tl.int64)
    slot = _slot_of(row, slots_ptr)
    temperature = tl.load(temperature_ptr + slot * temperature_stride)
    top_k = _top_k_of(top_k_ptr + slot * top_k_stride, vocab)
    top_p = tl.load(top_p_ptr + slot * top_p_stride)
    if _is_filtered(temperature, top_k, top_p):
        return

    row_ptr = logits_ptr + row * row_stride
    best, best_ids = lane_peaks(row_ptr, 0, vocab, vocab, PEAK_BLOCK)
    peak, first = first_of_largest(best, best_ids)
    picked = tl.where(is_finite(peak), first, -1)
    if is_finite(peak) & (temperature >= _MIN_TEMPERATURE):
        key_0, key_1 = _keys_of(slot, streams_ptr, positions_ptr)
        threshold = _min_p_threshold(tl.load(min_p_ptr + slot * min_p_stride))
        picked = _draw_from_row(row_ptr, vocab, peak, temperature, threshold, key_0, key_1, BLOCK)
    tl.store(picked_ptr + row, picked)


@triton.jit
def _filter_kernel(
    logits_ptr, picked_ptr, counts_ptr, lists_ptr,
    slots_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, streams_ptr, positions_ptr,
    row_stride, vocab, temperature_stride, top_k_stride, top_p_stride, min_p_stride,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, SEARCH_BLOCK: tl.constexpr, CAPACITY: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Rows with top-k or top-p."""
    row = tl.program_id(0).to(tl.int64)
    slot = _slot_of(row, slots_ptr)
    temperature = tl.load(temperature_ptr + slot * temperature_stride)
    top_k = _top_k_of(top_k_ptr + slot * top_k_stride, vocab)
    top_p = tl.load(top_p_ptr + slot * top_p_stride)
    if not _is_filtered(temperature, top_k, top_p):
        return

    row_ptr = logits_ptr + row * row_stride
    best, _ids = lane_peaks(row_ptr, 0, vocab, vocab, BLOCK, STAGES)
    peak = tl.max(best, axis=0)
    picked = -1
    if is_finite(peak):
        key_0, key_1 = _keys_of(slot, streams_ptr, positions_ptr)
        threshold = _min_p_threshold(tl.load(min_p_ptr + slot * min_p_stride))
        if top_k <= CAPACITY // 2:
            picked = _draw_from_list(
                row_ptr, vocab, lists_ptr + row * CAPACITY, counts_ptr + row, best, peak, temperature,
                threshold, top_k, top_p, key_0, key_1, SHIFT, BLOCK, CAPACITY, STAGES,
            )  # fmt: skip
        if picked < 0:
            threshold = _search_row(
                row_ptr, vocab, peak, temperature, threshold, top_k, top_p, SHIFT, SEARCH_BLOCK, STAGES
            )
            picked = _draw_from_row(row_ptr, vocab, peak, temperature, threshold, key_0, key_1, SEARCH_BLOCK)
    tl.store(picked_ptr + row, picked)


@triton.jit
def _slot_of(row, slots_ptr):
    slot = row
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + row).to(tl.int64)
    return slot


@triton.jit
def _top_k_of(top_k_ptr, vocab):
    """0 where it keeps all."""
    top_k = tl.load(top_k_ptr).to(tl.int32)
    return tl.where(top_k < vocab, top_k, 0)


@triton.jit
def _is_filtered(temperature, top_k, top_p):
    return (temperature >= _MIN_TEMPERATURE) & ((top_k > 0) | (top_p < 1))


@triton.jit
def _keys_of(slot, streams_ptr, positions_ptr):
    """The row's two uint32 keys; without positions the streams are keys already."""
    word_0 = tl.load(streams_ptr + slot * 2)
    word_1 = tl.load(streams_ptr + slot * 2 + 1)
    if positions_ptr is not None:
        key_0, key_1 = position_keys(word_0, word_1, tl.load(positions_ptr + slot))
    else:
        key_0, key_1 = word_0.to(tl.uint32, bitcast=True), word_1.to(tl.uint32, bitcast=True)
    return key_0, key_1


@triton.jit
def _min_p_threshold(min_p):
    return tl.where(min_p > 0, natural_log(min_p), -INF)


@triton.jit
def _draw_from_list(
    row_ptr, vocab, list_ptr, count_ptr, best, peak, temperature, floor, top_k, top_p, key_0, key_1,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, CAPACITY: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Filter and draw from a list of the largest; -1 where it does not hold all that is kept."""
    picked = -1
    peak_key = order_key(peak, SHIFT)
    wanted = tl.where(top_k > 0, top_k, CAPACITY // 2)
    cutoff = cutoff_of_lanes(best, wanted, peak_key, SHIFT)
    begin_list(count_ptr)
    total = tl.full([], 0, tl.int64)
    # apart, so that a row with top-k takes no exponential of each logit
    if top_k > 0:
        _list_row(row_ptr, vocab, list_ptr, count_ptr, peak, temperature, floor, cutoff, False, BLOCK, CAPACITY, STAGES)
    else:
        total = _list_row(
            row_ptr, vocab, list_ptr, count_ptr, peak, temperature, floor, cutoff, True, BLOCK, CAPACITY, STAGES
        )
    num_listed = end_list(count_ptr)

    if num_listed <= CAPACITY:
        ids, x = read_list(row_ptr, list_ptr, num_listed, CAPACITY)
        scaled = tl.math.div_rn(x - peak, temperature)
        keys = order_key(x, SHIFT)
        listed = ids < NO_ID
        lowest = tl.min(tl.where(listed, keys, peak_key), axis=0)
        if top_k > 0:
            kth = largest_reaching(keys, listed.to(tl.int32), top_k, order_key(cutoff, SHIFT), peak_key)
            floor = tl.maximum(floor, tl.min(tl.where(keys >= kth, scaled, 0.0), axis=0))

        weights = tl.where(listed & (scaled >= floor), _fixed_weight(scaled), 0)
        weight = tl.sum(weights, axis=0)
        total = tl.where(top_k > 0, weight, total)
        target = _share(top_p, total)
        if (top_p >= 1) | (weight >= target):
            if top_p < 1:
                last = largest_reaching(keys, weights, target, lowest, peak_key)
                floor = tl.maximum(floor, tl.min(tl.where(keys >= last, scaled, 0.0), axis=0))
            noise = gumbel_of(uniform_draws(key_0, key_1, ids))
            scores = tl.where(listed & (scaled >= floor), scaled + noise, -INF)
            _score, picked = first_of_largest(scores, ids)
    return picked


@triton.jit
def _list_row(
    row_ptr, vocab, list_ptr, count_ptr, peak, temperature, floor, cutoff,
    WEIGH: tl.constexpr, BLOCK: tl.constexpr, CAPACITY: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """List what the cutoff and min-p leave; returns the weight of all that min-p leaves, if asked."""
    # a product in place of the division is off by some 2**-22: list a little more than the cutoff's
    # ties after rounding, and leave the exact comparison to the list
    inverse = 1.0 / temperature
    listed_from = tl.maximum(tl.math.div_rn(cutoff - peak, temperature), floor) * (1 + 1e-6)
    weights = tl.zeros([BLOCK], tl.int64)
    for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
        ids, x = row_tile(row_ptr, start, vocab, BLOCK)
        scaled = (x - peak) * inverse
        if WEIGH:
            weights += tl.where(scaled >= floor, _fixed_weight(scaled), 0)
        list_candidates((scaled >= listed_from) & (x > -INF), ids, list_ptr, count_ptr, CAPACITY)
    return tl.sum(weights, axis=0)


@triton.jit
def _search_row(
    row_ptr, vocab, peak, temperature, floor, top_k, top_p,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The smallest scaled logit that the filters keep, found in the row itself."""
    if top_k > 0:
        target = top_k.to(tl.int64)
        kth = _search(row_ptr, vocab, peak, temperature, -INF, target, -INF, False, SHIFT, BLOCK, STAGES)
        floor = tl.maximum(floor, tl.math.div_rn(key_value(kth, SHIFT) - peak, temperature))
    if top_p < 1:
        weights = tl.zeros([BLOCK], tl.int64)
        for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
            _ids, x = row_tile(row_ptr, start, vocab, BLOCK)
            weights += _weigh(x, peak, temperature, floor, True)
        target = _share(top_p, tl.sum(weights, axis=0))
        # what is smaller has no weight in fixed point
        least = peak - temperature * 30.0
        last = _search(row_ptr, vocab, peak, temperature, floor, target, least, True, SHIFT, BLOCK, STAGES)
        floor = tl.maximum(floor, tl.math.div_rn(key_value(last, SHIFT) - peak, temperature))
    return floor


@triton.jit
def _search(
    row_ptr, vocab, peak, temperature, floor, target, least,
    WEIGH: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`largest_reaching` in a row, by quarters: a pass over the row costs more than two more sums."""
    # int64: float32 keys span all of int32
    low = order_key(tl.full([], least, tl.float32), SHIFT).to(tl.int64)
    high = order_key(peak, SHIFT).to(tl.int64) + 1
    while high - low > 1:
        first = low + (high - low) // 4
        second = low + (high - low) // 2
        third = low + (high - low) * 3 // 4
        above_first = tl.zeros([BLOCK], tl.int64)
        above_second = tl.zeros([BLOCK], tl.int64)
        above_third = tl.zeros([BLOCK], tl.int64)
        for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
            ids, x = row_tile(row_ptr, start, vocab, BLOCK)
            key = order_key(x, SHIFT)
            weight = tl.where(ids < vocab, _weigh(x, peak, temperature, floor, WEIGH), 0)
            above_first += tl.where(key >= first.to(tl.int32), weight, 0)
            above_second += tl.where(key >= second.to(tl.int32), weight, 0)
            above_third += tl.where(key >= third.to(tl.int32), weight, 0)
        reaches_first = tl.sum(above_first, axis=0) >= target
        reaches_second = tl.sum(above_second, axis=0) >= target
        reaches_third = tl.sum(above_third, axis=0) >= target
        low = tl.where(reaches_third, third, tl.where(reaches_second, second, tl.where(reaches_first, first, low)))
        high = tl.where(reaches_first, tl.where(reaches_second, tl.where(reaches_third, high, third), second), first)
    return low.to(tl.int32)


@triton.jit
def _draw_from_row(row_ptr, vocab, peak, temperature, threshold, key_0, key_1, BLOCK: tl.constexpr):
    """
    The token with the largest score among those at the threshold or over it.

    A tile's noise is computed only if some token there may beat the best so far. With E the
    negative logarithm of 1 - draw, its score is scaled - log(E), and E is at least the draw.
    """
    inverse = 1.0 / temperature
    best = _LEAST_SCORE
    picked = -1
    for start in range(0, vocab, BLOCK):
        ids, x = row_tile(row_ptr, start, vocab, BLOCK)
        draws = uniform_draws(key_0, key_1, ids)
        # 1 % over what rounding takes: no score that matters is missed
        hopeful = draws <= tl.exp((x - peak) * inverse - best) * 1.01
        if tl.max(hopeful.to(tl.int32), axis=0) > 0:
            scaled = tl.math.div_rn(x - peak, temperature)
            scores = tl.where(hopeful & (scaled >= threshold), scaled + gumbel_of(draws), -INF)
            score, token = first_of_largest(scores, ids)
            picked = tl.where(score > best, token, picked)
            best = tl.maximum(best, score)
    return picked


@triton.jit
def _weigh(x, peak, temperature, floor, WEIGH: tl.constexpr):
    """int64 weights of logits whose scaled value is the floor or over it; 1 each if not WEIGH."""
    if WEIGH:
        scaled = tl.math.div_rn(x - peak, temperature)
        weight = tl.where(scaled >= floor, _fixed_weight(scaled), 0)
    else:
        weight = tl.full(x.shape, 1, tl.int64)
    return weight


@triton.jit
def _fixed_weight(scaled):
    return (tl.exp(scaled) * _FIXED_POINT).to(tl.int64)


@triton.jit
def _share(top_p, total):
    """The weight that a nucleus reaches: some, even where top_p is tiny."""
    return tl.maximum((top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
