"""
Attention of one new token per sequence to its paged keys and values.

On a CPU, sequences of as many blocks are attended together: their blocks are gathered into one
workspace that stays in the processor's cache, then one SDPA call reads it. That is faster than
attending to blocks where they lie, even where they lie end to end. What the layers of a step
share is worked out once, in a `DecodePlan`.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

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


def plan_decode(kv_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, window: int | None = None) -> DecodePlan:
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
    """
    block_size = kv_cache.shape[3]
    tables, stops = block_tables.numpy(), seq_lens.numpy().astype(np.int64)
    starts = np.maximum(stops - window, 0) if window else np.zeros_like(stops)
    first_blocks = starts // block_size
    widths = -(-stops // block_size) - first_blocks
    order = np.argsort(widths, kind="stable")

    members = _split(widths[order], block_size, kv_cache)
    largest = max((stop - start) * int(widths[order[start]]) for start, stop in members)
    # one workspace for all: what a group has read is overwritten by the next while it is still hot
    workspace = kv_cache.new_empty(2 * largest, kv_cache[0, 0].numel())
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


def decode_attention(query: Tensor, kv_cache: Tensor, plan: DecodePlan, scale: float) -> Tensor:
    """
    Attend each sequence's newest token to its cached keys, its own among them.

    Args:
        query: [num_seqs, num_heads, head_dim].
        kv_cache: [2, num_blocks, num_kv_heads, block_size, head_dim]; on a CPU a view of
            memory in the order [2, num_blocks, block_size, num_kv_heads, head_dim].
        plan: `plan_decode` of these sequences.
        scale: Multiplies the scores; 1 / sqrt(head_dim) as a rule.

    Returns:
        [num_seqs, num_heads, head_dim], the dtype of `query`.

    Source: Kwon et al. 2023, arXiv:2309.06180, section 4.3.
    """
    return decode_attention_reference(query, kv_cache, plan, scale)


def decode_attention_reference(query: Tensor, kv_cache: Tensor, plan: DecodePlan, scale: float) -> Tensor:
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
        torch.index_select(cache_rows, 0, group.rows, out=group.gathered)
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


def _split(widths: NDArray[np.int64], block_size: int, kv_cache: Tensor) -> list[tuple[int, int]]:
    """Cut sorted widths into runs of equal ones whose keys and values fit the workspace."""
    slot_bytes = 2 * kv_cache.element_size() * kv_cache.shape[2] * kv_cache.shape[4]
    runs = []
    start = 0
    while start < len(widths):
        fits = max(1, WORKSPACE_BYTES // (int(widths[start]) * block_size * slot_bytes))
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
    mask = torch.zeros(visible.shape, dtype=kv_cache.dtype).masked_fill_(torch.from_numpy(~visible), float("-inf"))
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
