"""
What a step reads from and writes to the rows that sequences hold on a device, their slots.

The host sends a step as a few int32 numbers a sequence; tokens, positions and block tables stay
on the device between steps. Slot rows past the last sequence are for the padding of a batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# columns of a joining sequence's row, all int32; the last six are the bits of float32 knobs
SLOT, NUM_COMPUTED, LAST_TOKEN, POSITION, STREAM_LOW, STREAM_HIGH, TOP_K, KNOBS = range(8)
JOIN_COLUMNS = KNOBS + 6


@dataclass(frozen=True, slots=True)
class SlotRows:
    """
    Tensors with a row a slot.

    Args:
        num_computed: [num_slots] int32, tokens whose keys and values are in the cache or on their way.
        last_token: [num_slots] int64, each sequence's newest token.
        block_tables: [num_slots, max_blocks] int32; 0, the null block, past the end.
        positions: [num_slots] int32, place in its answer of the token to be sampled next.
        streams: [num_slots, 2] int32, names of random streams.
        top_k: [num_slots] int32.
        knobs: [num_slots, 6] float32.
    """

    num_computed: Tensor
    last_token: Tensor
    block_tables: Tensor
    positions: Tensor
    streams: Tensor
    top_k: Tensor
    knobs: Tensor


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """
    What the network reads of a batch of decodes, one row a sequence.

    Args:
        input_ids, positions, slot_mapping: [num_rows] int64.
        seq_lens: [num_rows] int32, the new token included.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    seq_lens: Tensor

    def rows(self, stop: int) -> "DecodeInputs":
        """The first rows, of the same memory."""
        return DecodeInputs(
            self.input_ids[:stop], self.positions[:stop], self.slot_mapping[:stop], self.seq_lens[:stop]
        )


@dataclass(frozen=True, slots=True)
class HostRing:
    """
    Host memory that the device reads decode steps from, and writes their tokens to, without a copy being queued.

    A row of it is one step's, and steps take the rows in turn. Which is whose the device keeps by itself: a graph
    is the same at every step, so nobody could tell it.

    Args:
        numbers: [depth, num_numbers] int32, pinned where there is a GPU; the host's until a step is queued.
        token_ids: [depth, num_rows] int64, alike; right once the step's last kernel has ended.
        places: [2] int32 on the device: the row of the step that begins next, and of the one that runs. A step's
            first kernel reads the one and writes the other, its last does the reverse: no program reads what
            another of its kernel writes.
    """

    numbers: Tensor
    token_ids: Tensor
    places: Tensor


def scatter(target: Tensor, places: Tensor, values: Tensor) -> None:
    """
    Write int32 values to places of a tensor.

    Args:
        target: int32, contiguous, of any shape.
        places: [n] int32 in the order of its memory, all different.
        values: [n] int32.
    """
    if target.is_cuda:
        from kernels.cuda.step_state import scatter_triton

        scatter_triton(target, places, values)
    else:
        scatter_reference(target, places, values)


def join_slots(rows: SlotRows, joins: Tensor) -> None:
    """
    Give slots to new sequences.

    Args:
        joins: [n, JOIN_COLUMNS] int32, each slot once.
    """
    if joins.is_cuda:
        from kernels.cuda.step_state import join_slots_triton

        join_slots_triton(rows, joins)
    else:
        join_slots_reference(rows, joins)


def begin_decode(rows: SlotRows, slots: Tensor, fresh_blocks: Tensor, inputs: DecodeInputs, block_size: int) -> None:
    """
    Look up what each sequence computes next, and count it as computed.

    The first token of a block brings the block with it, which is noted in the sequence's table.

    The last slot is nobody's: its rows, the padding of a batch, write no keys and no values, and
    attend to one token of the null block.

    Args:
        slots: [num_rows] int32, no slot twice but the last.
        fresh_blocks: [num_rows] int32, read only where a row's token is the first of a block.
        inputs: Filled in; of as many rows.
    """
    if slots.is_cuda:
        from kernels.cuda.step_state import begin_decode_triton

        begin_decode_triton(rows, slots, fresh_blocks, inputs, block_size)
    else:
        begin_decode_reference(rows, slots, fresh_blocks, inputs, block_size)


