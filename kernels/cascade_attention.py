"""
Attention of many sequences to a prefix that they share, which is read once for all of them.

Sequences that found the same blocks in the prefix cache differ behind them alone. Their queries become
rows of one product with the prefix's keys; what each has behind the prefix is attended by
`kernels.decode_attention`, which goes on from what this pass leaves.

The host cuts the rows of a prefix into tiles, and the prefix of a tile into chunks. A chunk of a tile is
an item: what a program of one KV head does. All that says so is one run of int32 numbers, whose places
captured graphs know; zeros mean that nothing is shared.

Sources: Juravsky et al. 2024, arXiv:2402.05099; Zheng et al. 2024, arXiv:2412.03594.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.configs import tuned
from kernels.gather_kv import cached_tokens

# a chunk of fewer tokens takes longer to start and to join than to read
MIN_CHUNK = 256
# columns of an item, and of a row of the batch
ITEM_SLOT, ITEM_START, ITEM_STOP, ITEM_TILE = range(4)
ROW_TOKENS, ROW_ITEM, ROW_ITEMS, ROW_PLACE = range(4)
COLUMNS = 4

Int32s = NDArray[np.int32]


class SharedPrefix(NamedTuple):
    """
    Leading tokens whose blocks several sequences of a batch have in common.

    Args:
        slot: Row of the block tables that holds these blocks; any of the sequences' will do.
        num_tokens: Fewer than any of the sequences has.
        rows: [n] integers, places of the sequences in the batch.
    """

    slot: int
    num_tokens: int
    rows: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CascadeLayout:
    """
    How the pass is cut, and where the numbers that it reads lie.

    Args:
        max_rows: Of the largest batch.
        tile_rows: Rows of a product.
        tile_seqs: Sequences of a tile: those whose query heads of one KV head fit its rows.
        unit: Prefixes are read in multiples of so many tokens; what is left over is attended behind them.
        programs: As many of the pass run at once.
    """

    max_rows: int
    num_kv_heads: int
    tile_rows: int
    tile_seqs: int
    unit: int
    programs: int

    def max_tiles(self, num_rows: int) -> int:
        """Tiles of a batch: prefixes that do not fit are not passed over together."""
        return 2 * -(-num_rows // self.tile_seqs) + 16

    def max_items(self, num_rows: int) -> int:
        """Items of a batch, with or without work: what a graph launches for each KV head."""
        return max(self.programs // self.num_kv_heads, self.max_tiles(num_rows))

    @property
    def sections(self) -> dict[str, slice]:
        """Places of "items", "rows" and "members", each beginning at a multiple of 4."""
        rows = COLUMNS * self.max_items(self.max_rows)
        members = rows + COLUMNS * self.max_rows
        stop = members + self.tile_seqs * self.max_tiles(self.max_rows)
        return {"items": slice(0, rows), "rows": slice(rows, members), "members": slice(members, stop)}

    @property
    def num_numbers(self) -> int:
        last: int = self.sections["members"].stop
        return last + -last % COLUMNS


@dataclass(frozen=True, slots=True)
class Cascade:
    """
    What all layers of a step share of this pass, on the device.

    Args:
        max_items: Launched for each KV head.
        items: [most items of any batch, 4] int32: slot of the prefix, first and last token of the chunk, the last
            exclusive, and the tile. Zeros where there is nothing to do.
        rows: [max_rows, 4] int32, of each row of the batch: tokens that this pass attends, its tile's first item
            and number of items, its place in the tile. Zeros where it shares nothing.
        members: [max_tiles, tile_seqs] int32, rows of the batch; -1 for nobody.
        outputs: [max_items, num_kv_heads, tile_rows, head_dim] float32, one layer's at a time.
        lses: [max_items, num_kv_heads, tile_rows] float32, their log-sum-exps to base 2.
    """

    layout: CascadeLayout
    max_items: int
    items: Tensor
    rows: Tensor
    members: Tensor
    outputs: Tensor
    lses: Tensor


def cascade_layout(
    max_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> CascadeLayout | None:
    """
    The layout for a model on the GPU at hand; None where a KV head has more query heads than a tile has rows.

    Args:
        dtype: Of the cache.
    """
    group_size = num_heads // num_kv_heads
    config = cascade_config(head_dim, group_size, dtype)
    if group_size > config["rows"]:
        return None
    return CascadeLayout(
        max_rows, num_kv_heads, config["rows"], config["rows"] // group_size, config["tile"], config["programs"]
    )


def cascade_config(head_dim: int, group_size: int, dtype: torch.dtype) -> dict[str, int]:
    """
    The configuration of the pass for the GPU at hand.

    Returns:
        "rows" of a product, "tile", the tokens read at once, "warps" and "stages", and "programs", how many
        run at once: two of an H200's 132 multiprocessors each, where nothing else was measured.
    """
    name, padded = str(dtype).removeprefix("torch."), max(16, 1 << (head_dim - 1).bit_length())
    return tuned("cascade_attention", head_dim=head_dim, padded_dim=padded, group_size=group_size, dtype=name)


def cascade_workspace(layout: CascadeLayout, head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """
    Memory for the results of the pass over any batch, for `plan_cascade`.

    Args:
        dtype: Of the queries: results are float32, or float64 where that is.
    """
    rows = layout.max_items(layout.max_rows) * layout.num_kv_heads * layout.tile_rows
    partial = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.empty(rows * (head_dim + 1), dtype=partial, device=device)


def plan_cascade(layout: CascadeLayout, numbers: Tensor, workspace: Tensor, num_rows: int, head_dim: int) -> Cascade:
    """
    Look at the numbers and the workspace as a batch's.

    Args:
        numbers: [layout.num_numbers] int32 that `pack_prefixes` filled in, or zeros.
        workspace: `cascade_workspace`.
    """
    sections = layout.sections
    shape = (layout.max_items(num_rows), layout.num_kv_heads, layout.tile_rows)
    size = math.prod(shape)
    return Cascade(
        layout=layout,
        max_items=shape[0],
        items=numbers[sections["items"]].view(-1, COLUMNS),
        rows=numbers[sections["rows"]].view(-1, COLUMNS),
        members=numbers[sections["members"]].view(-1, layout.tile_seqs),
        outputs=workspace[: size * head_dim].view(*shape, head_dim),
        lses=workspace[size * head_dim : size * (head_dim + 1)].view(shape),
    )


def pack_prefixes(layout: CascadeLayout, prefixes: Sequence[SharedPrefix], num_rows: int, numbers: Int32s) -> int:
    """
    Cut shared prefixes into tiles and items.

    Args:
        prefixes: The most worthwhile first: those that a batch of so many rows has no tiles for are left out.
        num_rows: Rows of the batch, or fewer than it has.
        numbers: [layout.num_numbers], filled in.

    Returns:
        The number of items.
    """
    numbers[:] = 0
    chosen = _fitting(layout, prefixes, num_rows)
    if not chosen:
        return 0
    size = layout.tile_seqs
    counts = [-(-len(prefix.rows) // size) for prefix in chosen]
    slots, tokens = np.repeat([(prefix.slot, _whole(prefix, layout)) for prefix in chosen], counts, axis=0).T
    chunk = _chunk(layout, tokens, num_rows)
    num_items = -(-tokens // chunk)
    first_items = np.cumsum(num_items) - num_items

    places = layout.sections
    tile = np.repeat(np.arange(len(tokens)), num_items)
    starts = (np.arange(len(tile)) - first_items[tile]) * chunk
    columns = (slots[tile], starts, np.minimum(starts + chunk, tokens[tile]), tile)
    numbers[places["items"]].reshape(-1, COLUMNS)[: len(tile)] = np.stack(columns, axis=1)

    members = numbers[places["members"]]
    members[:] = -1
    for first, prefix in zip(np.cumsum([0, *counts]).tolist(), chosen, strict=False):
        members[first * size : first * size + len(prefix.rows)] = prefix.rows
    taken = (members >= 0).nonzero()[0]
    rows, tile = members[taken], taken // size
    columns = (tokens[tile], first_items[tile], num_items[tile], taken % size)
    numbers[places["rows"]].reshape(-1, COLUMNS)[rows] = np.stack(columns, axis=1)
    return int(num_items.sum())


def attend_prefixes(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    cascade: Cascade,
    scale: float,
    *,
    softcap: float = 0.0,
    kv_scales: Tensor | None = None,
) -> None:
    """
    Attend the rows that share a prefix to it, into `cascade.outputs` and `cascade.lses`.

    Only where these rows have no window: all of them must see the whole prefix.

    Args:
        query: [num_seqs, num_heads, head_dim].
        kv_cache: [2, num_blocks, num_kv_heads, block_size, head_dim].
        block_tables: [num_slots, max_blocks] int32.
        scale, softcap, kv_scales: As `kernels.decode_attention.decode_attention` has them.
    """
    if query.is_cuda:
        from kernels.cuda.cascade_attention import attend_prefixes_triton

        attend_prefixes_triton(query, kv_cache, block_tables, cascade, scale, softcap=softcap, kv_scales=kv_scales)
    else:
        attend_prefixes_reference(query, kv_cache, block_tables, cascade, scale, softcap=softcap, kv_scales=kv_scales)


def attend_prefixes_reference(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    cascade: Cascade,
    scale: float,
    *,
    softcap: float = 0.0,
    kv_scales: Tensor | None = None,
) -> None:
    """One item after another, in the dtype of `cascade.outputs`."""
    dtype, num_kv_heads = cascade.outputs.dtype, kv_cache.shape[2]
    group_size = query.shape[1] // num_kv_heads
    for item, (slot, start, stop, tile) in enumerate(cascade.items.tolist()):
        if stop <= start:
            break
        positions = torch.arange(start, stop, device=query.device)
        keys, values = cached_tokens(kv_cache, kv_scales, block_tables[slot], positions, dtype)
        members = cascade.members[tile]
        rows = query[members[members >= 0].long()].to(dtype).view(-1, num_kv_heads, group_size, query.shape[2])
        scores = torch.einsum("nhgd,thd->hngt", rows, keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        filled = len(rows) * group_size
        attended = torch.einsum("hngt,thd->hngd", scores.softmax(-1), values)
        cascade.outputs[item, :, :filled] = attended.flatten(1, 2)
        cascade.lses[item, :, :filled] = scores.logsumexp(-1).flatten(1) / math.log(2)


def _fitting(layout: CascadeLayout, prefixes: Sequence[SharedPrefix], num_rows: int) -> list[SharedPrefix]:
    room, chosen = layout.max_tiles(num_rows), []
    for prefix in prefixes:
        count = -(-len(prefix.rows) // layout.tile_seqs)
        if 0 < count <= room and _whole(prefix, layout):
            room -= count
            chosen.append(prefix)
    return chosen


def _whole(prefix: SharedPrefix, layout: CascadeLayout) -> int:
    return prefix.num_tokens // layout.unit * layout.unit


def _chunk(layout: CascadeLayout, tokens: NDArray[np.int64], num_rows: int) -> int:
    """Tokens of a chunk: items enough for the GPU, or else none much longer than the others."""
    num_tiles, longest, most = len(tokens), int(tokens.max()), layout.max_items(num_rows)
    # each tile has an item whatever the chunk is, and a tile's chunks end with a shorter one
    spare = max(layout.programs // layout.num_kv_heads - num_tiles, min(num_tiles, most - num_tiles))
    chunk = max(MIN_CHUNK, -(-int(tokens.sum()) // spare)) if spare > 0 else longest
    # as many chunks of the longest, all of them as long
    even = -(-longest // -(-longest // chunk))
    even, chunk = (size + -size % layout.unit for size in (even, chunk))
    return even if int((-(-tokens // even)).sum()) <= most else chunk
