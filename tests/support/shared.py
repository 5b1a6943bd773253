"""Sequences of a paged batch that share the blocks of a prefix, and the plan of a pass over it."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch

from kernels.cascade_attention import CascadeLayout, SharedPrefix, pack_prefixes, plan_cascade
from kernels.decode_attention import PagedDecode
from tests.support.paged import PagedBatch


def share(batch: PagedBatch, groups: Iterable[tuple[Sequence[int], int]]) -> list[SharedPrefix]:
    """
    Let rows of a batch have the first one's blocks for so many tokens, which must be whole blocks.

    The first of them is not the row that is named as the owner of the blocks: anyone's table will do.
    """
    block_size = batch.kv_cache.shape[3]
    found = []
    for rows, num_tokens in groups:
        assert num_tokens % block_size == 0
        slots = batch.slots[list(rows)].long()
        count = num_tokens // block_size
        batch.block_tables[slots, :count] = batch.block_tables[slots[0], :count]
        found.append(SharedPrefix(int(slots[-1]), num_tokens, np.array(rows)))
    return found


def cascaded(
    plan: PagedDecode, layout: CascadeLayout, prefixes: Sequence[SharedPrefix], head_dim: int, num_rows: int = 0
) -> PagedDecode:
    """A plan with the pass before it, whose workspace is of NaN; for a graph of `num_rows` where that is given."""
    device = plan.block_tables.device
    numbers = np.zeros(layout.num_numbers, dtype=np.int32)
    pack_prefixes(layout, prefixes, len(plan.seq_lens), numbers)
    rows = layout.max_items(layout.max_rows) * layout.num_kv_heads * layout.tile_rows
    workspace = torch.full((rows * (head_dim + 1),), torch.nan, device=device)
    sent = torch.from_numpy(numbers).to(device)
    return replace(plan, cascade=plan_cascade(layout, sent, workspace, num_rows or len(plan.seq_lens), head_dim))
