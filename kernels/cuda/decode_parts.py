"""The parts of a batch of decodes on a GPU: one program looks at all sequences."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.cascade_attention import Cascade
from kernels.cuda.early import let_next_start, starts_early, wait_for_previous
from kernels.cuda.launching import next_power_of_2, start_kernel
from kernels.decode_parts import (
    FEWEST_PROGRAMS,
    MAX_PARTS,
    MIN_PROGRAMS,
    PART_SHIFT,
    PART_UNIT,
    SHORT_PART,
    DecodeParts,
)


def cut_sequences_triton(
    parts: DecodeParts, seq_lens: Tensor, window: int | None, programs_a_seq: int, cascade: Cascade | None = None
) -> None:
    """See `kernels.decode_parts.cut_sequences`."""
    num_seqs = len(seq_lens)
    early = starts_early(num_seqs)
    start_kernel(
        _cut_kernel,
        (1,),
        parts.items,
        parts.shares,
        parts.firsts,
        seq_lens,
        None if cascade is None else cascade.rows,
        window or 2**30,
        num_seqs,
        len(parts.items),
        programs_a_seq,
        ROWS=next_power_of_2(num_seqs),
        UNIT=PART_UNIT,
        MOST=MAX_PARTS,
        WANTED=MIN_PROGRAMS,
        ENOUGH=FEWEST_PROGRAMS,
        SHORT=SHORT_PART,
        SHIFT=PART_SHIFT,
        EARLY=early,
        num_warps=8 if num_seqs > 256 else 4,
        launch_pdl=early,
    )


@triton.jit(do_not_specialize=["window", "num_seqs", "num_items", "programs"])
def _cut_kernel(
    items,
    shares,
    firsts,
    seq_lens,
    prefix_rows,
    window,
    num_seqs,
    num_items,
    programs,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    MOST: tl.constexpr,
    WANTED: tl.constexpr,
    ENOUGH: tl.constexpr,
    SHORT: tl.constexpr,
    SHIFT: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    rows = tl.arange(0, ROWS)
    there = rows < num_seqs
    lengths = tl.minimum(tl.load(seq_lens + rows, mask=there, other=0), window)
    if prefix_rows is not None:
        lengths -= tl.load(prefix_rows + rows * 4, mask=there, other=0)

    work = tl.sum(lengths.to(tl.int64)) * programs
    longest = tl.maximum(tl.cdiv(work, WANTED), tl.minimum(tl.cdiv(work, ENOUGH), SHORT))
    longest = tl.maximum(longest, UNIT).to(tl.int32)
    counts = tl.minimum(tl.maximum(tl.cdiv(lengths, longest), 1), MOST)
    share = tl.maximum(tl.cdiv(lengths, counts * UNIT), 1) * UNIT
    # rounding leaves some without a token
    counts = tl.where(there, tl.maximum(tl.cdiv(lengths, share), 1), 0)
    stops = tl.cumsum(counts, 0)
    starts = stops - counts
    found = tl.sum(counts)
    tl.store(shares + rows, share, mask=there)
    tl.store(firsts + rows, starts, mask=there)
    tl.store(firsts + num_seqs, found)
    for part in range(tl.max(counts)):
        tl.store(items + starts + part, rows | (part << SHIFT), mask=part < counts)
    for begin in range(0, num_items, ROWS):
        places = begin + rows
        tl.store(items + places, tl.full([ROWS], -1, tl.int32), mask=(places >= found) & (places < num_items))