def receive_decode(
    ring: HostRing, rows: SlotRows, slots: Tensor, inputs: DecodeInputs, *, fresh_start: int, block_size: int
) -> None:
    """
    As `begin_decode`, of the step whose turn it is in the ring.

    Args:
        slots: Filled in, from the first numbers of the ring's row on.
        fresh_start: Where in the ring's row the fresh blocks begin.
    """
    if slots.is_cuda:
        from kernels.cuda.step_state import receive_decode_triton

        receive_decode_triton(ring, rows, slots, inputs, fresh_start=fresh_start, block_size=block_size)
    else:
        receive_decode_reference(ring, rows, slots, inputs, fresh_start=fresh_start, block_size=block_size)


def end_decode(ring: HostRing, rows: SlotRows, slots: Tensor, token_ids: Tensor) -> None:
    """
    As `end_step`, of a step that `receive_decode` began; its tokens go to the ring, and the next row's turn comes.

    Where a row is padding the ring stays as it was.
    """
    if slots.is_cuda:
        from kernels.cuda.step_state import end_decode_triton

        end_decode_triton(ring, rows, slots, token_ids)
    else:
        end_decode_reference(ring, rows, slots, token_ids)


def end_step(rows: SlotRows, slots: Tensor, token_ids: Tensor) -> None:
    """
    Note the token that each slot just sampled.

    Args:
        slots: [num_rows] int32, no slot twice but the last.
        token_ids: [num_rows] int64; -1 where the row failed, whose next step may run already: it gets token 0.
    """
    if slots.is_cuda:
        from kernels.cuda.step_state import end_step_triton

        end_step_triton(rows, slots, token_ids)
    else:
        end_step_reference(rows, slots, token_ids)


def scatter_reference(target: Tensor, places: Tensor, values: Tensor) -> None:
    target.view(-1)[places.long()] = values


def join_slots_reference(rows: SlotRows, joins: Tensor) -> None:
    slots = joins[:, SLOT].long()
    rows.num_computed[slots] = joins[:, NUM_COMPUTED]
    rows.last_token[slots] = joins[:, LAST_TOKEN].long()
    rows.positions[slots] = joins[:, POSITION]
    rows.streams[slots] = joins[:, STREAM_LOW : STREAM_HIGH + 1]
    rows.top_k[slots] = joins[:, TOP_K]
    rows.knobs[slots] = joins[:, KNOBS:].contiguous().view(torch.float32)


def begin_decode_reference(
    rows: SlotRows, slots: Tensor, fresh_blocks: Tensor, inputs: DecodeInputs, block_size: int
) -> None:
    index = slots.long()
    real = index < len(rows.num_computed) - 1
    places = torch.where(real, rows.num_computed[index], 0).long()
    enters = real & (places % block_size == 0)
    rows.block_tables[index[enters], places[enters] // block_size] = fresh_blocks[enters]
    blocks = rows.block_tables[index, places // block_size].long()
    inputs.input_ids.copy_(torch.where(real, rows.last_token[index], 0))
    inputs.positions.copy_(places)
    inputs.slot_mapping.copy_(torch.where(real, blocks * block_size + places % block_size, -1))
    inputs.seq_lens.copy_(places + 1)
    rows.num_computed[index[real]] += 1


def end_step_reference(rows: SlotRows, slots: Tensor, token_ids: Tensor) -> None:
    index = slots.long()
    real = index < len(rows.num_computed) - 1
    rows.last_token[index[real]] = token_ids[real].clamp(min=0)
    rows.positions[index[real]] += 1


def receive_decode_reference(
    ring: HostRing, rows: SlotRows, slots: Tensor, inputs: DecodeInputs, *, fresh_start: int, block_size: int
) -> None:
    ring.places[1] = ring.places[0]
    numbers = ring.numbers[int(ring.places[0])]
    slots.copy_(numbers[: len(slots)])
    begin_decode_reference(rows, slots, numbers[fresh_start : fresh_start + len(slots)], inputs, block_size)


def end_decode_reference(ring: HostRing, rows: SlotRows, slots: Tensor, token_ids: Tensor) -> None:
    place = int(ring.places[1])
    real = slots < len(rows.num_computed) - 1
    ring.token_ids[place, : len(slots)][real] = token_ids[real]
    end_step_reference(rows, slots, token_ids)
    ring.places[0] = (place + 1) % len(ring.token_ids)
