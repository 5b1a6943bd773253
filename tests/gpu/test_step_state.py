"""The bookkeeping of slots on the card, against its references: a thousand rows, random steps."""

from dataclasses import fields

import torch
from torch import Tensor

from kernels.cuda.step_state import begin_decode_triton, end_step_triton, join_slots_triton, scatter_triton
from kernels.step_state import (
    JOIN_COLUMNS,
    DecodeInputs,
    SlotRows,
    begin_decode_reference,
    end_step_reference,
    join_slots_reference,
    scatter_reference,
)

NUM_SLOTS, MAX_BLOCKS = 1025, 64


def make_rows(device: str) -> SlotRows:
    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    return SlotRows(
        num_computed=zeros(NUM_SLOTS),
        last_token=zeros(NUM_SLOTS, dtype=torch.int64),
        block_tables=zeros(NUM_SLOTS, MAX_BLOCKS),
        positions=zeros(NUM_SLOTS),
        streams=zeros(NUM_SLOTS, 2),
        top_k=zeros(NUM_SLOTS),
        knobs=zeros(NUM_SLOTS, 6, dtype=torch.float32),
    )


def make_inputs(count: int, device: str) -> DecodeInputs:
    ids, positions, slots = (torch.full((count,), -7, device=device) for _ in range(3))
    return DecodeInputs(ids, positions, slots, torch.full((count,), -7, dtype=torch.int32, device=device))


def assert_equal(expected: object, actual: object) -> None:
    for field in fields(expected):  # type: ignore[arg-type]
        assert torch.equal(getattr(expected, field.name), getattr(actual, field.name).cpu()), field.name


def test_random_steps() -> None:
    """
    Joins, new blocks, decodes with padding and sampled tokens, a hundred times over.
    """
    generator = torch.Generator().manual_seed(0)
    expected, actual = make_rows("cpu"), make_rows("cuda")

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    for _ in range(100):
        slots = torch.randperm(NUM_SLOTS - 1, generator=generator)[: int(draw(1, 1025, 1))].int()
        joins = draw(0, 500, len(slots) // 3, JOIN_COLUMNS)
        joins[:, 0] = slots[: len(joins)]
        join_slots_reference(expected, joins)
        join_slots_triton(actual, joins.cuda())
        places = torch.randperm(NUM_SLOTS * MAX_BLOCKS, generator=generator)[:700].int()
        blocks = draw(0, 1 << 30, 700)
        scatter_reference(expected.block_tables, places, blocks)
        scatter_triton(actual.block_tables, places.cuda(), blocks.cuda())

        padded = torch.cat([slots, torch.full((int(draw(1, 9, 1)),), NUM_SLOTS - 1, dtype=torch.int32)])
        fresh = draw(0, 1 << 30, len(padded))
        want, got = make_inputs(len(padded), "cpu"), make_inputs(len(padded), "cuda")
        begin_decode_reference(expected, padded, fresh, want, 16)
        begin_decode_triton(actual, padded.cuda(), fresh.cuda(), got, 16)
        assert_equal(want, got)
        tokens = draw(-1, 150_000, len(padded)).long()
        end_step_reference(expected, padded, tokens)
        end_step_triton(actual, padded.cuda(), tokens.cuda())
        assert_equal(expected, actual)
        # tables of 64 blocks of 16 hold 1,024 tokens
        expected.num_computed.clamp_(max=900)
        actual.num_computed.clamp_(max=900)
