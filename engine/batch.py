"""A step as flat tensors: what the network reads."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.request import Chunk, Step
from kernels.decode_attention import DecodePlan, PagedDecode, plan_decode
from kernels.prefill_attention import PrefillPlan, VarlenPrefill, plan_prefill


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """
    The tokens of a step: those of chunks of one first, then the longer chunks end to end.

    Args:
        input_ids: [num_tokens] int64.
        positions: [num_tokens] int64.
        slot_mapping: [num_tokens] int64, where keys and values go; -1 is nowhere.
        num_decodes: Chunks of one token.
        decode, prefill: By sliding window, how the layers with that window attend the two kinds
            of chunks; empty where there are none.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    num_decodes: int
    decode: Mapping[int | None, DecodePlan | PagedDecode]
    prefill: Mapping[int | None, PrefillPlan | VarlenPrefill]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """
    A step laid out by the host.

    Args:
        first_rows: By place in `Step.chunks`, the chunk's first token in the batch.
        sample_rows: [num_sampling] int64, the last tokens of the sampling chunks in their order.
    """

    forward: ForwardBatch
    first_rows: tuple[int, ...]
    sample_rows: Tensor


def build_batch(
    step: Step,
    *,
    kv_cache: Tensor,
    windows: Set[int | None],
    last_token: Tensor,
    dtype: torch.dtype | None = None,
) -> StepBatch:
    """
    Lay a step's chunks out for a CPU.

    Args:
        step: At least one chunk; every sequence's block table reaches its chunk's end.
        kv_cache: One layer's, for its shape.
        windows: The sliding windows that the layers have.
        last_token: [max_num_seqs] int64, each slot's newest token: read where it is still in flight.
        dtype: Of the activations; None is that of the cache.
    """
    chunks = step.chunks
    # decodes by the length of their sequences, as attention groups them
    order = sorted(range(len(chunks)), key=lambda index: _place(chunks[index]))
    ordered = [chunks[index] for index in order]
    num_decodes = sum(chunk.length == 1 for chunk in chunks)
    lengths = np.array([chunk.length for chunk in ordered])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    tables = _block_tables(ordered)

    block_size = kv_cache.shape[3]
    rows = np.repeat(np.arange(len(ordered)), lengths)
    within = np.arange(starts[-1]) - starts[rows]
    positions = np.array([chunk.start for chunk in ordered])[rows] + within
    slots = tables[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size

    first_rows = np.empty(len(chunks), dtype=np.int64)
    first_rows[order] = starts[:-1]
    sample_rows = [first + chunk.length - 1 for first, chunk in zip(first_rows, chunks, strict=True) if chunk.samples]
    forward = ForwardBatch(
        input_ids=_input_ids(ordered, starts, last_token),
        positions=torch.from_numpy(positions),
        slot_mapping=torch.from_numpy(slots),
        num_decodes=num_decodes,
        decode=_decode_plans(ordered[:num_decodes], tables[:num_decodes], kv_cache, windows, dtype),
        prefill=_prefill_plans(ordered[num_decodes:], tables[num_decodes:], kv_cache, windows, dtype),
    )
    return StepBatch(
        forward,
        first_rows=tuple(first_rows.tolist()),
        sample_rows=torch.tensor(sample_rows, dtype=torch.int64),
    )


def _place(chunk: Chunk) -> tuple[bool, int]:
    return chunk.length > 1, chunk.start


def _block_tables(chunks: Sequence[Chunk]) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    tables = np.zeros((len(chunks), max(len(chunk.sequence.block_table) for chunk in chunks)), dtype=np.int32)
    for row, chunk in zip(tables, chunks, strict=True):
        row[: len(chunk.sequence.block_table)] = chunk.sequence.block_table
    return tables


def _input_ids(chunks: Sequence[Chunk], starts: np.ndarray, last_token: Tensor) -> Tensor:
    ids = np.empty(starts[-1], dtype=np.int64)
    unknown: list[tuple[int, int]] = []
    for chunk, start in zip(chunks, starts.tolist(), strict=False):
        stop = chunk.start + chunk.length
        known = min(stop, chunk.sequence.num_known)
        ids[start : start + known - chunk.start] = chunk.sequence.token_ids(chunk.start, known)
        if known < stop:
            # sampled by a step in flight: only the device knows it
            unknown.append((start + chunk.length - 1, chunk.sequence.slot))
    input_ids = torch.from_numpy(ids)
    if unknown:
        rows, slots = torch.tensor(unknown).T
        input_ids[rows] = last_token[slots]
    return input_ids


def _decode_plans(
    chunks: Sequence[Chunk],
    tables: np.ndarray,
    kv_cache: Tensor,
    windows: Set[int | None],
    dtype: torch.dtype | None,
) -> dict[int | None, DecodePlan]:
    if not chunks:
        return {}
    block_tables = torch.from_numpy(tables)
    seq_lens = torch.tensor([chunk.start + 1 for chunk in chunks], dtype=torch.int32)
    return {window: plan_decode(kv_cache, block_tables, seq_lens, window, dtype) for window in windows}


def _prefill_plans(
    chunks: Sequence[Chunk],
    tables: np.ndarray,
    kv_cache: Tensor,
    windows: Set[int | None],
    dtype: torch.dtype | None,
) -> dict[int | None, PrefillPlan]:
    if not chunks:
        return {}
    block_tables = torch.from_numpy(tables)
    query_start = torch.tensor([0, *(chunk.length for chunk in chunks)], dtype=torch.int32).cumsum(0).int()
    seq_lens = torch.tensor([chunk.start + chunk.length for chunk in chunks], dtype=torch.int32)
    return {window: plan_prefill(kv_cache, block_tables, query_start, seq_lens, window, dtype) for window in windows}
