"""The bookkeeping of slots: the kernels do what their references do, padding rows and all."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from kernels.cuda.step_state import (
    begin_decode_triton,
    end_decode_triton,
    end_step_triton,
    join_slots_triton,
    receive_decode_triton,
    scatter_triton,
)
from kernels.step_state import (
    JOIN_COLUMNS,
    KNOBS,
    DecodeInputs,
    HostRing,
    SlotRows,
    begin_decode_reference,
    end_decode_reference,
    end_step_reference,
    join_slots_reference,
    receive_decode_reference,
    scatter_reference,
)

NUM_SLOTS = 9


def make_rows(seed: int, num_slots: int = NUM_SLOTS) -> SlotRows:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, below: int = 60, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(0, below, shape, generator=generator, dtype=dtype)

    return SlotRows(
        num_computed=draw(num_slots),
        last_token=draw(num_slots, dtype=torch.int64),
        block_tables=draw(num_slots, 5, below=1 << 30),
        positions=draw(num_slots),
        streams=draw(num_slots, 2),
        top_k=draw(num_slots),
        knobs=torch.rand(num_slots, 6, generator=generator),
    )


def make_inputs(count: int) -> DecodeInputs:
    ids, positions, slots = (torch.full((count,), -7) for _ in range(3))
    return DecodeInputs(ids, positions, slots, torch.full((count,), -7, dtype=torch.int32))


def assert_equal(expected: object, actual: object) -> None:
    for field in fields(expected):  # type: ignore[arg-type]
        assert torch.equal(getattr(expected, field.name), getattr(actual, field.name)), field.name


@pytest.mark.parametrize("entering", [False, True])
@pytest.mark.parametrize("slots", [[3], [0, 5, 2, 7], [4, 8, 8, 8], [8] * 3])
def test_begin_decode(slots: list[int], entering: bool) -> None:
    """
    Tokens, positions and cache slots are looked up; the last slot's rows write nothing.
    """
    expected, actual = make_rows(1), make_rows(1)
    want, got = make_inputs(len(slots)), make_inputs(len(slots))
    index, fresh = torch.tensor(slots, dtype=torch.int32), torch.arange(70, 70 + len(slots), dtype=torch.int32)
    if entering:
        for rows in (expected, actual):
            # the row of padding, too
            rows.num_computed[[0, 4, 7, 8]] = torch.tensor([0, 16, 48, 32], dtype=torch.int32)

    begin_decode_reference(expected, index, fresh, want, 16)
    begin_decode_triton(actual, index, fresh, got, 16)

    assert_equal(want, got)
    assert_equal(expected, actual)
    assert [slot == NUM_SLOTS - 1 for slot in slots] == (got.slot_mapping == -1).tolist()


def test_the_first_token_of_a_block_brings_the_block() -> None:
    """
    It is noted in the table and written to; in the middle of a block the table alone counts.
    """
    rows, inputs = make_rows(1), make_inputs(3)
    rows.num_computed[[2, 6, 8]] = torch.tensor([32, 33, 0], dtype=torch.int32)
    tables = rows.block_tables.clone()
    tables[2, 2] = 70
    index, fresh = torch.tensor([2, 6, 8], dtype=torch.int32), torch.tensor([70, 71, 72], dtype=torch.int32)

    begin_decode_triton(rows, index, fresh, inputs, 16)

    assert torch.equal(tables, rows.block_tables)
    assert [70 * 16, int(tables[6, 2]) * 16 + 1, -1] == inputs.slot_mapping.tolist()
    assert [33, 34, 0] == rows.num_computed[index.long()].tolist()


def test_end_step() -> None:
    """
    A row that failed gets token 0; positions advance.
    """
    expected, actual = make_rows(2), make_rows(2)
    slots, tokens = torch.tensor([6, 1, 3], dtype=torch.int32), torch.tensor([150_000, -1, 7])

    end_step_reference(expected, slots, tokens)
    end_step_triton(actual, slots, tokens)

    assert_equal(expected, actual)
    assert [150_000, 0, 7] == actual.last_token[slots.long()].tolist()


def test_join_slots() -> None:
    """
    Integers and the bits of floats reach their tensors.
    """
    expected, actual = make_rows(3), make_rows(3)
    random = np.random.default_rng(0)
    joins = random.integers(-(2**31), 2**31, (2, JOIN_COLUMNS), dtype=np.int64).astype(np.int32)
    joins[:, 0] = [7, 2]
    joins[:, KNOBS:] = random.random((2, 6), dtype=np.float32).view(np.int32)

    join_slots_reference(expected, torch.from_numpy(joins))
    join_slots_triton(actual, torch.from_numpy(joins))

    assert_equal(expected, actual)


@pytest.mark.parametrize("count", [1, 7, 300])
def test_scatter(count: int) -> None:
    """
    More places than a program has lanes, too.
    """
    target = torch.zeros(20, 31, dtype=torch.int32)
    places = torch.randperm(target.numel(), generator=torch.Generator().manual_seed(count))[:count].int()
    values = torch.arange(1, count + 1, dtype=torch.int32)
    expected = target.clone()

    scatter_reference(expected, places, values)
    scatter_triton(target, places, values)

    assert torch.equal(expected, target)


def make_ring(numbers: torch.Tensor, place: int) -> HostRing:
    depth, length = numbers.shape
    return HostRing(
        # rows of the ring are no neighbours in memory
        numbers=torch.cat([numbers, torch.full_like(numbers, -5)], dim=1)[:, :length],
        token_ids=torch.full((depth, length), -9)[:, : length // 2],
        places=torch.tensor([place, -1], dtype=torch.int32),
    )


@pytest.mark.parametrize("num_rows", [1, 7, 300, 513])
def test_steps_take_their_turn_in_the_ring(num_rows: int) -> None:
    """
    Two turns and a half, from another place than the first; more rows than a program has, and programs run one after
    the other: none may see what another has advanced. Of padding no token comes back.
    """
    generator = torch.Generator().manual_seed(num_rows)
    expected, actual = make_rows(1, num_slots=num_rows + 3), make_rows(1, num_slots=num_rows + 3)
    slots = torch.stack([torch.randperm(num_rows + 2, generator=generator)[:num_rows] for _ in range(4)])
    slots[:, num_rows - num_rows // 3 :] = num_rows + 2
    fresh = torch.randint(0, 1 << 30, (4, num_rows), generator=generator)
    numbers = torch.cat([slots, fresh], dim=1).int()
    rings = make_ring(numbers, 2), make_ring(numbers, 2)
    received = torch.zeros(2, num_rows, dtype=torch.int32)
    for step in range(10):
        inputs = make_inputs(num_rows), make_inputs(num_rows)
        options = {"fresh_start": num_rows, "block_size": 16}
        receive_decode_reference(rings[0], expected, received[0], inputs[0], **options)
        receive_decode_triton(rings[1], actual, received[1], inputs[1], **options)
        assert_equal(inputs[0], inputs[1])
        place = (2 + step) % 4
        assert torch.equal(slots[place].int(), received[1])

        tokens = torch.randint(-1, 150_000, (num_rows,), generator=generator)
        end_decode_reference(rings[0], expected, received[0], tokens)
        end_decode_triton(rings[1], actual, received[1], tokens)
        assert_equal(rings[0], rings[1])
        assert_equal(expected, actual)
        real = num_rows - num_rows // 3
        assert torch.equal(tokens[:real], rings[1].token_ids[place, :real])
        assert torch.all(rings[1].token_ids[place, real:] == -9)
