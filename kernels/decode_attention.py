"""
Attention of one new token per sequence to its paged keys and values.

On a CPU, sequences of as many blocks are attended together: their blocks are gathered into one
workspace that stays in the processor's cache, then one SDPA call reads it. That is faster than
attending to blocks where they lie, even where they lie end to end. What the layers of a step
share is worked out once, in a `DecodePlan`.

On a GPU a kernel reads the blocks where they lie, and what is long beside the whole batch is cut into
parts (`kernels.decode_parts`). What the layers share is a `PagedDecode`, whose tensors stay in place, so
that a captured graph can be replayed for other sequences.
"""

import math
from dataclasses import dataclass
from typing import overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from kernels.cascade_attention import ROW_TOKENS, Cascade, attend_prefixes
from kernels.decode_parts import DecodeParts
from kernels.fp8_kv import as_bytes, dequantise_kv
from kernels.gather_kv import cached_tokens

# keys and values of one group: half of a core's share of the processor's cache
WORKSPACE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """
    Sequences that one call attends.

    Args:
        start, stop: Their places in the order of the plan.
        rows: [2 * num_seqs * num_blocks] int64, their key blocks, then their value blocks, as
            rows of a layer's cache seen as [2 * num_blocks, block_size * num_kv_heads * head_dim].
        mask: [num_seqs, 1, 1, num_slots], 0 where a key is visible, else -inf.
        hidden: int64, the slots of the workspace whose keys or values nobody may see.
        gathered: The workspace as `rows` fill it.
        tokens: The same memory, a slot a row.
        keys, values: The same memory as SDPA reads it, [num_seqs, num_kv_heads, num_slots, head_dim].
    """

    start: int
    stop: int
    rows: Tensor
    mask: Tensor
    hidden: Tensor
    gathered: Tensor
    tokens: Tensor
    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """
    What all layers of a step with one window share.

    Args:
        block_tables, seq_lens, window: As `plan_decode` got them.
        order: [num_seqs] int64, the sequences by number of blocks, and its inverse; None where they came so.
    """

    block_tables: Tensor
    seq_lens: Tensor
    window: int | None
    order: tuple[Tensor, Tensor] | None
    groups: tuple[DecodeGroup, ...]


@dataclass(frozen=True, slots=True)
class PagedDecode:
    """
    What all layers of a step with one window share on a GPU.

    Args:
        block_tables: [num_slots, max_blocks] int32; 0, the null block, past the end.
        slots: [num_seqs] int32, each sequence's row of `block_tables`.
        seq_lens: [num_seqs] int32, tokens in the cache, the newest among them; 0 gives zeros.
        window: The token at i sees j where i - window < j <= i; None is all up to i.
        parts: How long sequences are cut, by `cut_sequences` of these lengths; None where none is.
        cascade: Prefixes that are attended first, each for all sequences that share it; without a window alone.
    """

    block_tables: Tensor
    slots: Tensor
    seq_lens: Tensor
    window: int | None
    parts: DecodeParts | None
    cascade: Cascade | None = None


