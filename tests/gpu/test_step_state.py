"""The bookkeeping of slots on the card, against its references: a thousand rows, random steps."""

import random
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from engine.cuda.transfer import CudaEvent, HostBuffers, Transfers
from kernels.cuda.step_state import begin_decode_triton, end_step_triton, join_slots_triton, scatter_triton
from kernels.step_state import (
    JOIN_COLUMNS,
    DecodeInputs,
    SlotRows,
    begin_decode_reference,
    end_decode,
    end_step_reference,
    join_slots_reference,
    receive_decode,
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


class DecodeGraph:
    """
    A step of so many rows that reads and writes the host's ring, as a graph.

    Its tokens are 1,000 for each slot and the tokens that the slot has had, which the device counts. It takes some time
    between, so that the host is ahead.
    """

    def __init__(self, transfers: Transfers, rows: SlotRows, count: int) -> None:
        self._args = transfers, rows, make_inputs(count, "cuda"), transfers.numbers[:count]
        self.run(ends=True)
        self._graphs = {ends: self._captured(ends=ends) for ends in (False, True)}
        torch.cuda.synchronize()

    def replay(self, *, ends: bool) -> None:
        self._graphs[ends].replay()

    def run(self, *, ends: bool) -> None:
        transfers, rows, inputs, slots = self._args
        receive_decode(transfers.ring, rows, slots, inputs, fresh_start=NUM_SLOTS, block_size=16)
        torch.cuda._sleep(200_000)
        if ends:
            end_decode(transfers.ring, rows, slots, 1000 * slots.long() + inputs.seq_lens)

    def _captured(self, *, ends: bool) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run(ends=ends)
        return graph


@pytest.mark.parametrize("count", [1, 40, 1024])
def test_graphs_read_and_write_the_hosts_memory(count: int) -> None:
    """
    Hundreds of steps, each with other slots, launched while those before still run; among them steps that are copied,
    and such whose tokens are. Each step's tokens are those of its own slots, and the device counts along.
    """
    dice, generator = random.Random(count), torch.Generator().manual_seed(count)
    rows = make_rows("cuda")
    transfers = Transfers(torch.device("cuda"), CudaEvent, num_numbers=2 * NUM_SLOTS + 9, num_rows=NUM_SLOTS)
    with transfers.trials(NUM_SLOTS - 1):
        graph = DecodeGraph(transfers, rows, count)
    had = torch.zeros(NUM_SLOTS, dtype=torch.int64)
    tickets: list[tuple[HostBuffers, Tensor]] = []
    for _ in range(400):
        slots = torch.randperm(NUM_SLOTS - 1, generator=generator)[:count]
        numbers = transfers.begin()
        numbers[:count] = slots.numpy()
        numbers[NUM_SLOTS : NUM_SLOTS + count] = 7
        kind = dice.choice(("graph",) * 6 + ("logits", "copied"))
        if kind == "copied":
            transfers.send(NUM_SLOTS)
            transfers.token_ids[:count].copy_(transfers.numbers[:count])
            want = slots
        else:
            had[slots] += 1
            want = 1000 * slots + had[slots]
            transfers.show_place(ends=kind == "graph")
            graph.replay(ends=kind == "graph")
            if kind == "logits":
                transfers.token_ids[:count].copy_(1000 * transfers.numbers[:count].long() + graph._args[2].seq_lens)
        tickets.append((transfers.fetch(), want))
        # two steps are in flight
        if len(tickets) > 2:
            buffers, want = tickets.pop(0)
            assert want.tolist() == buffers.wait()[:count].tolist()

    assert torch.equal(had, rows.num_computed.long().cpu())
