"""The parts of a batch of decodes on a GPU: one program looks at all sequences."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.cascade_attention import Cascade
from kernels.cuda.early import let_next_start, starts_early, wait_for_previous
from kernels.decode_parts import (
    FEWEST_PROGRAMS,
    LIKE_SHARE,
    MAX_PARTS,
    PART_SHIFT,
    PART_UNIT,
    RESIDENT_PROGRAMS,
    SHORT_PART,
    WHOLE_PROGRAMS,
    DecodeParts,
    wanted_programs,
)


def cut_sequences_triton(
    parts: DecodeParts, seq_lens: Tensor, window: int | None, programs_a_seq: int, cascade: Cascade | None = None
) -> None:
    """See `kernels.decode_parts.cut_sequences`."""
    num_seqs = len(seq_lens)
    num_programs = num_seqs * programs_a_seq
    early = starts_early(num_seqs)
    _cut_kernel[(1,)](
        parts.items,
        parts.shares,
        parts.firsts,
        seq_lens,
        None if cascade is None else cascade.rows,
        window or 2**30,
        num_seqs,
        len(parts.items),
        programs_a_seq,
        # of an even batch that is left whole; more than there are tokens where none is
        min(num_programs, RESIDENT_PROGRAMS) if num_programs >= WHOLE_PROGRAMS else 2**30,
        wanted_programs(num_programs),
        ROWS=triton.next_power_of_2(num_seqs),
        UNIT=PART_UNIT,
        MOST=MAX_PARTS,
        LIKE=LIKE_SHARE[0],
        LIKE_TO=LIKE_SHARE[1],
        ENOUGH=FEWEST_PROGRAMS,
        SHORT=SHORT_PART,
        SHIFT=PART_SHIFT,
        EARLY=early,
        num_warps=8 if num_seqs > 256 else 4,
        launch_pdl=early,
    )


@triton.jit(do_not_specialize=["window", "num_seqs", "num_items", "programs", "at_once", "wanted"])
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
    at_once,
    wanted,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    MOST: tl.constexpr,
    LIKE: tl.constexpr,
    LIKE_TO: tl.constexpr,
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
    most = tl.max(lengths).to(tl.int64)
    longest = tl.maximum(tl.cdiv(work, wanted), tl.minimum(tl.cdiv(work, ENOUGH), SHORT))
    longest = tl.maximum(longest, tl.where(most * at_once * LIKE_TO <= work * LIKE, most, UNIT)).to(tl.int32)
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
