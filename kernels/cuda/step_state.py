"""The rows of slots, read and written by small kernels: a step's bookkeeping without the host."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda.launching import start_kernel
from kernels.step_state import JOIN_COLUMNS, DecodeInputs, SlotRows

_BLOCK = 256


@triton.jit(do_not_specialize=["count"])
def _scatter(target, places, values, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    place = tl.load(places + index, mask=inside, other=0).to(tl.int64)
    tl.store(target + place, tl.load(values + index, mask=inside, other=0), mask=inside)


@triton.jit
def _join_slots(joins, num_computed, last_token, positions, streams, top_k, knobs, COLUMNS: tl.constexpr):
    row = joins + tl.program_id(0) * COLUMNS
    slot = tl.load(row).to(tl.int64)
    tl.store(num_computed + slot, tl.load(row + 1))
    tl.store(last_token + slot, tl.load(row + 2).to(tl.int64))
    tl.store(positions + slot, tl.load(row + 3))
    tl.store(streams + slot * 2, tl.load(row + 4))
    tl.store(streams + slot * 2 + 1, tl.load(row + 5))
    tl.store(top_k + slot, tl.load(row + 6))
    for knob in tl.static_range(6):
        tl.store(knobs + slot * 6 + knob, tl.load(row + 7 + knob).to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["num_rows", "num_slots", "max_blocks"])
def _begin_decode(
    slots,
    fresh_blocks,
    num_computed,
    last_token,
    block_tables,
    input_ids,
    positions,
    slot_mapping,
    seq_lens,
    num_rows,
    num_slots,
    max_blocks,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    slot = tl.load(slots + row, mask=inside, other=0).to(tl.int64)
    # the last slot belongs to padding
    real = inside & (slot < num_slots - 1)
    place = tl.load(num_computed + slot, mask=real, other=0)
    entry = block_tables + slot * max_blocks + place // BLOCK_SIZE
    enters = real & (place % BLOCK_SIZE == 0)
    fresh = tl.load(fresh_blocks + row, mask=enters, other=0)
    tl.store(entry, fresh, mask=enters)
    # not loaded where it was just stored: nothing orders the two
    known = tl.load(entry, mask=real & (place % BLOCK_SIZE != 0), other=0)
    block = tl.where(enters, fresh, known).to(tl.int64)
    token = tl.load(last_token + slot, mask=real, other=0)
    tl.store(input_ids + row, token, mask=inside)
    tl.store(positions + row, place.to(tl.int64), mask=inside)
    tl.store(slot_mapping + row, tl.where(real, block * BLOCK_SIZE + place % BLOCK_SIZE, -1), mask=inside)
    tl.store(seq_lens + row, place + 1, mask=inside)
    tl.store(num_computed + slot, place + 1, mask=real)


@triton.jit(do_not_specialize=["num_rows", "num_slots"])
def _end_step(slots, token_ids, last_token, positions, num_rows, num_slots, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    slot = tl.load(slots + row, mask=inside, other=0).to(tl.int64)
    real = inside & (slot < num_slots - 1)
    token = tl.load(token_ids + row, mask=real, other=0)
    tl.store(last_token + slot, tl.maximum(token, 0), mask=real)
    tl.store(positions + slot, tl.load(positions + slot, mask=real, other=0) + 1, mask=real)


def scatter_triton(target: Tensor, places: Tensor, values: Tensor) -> None:
    count = len(places)
    start_kernel(_scatter, (-(-count // _BLOCK),), target, places, values, count, BLOCK=_BLOCK)


def join_slots_triton(rows: SlotRows, joins: Tensor) -> None:
    start_kernel(
        _join_slots,
        (len(joins),),
        joins,
        rows.num_computed,
        rows.last_token,
        rows.positions,
        rows.streams,
        rows.top_k,
        rows.knobs,
        COLUMNS=JOIN_COLUMNS,
        num_warps=1,
    )


def begin_decode_triton(
    rows: SlotRows, slots: Tensor, fresh_blocks: Tensor, inputs: DecodeInputs, block_size: int
) -> None:
    num_rows = len(slots)
    start_kernel(
        _begin_decode,
        (-(-num_rows // _BLOCK),),
        slots,
        fresh_blocks,
        rows.num_computed,
        rows.last_token,
        rows.block_tables,
        inputs.input_ids,
        inputs.positions,
        inputs.slot_mapping,
        inputs.seq_lens,
        num_rows,
        len(rows.num_computed),
        rows.block_tables.shape[1],
        BLOCK_SIZE=block_size,
        BLOCK=_BLOCK,
    )


def end_step_triton(rows: SlotRows, slots: Tensor, token_ids: Tensor) -> None:
    num_rows = len(slots)
    start_kernel(
        _end_step,
        (-(-num_rows // _BLOCK),),
        slots,
        token_ids,
        rows.last_token,
        rows.positions,
        num_rows,
        len(rows.num_computed),
        BLOCK=_BLOCK,
    )
