"""
How the results of a running softmax meet: those of a program's slices, and those of a sequence's parts.

Source: Dao et al. 2023, "Flash-Decoding" (splits).
"""

import triton
import triton.language as tl

# finite, so that the difference of two is never NaN
LOWEST = tl.constexpr(-1.0e30)
# that are joined at once
PARTS_AT_ONCE = tl.constexpr(8)


@triton.jit
def transposed(tile):
    """A tile, or that of each stream."""
    return tl.trans(tile) if len(tile.shape) == 2 else tl.permute(tile, 0, 2, 1)


@triton.jit
def met(highest, total, acc, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr, SLICES: tl.constexpr):
    """The slices of each head as one: sums, maxima and outputs of its rows."""
    highest = tl.reshape(highest, [SLICES, HEADS * BLOCK_M])
    total = tl.reshape(total, [SLICES, HEADS * BLOCK_M])
    acc = tl.reshape(acc, [SLICES, HEADS * BLOCK_M, BLOCK_D])
    peak = tl.max(highest, 0)
    decay = tl.exp2(highest - peak[None, :])
    # a sequence of no tokens gives zeros
    total = tl.maximum(tl.sum(total * decay, 0), 1.0e-30)
    return total, peak, tl.sum(acc * tl.expand_dims(decay, -1), 0) / total[:, None]


@triton.jit
def deliver(
    out, part_outputs, part_lses, arrivals, seq, first_item, num_parts, highest, total, acc,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr, HEADS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Write a program's result; of a sequence in parts, the program that ends last joins them."""
    if SPLIT and num_parts > 1:
        place = tl.program_id(1)
        _store(part_outputs, part_lses, place, highest, total, acc, GROUP_SIZE, HEAD_DIM, BLOCK_M, BLOCK_D, HEADS, True)
        counter = arrivals + seq * tl.num_programs(0) + tl.program_id(0)
        _join_last(
            out, part_outputs, part_lses, counter, seq, first_item, num_parts,
            GROUP_SIZE, HEAD_DIM, BLOCK_G, BLOCK_D, HEADS,
        )  # fmt: skip
    else:
        _store(out, None, seq, highest, total, acc, GROUP_SIZE, HEAD_DIM, BLOCK_M, BLOCK_D, HEADS, False)


@triton.jit
def _rows(place, GROUP_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, HEADS: tl.constexpr):
    """For each row of a program's result its row among those of all heads at a place, and whether there is one."""
    rows = tl.arange(0, HEADS * BLOCK_M)
    members = rows % BLOCK_M
    heads = (tl.program_id(0) * HEADS + rows // BLOCK_M) * GROUP_SIZE + members
    num_heads = tl.num_programs(0) * HEADS * GROUP_SIZE
    return (place * num_heads + heads).to(tl.int64), members < GROUP_SIZE


@triton.jit
def _store(
    out, lses, place, highest, total, acc,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Write a program's result: the output of its sequence, or a part of it."""
    rows, real = _rows(place, GROUP_SIZE, BLOCK_M, HEADS)
    if PART:
        tl.store(lses + rows, highest + tl.log2(total), mask=real)
    dims = tl.arange(0, BLOCK_D)
    mask = real[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out + rows[:, None] * HEAD_DIM + dims[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _join_last(
    out, part_outputs, part_lses, counter, seq, first_item, num_parts,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Join the parts of a sequence, if all others are done."""
    # what all threads wrote is there before it is counted
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel") == num_parts - 1:
        tl.store(counter, 0)
        rows, real = _rows(seq, GROUP_SIZE, BLOCK_G, HEADS)
        sources, _ = _rows(first_item, GROUP_SIZE, BLOCK_G, HEADS)
        num_heads = tl.num_programs(0) * HEADS * GROUP_SIZE
        dims = tl.arange(0, BLOCK_D)
        highest = tl.full([HEADS * BLOCK_G], LOWEST, tl.float32)
        total = tl.zeros([HEADS * BLOCK_G], tl.float32)
        acc = tl.zeros([HEADS * BLOCK_G, BLOCK_D], tl.float32)
        for begin in range(0, num_parts, PARTS_AT_ONCE):
            parts = begin + tl.arange(0, PARTS_AT_ONCE)
            places = sources[None, :] + (parts * num_heads)[:, None]
            mask = (parts < num_parts)[:, None] & real[None, :]
            # past the first cache, which may hold what lay there in the layer before
            logs = tl.load(part_lses + places, mask=mask, other=LOWEST, cache_modifier=".cg")
            outputs = tl.load(
                part_outputs + tl.expand_dims(places * HEAD_DIM, -1) + dims,
                mask=tl.expand_dims(mask, -1) & (dims < HEAD_DIM),
                other=0.0,
                cache_modifier=".cg",
            )
            raised = tl.maximum(highest, tl.max(logs, 0))
            decay = tl.exp2(highest - raised)
            weights = tl.exp2(logs - raised[None, :])
            total = total * decay + tl.sum(weights, 0)
            acc = acc * decay[:, None] + tl.sum(outputs * tl.expand_dims(weights, -1), 0)
            highest = raised
        mask = real[:, None] & (dims < HEAD_DIM)[None, :]
        joined = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + rows[:, None] * HEAD_DIM + dims[None, :], joined, mask=mask)
