"""The rows of slots, read and written by small kernels: a step's bookkeeping without the host."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda.launching import start_kernel
from kernels.step_state import JOIN_COLUMNS, DecodeInputs, HostRing, SlotRows

_BLOCK = 256
# a thread for each row: two rows of one would ask for the same piece of the host's memory twice
RING_WARPS = _BLOCK // 32


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
    slot = tl.load(slots + row, mask=inside, other=0)
    fresh = tl.load(fresh_blocks + row, mask=inside, other=0)
    _begin_rows(
        row,
        inside,
        slot.to(tl.int64),
        fresh,
        num_computed,
        last_token,
        block_tables,
        input_ids,
        positions,
        slot_mapping,
        seq_lens,
        num_slots,
        max_blocks,
        BLOCK_SIZE,
    )


@triton.jit(do_not_specialize=["row_stride", "fresh_start", "num_rows", "num_slots", "max_blocks"])
def _receive_decode(
    ring_numbers,
    places,
    slots,
    num_computed,
    last_token,
    block_tables,
    input_ids,
    positions,
    slot_mapping,
    seq_lens,
    row_stride,
    fresh_start,
    num_rows,
    num_slots,
    max_blocks,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    turn = tl.load(places)
    numbers = ring_numbers + turn.to(tl.int64) * row_stride
    # from the host's memory, which no cache may answer for (".cv" would say it, but the compiler drops it); both before
    # either is needed, as each takes a microsecond
    slot = tl.load(numbers + row, mask=inside, other=0, volatile=True)
    fresh = tl.load(numbers + fresh_start + row, mask=inside, other=0, volatile=True)
    tl.store(slots + row, slot, mask=inside)
    if tl.program_id(0) == 0:
        tl.store(places + 1, turn)
    _begin_rows(
        row,
        inside,
        slot.to(tl.int64),
        fresh,
        num_computed,
        last_token,
        block_tables,
        input_ids,
        positions,
        slot_mapping,
        seq_lens,
        num_slots,
        max_blocks,
        BLOCK_SIZE,
    )


@triton.jit
def _begin_rows(
    row,
    inside,
    slot,
    fresh,
    num_computed,
    last_token,
    block_tables,
    input_ids,
    positions,
    slot_mapping,
    seq_lens,
    num_slots,
    max_blocks,
    BLOCK_SIZE: tl.constexpr,
):
    # the last slot belongs to padding
    real = inside & (slot < num_slots - 1)
    place = tl.load(num_computed + slot, mask=real, other=0)
    entry = block_tables + slot * max_blocks + place // BLOCK_SIZE
    enters = real & (place % BLOCK_SIZE == 0)
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
    _end_rows(slot, real, token, last_token, positions)


@triton.jit(do_not_specialize=["row_stride", "num_rows", "num_slots", "depth"])
def _end_decode(
    ring_token_ids,
    places,
    slots,
    token_ids,
    last_token,
    positions,
    row_stride,
    num_rows,
    num_slots,
    depth,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    turn = tl.load(places + 1)
    slot = tl.load(slots + row, mask=inside, other=0).to(tl.int64)
    real = inside & (slot < num_slots - 1)
    token = tl.load(token_ids + row, mask=real, other=0)
    # on its way to the host while the rest is done
    tl.store(ring_token_ids + turn.to(tl.int64) * row_stride + row, token, mask=real, cache_modifier=".wt")
    if tl.program_id(0) == 0:
        tl.store(places, (turn + 1) % depth)
    _end_rows(slot, real, token, last_token, positions)


@triton.jit
def _end_rows(slot, real, token, last_token, positions):
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


def receive_decode_triton(
    ring: HostRing, rows: SlotRows, slots: Tensor, inputs: DecodeInputs, *, fresh_start: int, block_size: int
) -> None:
    num_rows = len(slots)
    start_kernel(
        _receive_decode,
        (-(-num_rows // _BLOCK),),
        ring.numbers,
        ring.places,
        slots,
        rows.num_computed,
        rows.last_token,
        rows.block_tables,
        inputs.input_ids,
        inputs.positions,
        inputs.slot_mapping,
        inputs.seq_lens,
        ring.numbers.stride(0),
        fresh_start,
        num_rows,
        len(rows.num_computed),
        rows.block_tables.shape[1],
        BLOCK_SIZE=block_size,
        BLOCK=_BLOCK,
        num_warps=RING_WARPS,
    )


def end_decode_triton(ring: HostRing, rows: SlotRows, slots: Tensor, token_ids: Tensor) -> None:
    num_rows = len(slots)
    start_kernel(
        _end_decode,
        (-(-num_rows // _BLOCK),),
        ring.token_ids,
        ring.places,
        slots,
        token_ids,
        rows.last_token,
        rows.positions,
        ring.token_ids.stride(0),
        num_rows,
        len(rows.num_computed),
        len(ring.token_ids),
        BLOCK=_BLOCK,
        num_warps=RING_WARPS,
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
