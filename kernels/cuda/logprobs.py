"""
Log-probabilities in two reads of each row, whose softmax is never written.

The best few are taken from a short list, made as for top-k (kernels/cuda/sampling.py). Where more
tokens tie than the list holds, each of the best costs a read of the row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda.random_draws import natural_log
from kernels.cuda.row_scan import (
    INF,
    KEY_SHIFTS,
    NO_ID,
    begin_list,
    cutoff_of_lanes,
    end_list,
    first_of_largest,
    is_finite,
    lane_peaks,
    list_candidates,
    order_key,
    read_list,
    row_tile,
)
from kernels.logprobs import LOGPROB_FLOOR

BLOCK = 4096
CAPACITY = 512
NUM_WARPS = 8

_FLOOR = tl.constexpr(LOGPROB_FLOOR)


def token_logprobs_triton(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """
    As `token_logprobs_reference`; logits of bf16, fp16 or float32, rows of any stride; float32 results.

    Order is that of the logits: two that differ but round to one log-probability are not a tie.
    """
    rows, vocab = logits.shape
    assert logits.stride(1) == 1
    device = logits.device
    chosen = torch.empty(rows, dtype=torch.float32, device=device)
    best = torch.empty(rows, num_top, dtype=torch.int64, device=device)
    values = torch.empty(rows, num_top, dtype=torch.float32, device=device)
    if not rows:
        return chosen, best, values

    counts = torch.empty(rows, dtype=torch.int32, device=device)
    lists = torch.empty(rows, CAPACITY, dtype=torch.int32, device=device)
    _logprobs_kernel[(rows,)](
        logits, token_ids, chosen, best, values, counts, lists, logits.stride(0), vocab, num_top,
        SHIFT=KEY_SHIFTS[logits.dtype], BLOCK=BLOCK, CAPACITY=CAPACITY, num_warps=NUM_WARPS,
    )  # fmt: skip
    return chosen, best, values


@triton.jit(do_not_specialize=["num_top"])
def _logprobs_kernel(
    logits_ptr, tokens_ptr, chosen_ptr, best_ptr, values_ptr, counts_ptr, lists_ptr, row_stride, vocab, num_top,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    list_ptr, count_ptr = lists_ptr + row * CAPACITY, counts_ptr + row

    lanes, _ids = lane_peaks(row_ptr, 0, vocab, vocab, BLOCK)
    peak = tl.max(lanes, axis=0)
    finite = is_finite(peak)
    cutoff = INF
    if finite & (num_top > 0) & (num_top <= BLOCK):
        cutoff = cutoff_of_lanes(lanes, num_top, order_key(peak, SHIFT), SHIFT)

    # a row that is not finite has no probabilities
    peak = tl.where(finite, peak, 0.0)
    begin_list(count_ptr)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        ids, x = row_tile(row_ptr, start, vocab, BLOCK)
        sums += tl.exp(x - peak)
        list_candidates((x >= cutoff) & (ids < vocab), ids, list_ptr, count_ptr, CAPACITY)
    num_listed = end_list(count_ptr)
    log_sum = tl.where(finite, natural_log(tl.sum(sums, axis=0)), float("nan"))

    token = tl.load(tokens_ptr + row)
    tl.store(chosen_ptr + row, _logprob(tl.load(row_ptr + token).to(tl.float32), peak, log_sum))

    listed = (num_listed >= num_top) & (num_listed <= CAPACITY)
    ids, x = read_list(row_ptr, list_ptr, tl.where(listed, num_listed, 0), CAPACITY)
    last, last_id = INF, -1
    for place in range(num_top):
        if listed:
            last, last_id = _next_of(x, ids, last, last_id)
        else:
            last, last_id = _next_in_row(row_ptr, vocab, last, last_id, BLOCK)
        tl.store(best_ptr + row * num_top + place, last_id)
        tl.store(values_ptr + row * num_top + place, _logprob(last, peak, log_sum))


@triton.jit
def _next_of(x, ids, last, last_id):
    """The largest after one that was taken, in order of logit and then of id."""
    after = (x < last) | ((x == last) & (ids > last_id))
    return first_of_largest(tl.where(after, x, -INF), tl.where(after, ids, NO_ID))


@triton.jit
def _next_in_row(row_ptr, vocab, last, last_id, BLOCK: tl.constexpr):
    best = -INF
    best_id = NO_ID
    for start in range(0, vocab, BLOCK):
        ids, x = row_tile(row_ptr, start, vocab, BLOCK)
        # a NaN or +inf comes first, as in the peak
        x = tl.where(x < INF, x, INF)
        value, token = _next_of(x, tl.where(ids < vocab, ids, NO_ID), last, last_id)
        first = (value > best) | ((value == best) & (token < best_id))
        best = tl.where(first, value, best)
        best_id = tl.where(first, token, best_id)
    return best, best_id


@triton.jit
def _logprob(x, peak, log_sum):
    logprob = (x - peak) - log_sum
    # not a maximum, which would lose a NaN
    return tl.where(logprob < _FLOOR, _FLOOR, logprob)
