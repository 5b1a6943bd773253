"""The ring of host memory that decode steps read and write: the references, which stand in for kernels on a CPU."""

import torch
from torch import Tensor

from kernels.step_state import DecodeInputs, HostRing, SlotRows, end_decode, receive_decode

NUM_SLOTS, BLOCK_SIZE = 4, 2


def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


def make_rows() -> SlotRows:
    return SlotRows(
        num_computed=zeros(NUM_SLOTS),
        last_token=zeros(NUM_SLOTS, dtype=torch.int64),
        block_tables=zeros(NUM_SLOTS, 3),
        positions=zeros(NUM_SLOTS),
        streams=zeros(NUM_SLOTS, 2),
        top_k=zeros(NUM_SLOTS),
        knobs=zeros(NUM_SLOTS, 6, dtype=torch.float32),
    )


def test_a_step_has_the_row_whose_turn_it_is() -> None:
    """
    Slots come from its beginning, new blocks from behind them, and its tokens go to the row of the same place; then it
    is the next row's turn, behind the last the first's. A token that failed is -1 to the host.
    """
    rows, slots = make_rows(), zeros(2)
    inputs = DecodeInputs(*(zeros(2, dtype=torch.int64) for _ in range(3)), zeros(2))
    ring = HostRing(
        numbers=torch.tensor([[0, 1, 70, 71], [9, 9, 9, 9], [2, NUM_SLOTS - 1, 72, 73]], dtype=torch.int32),
        token_ids=torch.full((3, 2), -9),
        places=torch.tensor([2, 0], dtype=torch.int32),
    )

    read, places = [], []
    for tokens in ([500, 501], [-1, 601]):
        receive_decode(ring, rows, slots, inputs, fresh_start=2, block_size=BLOCK_SIZE)
        read.append((slots.tolist(), inputs.slot_mapping.tolist()))
        places.append(ring.places.tolist())
        end_decode(ring, rows, slots, torch.tensor(tokens))

    assert [([2, 3], [72 * BLOCK_SIZE, -1]), ([0, 1], [70 * BLOCK_SIZE, 71 * BLOCK_SIZE])] == read
    assert [[2, 2], [0, 0]] == places
    assert [1, 0] == ring.places.tolist()
    assert [[-1, 601], [-9, -9], [500, -9]] == ring.token_ids.tolist()
    assert [0, 601, 500, 0] == rows.last_token.tolist()
    assert [1, 1, 1, 0] == rows.num_computed.tolist() == rows.positions.tolist()