def plan_decode(
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    window: int | None = None,
    dtype: torch.dtype | None = None,
) -> DecodePlan:
    """
    Group the sequences of a step for `decode_attention`.

    Only sequences of as many blocks are grouped, so that a sequence's result has the same bits
    whatever other sequences are there; padding to common lengths gains nothing over it. Sequences
    in the order of their lengths save a sort in every layer.

    Args:
        kv_cache: That of any layer.
        block_tables: [num_seqs, max_blocks] int32; 0, the null block, past the end.
        seq_lens: [num_seqs] int32, tokens in the cache, the newest among them.
        window: The token at i sees j where i - window < j <= i; None is all up to i.
        dtype: What is computed in; None is that of the cache, which with scales it is not.
    """
    block_size, dtype = kv_cache.shape[3], dtype or kv_cache.dtype
    tables, stops = block_tables.numpy(), seq_lens.numpy().astype(np.int64)
    starts = np.maximum(stops - window, 0) if window else np.zeros_like(stops)
    first_blocks = starts // block_size
    widths = -(-stops // block_size) - first_blocks
    order = np.argsort(widths, kind="stable")

    members = _split(widths[order], 2 * block_size * kv_cache.shape[2] * kv_cache.shape[4] * dtype.itemsize)
    largest = max((stop - start) * int(widths[order[start]]) for start, stop in members)
    # one workspace for all: what a group has read is overwritten by the next while it is still hot
    workspace = kv_cache.new_empty(2 * largest, kv_cache[0, 0].numel(), dtype=dtype)
    groups = []
    for start, stop in members:
        seqs, width = order[start:stop], int(widths[order[start]])
        columns = first_blocks[seqs, None] + np.arange(width)
        blocks = np.take_along_axis(tables[seqs], columns, axis=1)
        slots = columns[:, :1] * block_size + np.arange(width * block_size)
        visible = (slots >= starts[seqs, None]) & (slots < stops[seqs, None])
        groups.append(_group(start, blocks.astype(np.int64), visible, kv_cache, workspace))
    sorting = torch.from_numpy(order)
    came_sorted = bool((order[1:] > order[:-1]).all())
    places = None if came_sorted else (sorting, sorting.argsort())
    return DecodePlan(block_tables, seq_lens, window, places, tuple(groups))


@overload
def decode_attention(
    query: Tensor,
    kv_cache: Tensor,
    plan: DecodePlan,
    scale: float,
    *,
    kv_scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor: ...


@overload
def decode_attention(
    query: Tensor,
    kv_cache: Tensor,
    plan: PagedDecode,
    scale: float,
    *,
    softcap: float = 0.0,
    kv_scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor: ...


def decode_attention(
    query: Tensor,
    kv_cache: Tensor,
    plan: DecodePlan | PagedDecode,
    scale: float,
    *,
    softcap: float = 0.0,
    kv_scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """
    Attend each sequence's newest token to its cached keys, its own among them.

    Args:
        query: [num_seqs, num_heads, head_dim].
        kv_cache: [2, num_blocks, num_kv_heads, block_size, head_dim]; on a CPU a view of
            memory in the order [2, num_blocks, block_size, num_kv_heads, head_dim].
        plan: `plan_decode` of these sequences on a CPU, a `PagedDecode` on a GPU.
        scale: Multiplies the scores; 1 / sqrt(head_dim) as a rule.
        softcap: Scores become softcap * tanh(score / softcap); 0 leaves them. On a GPU.
        kv_scales: [2, num_blocks, num_kv_heads, block_size] float32, what each token's keys and
            values in a float8_e4m3fn cache are multiplied by.
        out: [num_seqs, num_heads, head_dim], contiguous, where the result goes; None makes memory for it.

    Returns:
        [num_seqs, num_heads, head_dim], the dtype of `query`: `out`, where it is given.

    Source: Kwon et al. 2023, arXiv:2309.06180, section 4.3.
    """
    if isinstance(plan, DecodePlan):
        assert softcap == 0.0
        attended = decode_attention_reference(query, kv_cache, plan, scale, kv_scales)
        return attended if out is None else out.copy_(attended)
    if plan.cascade is not None:
        attend_prefixes(query, kv_cache, plan.block_tables, plan.cascade, scale, softcap=softcap, kv_scales=kv_scales)
    if query.is_cuda:
        from kernels.cuda.decode_attention import decode_attention_triton

        return decode_attention_triton(query, kv_cache, plan, scale, softcap=softcap, kv_scales=kv_scales, out=out)
    attended = paged_decode_reference(query, kv_cache, plan, scale, softcap=softcap, kv_scales=kv_scales)
    return attended if out is None else out.copy_(attended)


def paged_decode_reference(
    query: Tensor,
    kv_cache: Tensor,
    plan: PagedDecode,
    scale: float,
    *,
    softcap: float = 0.0,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """One sequence after another, in float64 where the query is, else in float32; `plan.cascade` has been attended."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    group_size = query.shape[1] // kv_cache.shape[2]
    rows = []
    for index, (row, slot, seq_len) in enumerate(
        zip(query.to(dtype), plan.slots.tolist(), plan.seq_lens.tolist(), strict=True)
    ):
        if seq_len == 0:
            rows.append(torch.zeros_like(row))
            continue
        first = max(0, seq_len - (plan.window or seq_len))
        if plan.cascade is not None:
            first = int(plan.cascade.rows[index, ROW_TOKENS])
        positions = torch.arange(first, seq_len, device=query.device)
        keys, values = cached_tokens(kv_cache, kv_scales, plan.block_tables[slot], positions, dtype)
        keys, values = (x.repeat_interleave(group_size, dim=1) for x in (keys, values))
        scores = torch.einsum("hd,thd->ht", row, keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        attended = torch.einsum("ht,thd->hd", scores.softmax(-1), values)
        if plan.cascade is not None:
            attended = _behind_prefix(plan.cascade, index, attended, scores.logsumexp(-1))
        rows.append(attended)
    return torch.stack(rows).to(query.dtype)


def _behind_prefix(cascade: Cascade, row: int, attended: Tensor, lses: Tensor) -> Tensor:
    """
    Join what a row has of its prefix's items with what it has behind them.

    Args:
        attended: [num_heads, head_dim], and `lses`, [num_heads], natural log-sum-exps.
    """
    _, first, count, place = cascade.rows[row].tolist()
    group_size = len(attended) // cascade.layout.num_kv_heads
    items, members = slice(first, first + count), slice(place * group_size, (place + 1) * group_size)
    parts = torch.cat([cascade.outputs[items, :, members].flatten(1, 2), attended[None]])
    logs = torch.cat([cascade.lses[items, :, members].flatten(1) * math.log(2), lses[None]])
    return (parts * logs.softmax(0)[..., None]).sum(0)


def decode_attention_reference(
    query: Tensor, kv_cache: Tensor, plan: DecodePlan, scale: float, kv_scales: Tensor | None = None
) -> Tensor:
    num_seqs, num_heads, head_dim = query.shape
    _, num_blocks, num_kv_heads, block_size, _ = kv_cache.shape
    cache_rows = kv_cache.transpose(2, 3).view(2 * num_blocks, block_size * num_kv_heads * head_dim)

    # the query heads of one KV head become rows of one product; 4, 8, ... rows fill the vector units
    group_size = num_heads // num_kv_heads
    padding = -group_size % 4
    if plan.order is not None:
        query = query.index_select(0, plan.order[0])
    folded = query.view(num_seqs, num_kv_heads, group_size, head_dim)
    if padding:
        folded = F.pad(folded, (0, 0, 0, padding))

    parts = []
    for group in plan.groups:
        if kv_scales is None:
            torch.index_select(cache_rows, 0, group.rows, out=group.gathered)
        else:
            _gather_scaled(cache_rows, kv_scales, group)
        # what was never written may be NaN, and 0 * NaN would reach the sum
        group.tokens.index_fill_(0, group.hidden, 0.0)
        members = folded[group.start : group.stop]
        parts.append(
            F.scaled_dot_product_attention(members, group.keys, group.values, attn_mask=group.mask, scale=scale)
        )
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    if padding:
        out = out[:, :, :group_size]
    out = out.reshape(num_seqs, num_heads, head_dim)
    return out if plan.order is None else out.index_select(0, plan.order[1])


def _gather_scaled(cache_rows: Tensor, kv_scales: Tensor, group: DecodeGroup) -> None:
    """Fill a group's workspace from a cache of eight bits."""
    stored = as_bytes(cache_rows).index_select(0, group.rows).view(cache_rows.dtype)
    # [num_rows, block_size, num_kv_heads], as the memory runs
    scales = kv_scales.transpose(2, 3).flatten(0, 1).index_select(0, group.rows)
    numbers = dequantise_kv(stored.view(*scales.shape, -1), scales, group.gathered.dtype)
    group.gathered.copy_(numbers.flatten(1))


def _split(widths: NDArray[np.int64], block_bytes: int) -> list[tuple[int, int]]:
    """Cut sorted widths into runs of equal ones whose keys and values fit the workspace."""
    runs = []
    start = 0
    while start < len(widths):
        fits = max(1, WORKSPACE_BYTES // (int(widths[start]) * block_bytes))
        stop = min(start + fits, int(np.searchsorted(widths, widths[start], side="right")))
        runs.append((start, stop))
        start = stop
    return runs


def _group(
    start: int, blocks: NDArray[np.int64], visible: NDArray[np.bool_], kv_cache: Tensor, workspace: Tensor
) -> DecodeGroup:
    _, num_blocks, num_kv_heads, _, head_dim = kv_cache.shape
    rows = np.concatenate([blocks.ravel(), blocks.ravel() + num_blocks])
    hidden = np.flatnonzero(~visible)
    mask = torch.zeros(visible.shape, dtype=workspace.dtype).masked_fill_(torch.from_numpy(~visible), float("-inf"))
    gathered = workspace[: len(rows)]
    keys, values = gathered.view(2, *visible.shape, num_kv_heads, head_dim).transpose(2, 3)
    return DecodeGroup(
        start=start,
        stop=start + len(blocks),
        rows=torch.from_numpy(rows),
        mask=mask[:, None, None],
        hidden=torch.from_numpy(np.concatenate([hidden, hidden + visible.size])),
        gathered=gathered,
        tokens=gathered.view(-1, num_kv_heads * head_dim),
        keys=keys,
        values=values,
    )
