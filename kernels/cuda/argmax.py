"""Argmax of rows of logits in one read; few rows are split over more programs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda.early import let_next_start, starts_early, wait_for_previous
from kernels.cuda.launching import start_kernel
from kernels.cuda.row_scan import first_of_largest, is_finite, lane_peaks

BLOCK = 4096
NUM_WARPS = 8
# a second launch costs less than a row read by one multiprocessor, until rows fill them all
PROGRAMS = 264
MAX_SPLITS = 64


def argmax_triton(logits: Tensor) -> Tensor:
    """As `argmax_reference`, in float32; logits of bf16, fp16 or float32, rows of any stride."""
    rows, vocab = logits.shape
    assert logits.stride(1) == 1
    picked = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return picked

    num_tiles = -(-vocab // BLOCK)
    tiles_each = -(-num_tiles // max(1, min(PROGRAMS // rows, MAX_SPLITS)))
    num_splits = -(-num_tiles // tiles_each)
    early = starts_early(rows)
    if num_splits == 1:
        start_kernel(
            _argmax_kernel, (rows,), logits, picked, logits.stride(0), vocab,
            BLOCK=BLOCK, EARLY=early, num_warps=NUM_WARPS, launch_pdl=early,
        )  # fmt: skip
        return picked

    peaks = torch.empty(rows, num_splits, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, num_splits, dtype=torch.int32, device=logits.device)
    start_kernel(
        _split_kernel, (rows, num_splits), logits, peaks, ids, logits.stride(0), vocab, tiles_each, num_splits,
        BLOCK=BLOCK, EARLY=early, num_warps=NUM_WARPS, launch_pdl=early,
    )  # fmt: skip
    start_kernel(
        _combine_kernel, (rows,), peaks, ids, picked, num_splits,
        SPLITS=MAX_SPLITS, EARLY=early, num_warps=1, launch_pdl=early,
    )  # fmt: skip
    return picked


@triton.jit
def _argmax_kernel(logits_ptr, picked_ptr, row_stride, vocab, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    best, best_ids = lane_peaks(logits_ptr + row * row_stride, 0, vocab, vocab, BLOCK)
    peak, first = first_of_largest(best, best_ids)
    tl.store(picked_ptr + row, tl.where(is_finite(peak), first, -1).to(tl.int64))


@triton.jit(do_not_specialize=["tiles_each", "num_splits"])
def _split_kernel(
    logits_ptr, peaks_ptr, ids_ptr, row_stride, vocab, tiles_each, num_splits, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    begin = split * tiles_each * BLOCK
    end = tl.minimum(begin + tiles_each * BLOCK, vocab)
    best, best_ids = lane_peaks(logits_ptr + row * row_stride, begin, end, vocab, BLOCK)
    peak, first = first_of_largest(best, best_ids)
    tl.store(peaks_ptr + row * num_splits + split, peak)
    tl.store(ids_ptr + row * num_splits + split, first)


@triton.jit(do_not_specialize=["num_splits"])
def _combine_kernel(peaks_ptr, ids_ptr, picked_ptr, num_splits, SPLITS: tl.constexpr, EARLY: tl.constexpr):
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    there = splits < num_splits
    peaks = tl.load(peaks_ptr + row * num_splits + splits, mask=there, other=-float("inf"))
    ids = tl.load(ids_ptr + row * num_splits + splits, mask=there, other=0)
    peak, first = first_of_largest(peaks, ids)
    tl.store(picked_ptr + row, tl.where(is_finite(peak), first, -1).to(tl.int64))
