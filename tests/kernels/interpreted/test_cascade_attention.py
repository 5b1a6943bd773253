"""The pass over shared prefixes, and what decodes make of it, against float64 in a cache of NaN."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kernels import cascade_attention
from kernels.cascade_attention import ITEM_STOP, CascadeLayout, SharedPrefix
from kernels.cuda import cascade_attention as cuda
from kernels.cuda.decode_attention import decode_attention_triton, launch
from kernels.decode_attention import PagedDecode, paged_decode_reference
from tests.support.numerics import assert_near
from tests.support.paged import PagedBatch, cut, paged_batch
from tests.support.pairwise import pairwise
from tests.support.shared import cascaded, share

FP8_TOLERANCE = 1e-2
SEQ_LENS = [97, 33, 100, 1, 20, 130, 98, 40, 75]
# rows and the tokens that they share; the others share nothing
GROUPS = [([0, 2, 5, 6], 96), ([8, 1, 7], 32)]
GRID: dict[str, list[Any]] = {
    "head_dim": [64, 80, 96, 128],
    "group_size": [1, 4, 7, 8],
    "dtype": [torch.float32, torch.float16, torch.float8_e4m3fn],
    # tokens behind the prefix that are not cut
    "longest_part": [None, 3, 32],
    "block_size": [16, 32],
    "softcap": [0.0, 3.0],
    # rows of a tile, tokens read at once
    "tile": [(16, 16), (32, 32), (64, 16)],
    # of the decode kernel: tokens of a stream, streams of a head, heads of a program
    "streams": [(16, 1, 1), (16, 2, 1), (16, 1, 2), (16, 2, 2)],
}


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short prefixes have several, the last of them shorter."""
    monkeypatch.setattr(cascade_attention, "MIN_CHUNK", 64)


def layout_of(batch: PagedBatch, group_size: int, rows: int, tile: int) -> CascadeLayout:
    return CascadeLayout(len(batch.seq_lens), batch.kv_cache.shape[2], rows, rows // group_size, tile, 264)


def attend(
    query: torch.Tensor, batch: PagedBatch, plan: PagedDecode, softcap: float, streams: tuple[int, int, int]
) -> torch.Tensor:
    """Both kernels."""
    assert plan.cascade is not None
    scale, layout = query.shape[2] ** -0.5, plan.cascade.layout
    config = {"rows": layout.tile_rows, "tile": layout.unit, "warps": 4, "stages": 2}
    cuda.launch(query, batch.kv_cache, plan.block_tables, plan.cascade, scale, softcap, batch.kv_scales, config)
    tile, slices, heads = streams
    config = {"tile": tile, "slices": slices, "heads": heads, "warps": 4, "stages": 3}
    return launch(query, batch.kv_cache, plan, scale, softcap, batch.kv_scales, config)


def case_id(case: dict[str, Any]) -> str:
    return "-".join(str(value).removeprefix("torch.") for value in case.values())


@pytest.mark.parametrize("case", pairwise(GRID), ids=case_id)
def test_equals_float64(case: dict[str, Any]) -> None:
    """
    As without the pass: who shares a prefix, who shares another, and who shares none, in one batch.
    """
    torch.manual_seed(0)
    dtype, softcap = case["dtype"], case["softcap"]
    batch = paged_batch(SEQ_LENS, num_kv_heads=2, head_dim=case["head_dim"], block_size=case["block_size"], dtype=dtype)
    prefixes = share(batch, GROUPS)
    fp8 = batch.kv_scales is not None
    # 2 scales the scores so that a cap bends them
    query = 2 * torch.randn(len(SEQ_LENS), 2 * case["group_size"], case["head_dim"])
    query = query.to(torch.float32 if fp8 else dtype)
    plain = batch.plan(query.shape[1])
    plan = cascaded(plain, layout_of(batch, case["group_size"], *case["tile"]), prefixes, case["head_dim"])

    if case["longest_part"] is not None:
        plan = cut(plan, query.shape[1], batch.kv_cache, case["longest_part"])

    actual = attend(query, batch, plan, softcap, case["streams"])

    expected = paged_decode_reference(
        query.double(), batch.kv_cache, plain, case["head_dim"] ** -0.5, softcap=softcap, kv_scales=batch.kv_scales
    )
    assert plan.cascade is not None
    assert plan.cascade.items[:, ITEM_STOP].count_nonzero() >= 3
    assert actual.dtype == query.dtype
    assert_near(expected, actual, FP8_TOLERANCE if fp8 else None)


def tiny_batch(seq_lens: list[int]) -> tuple[PagedBatch, torch.Tensor]:
    torch.manual_seed(1)
    batch = paged_batch(seq_lens, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32)
    return batch, torch.randn(len(seq_lens), 8, 64)


def test_a_batch_that_shares_nothing_is_as_without_the_pass() -> None:
    """
    To the bit, whatever lies in the workspace.
    """
    batch, query = tiny_batch([20, 50])
    plain = batch.plan(8)

    out = attend(query, batch, cascaded(plain, layout_of(batch, 4, 16, 16), [], 64), 0.0, (32, 1, 1))

    config = {"tile": 32, "slices": 1, "heads": 1, "warps": 4, "stages": 3}
    assert torch.equal(launch(query, batch.kv_cache, plain, 64**-0.5, 0.0, None, config), out)


def test_rows_of_padding_share_nothing() -> None:
    """
    A graph of more rows than share something: those behind them attend to the null block alone.
    """
    batch, query = tiny_batch([40, 41, 1, 1])
    prefixes = share(batch, [([0, 1], 32)])
    slots = batch.slots.clone()
    slots[2:] = 0
    plain = replace(batch.plan(8), slots=slots)
    layout = CascadeLayout(64, 2, 16, 4, 16, 8)

    out = attend(query, batch, cascaded(plain, layout, prefixes, 64, num_rows=4), 0.0, (16, 1, 1))

    assert_near(paged_decode_reference(query.double(), batch.kv_cache, plain, 64**-0.5), out)
    assert torch.equal(torch.zeros(2, 8, 64), out[2:])


def test_what_a_tile_of_keys_does_not_cover_is_attended_behind_it() -> None:
    """
    A prefix of 48 tokens is read as 32 for all, and the rest by each.
    """
    batch, query = tiny_batch([60, 49, 55])
    prefixes = share(batch, [([2, 0, 1], 48)])
    plain = batch.plan(8)
    plan = cascaded(plain, layout_of(batch, 4, 16, 32), prefixes, 64)

    out = attend(query, batch, plan, 0.0, (16, 1, 1))

    assert plan.cascade is not None
    assert [32, 32, 32] == plan.cascade.rows[:, 0].tolist()
    assert_near(paged_decode_reference(query.double(), batch.kv_cache, plain, 64**-0.5), out)


def test_reads_queries_where_the_projection_left_them() -> None:
    """
    Queries may be a part of wider rows.
    """
    batch, query = tiny_batch([40, 41])
    plan = cascaded(batch.plan(8), layout_of(batch, 4, 16, 16), share(batch, [([0, 1], 32)]), 64)
    rows = torch.full((2, 8 + 4, 64), torch.nan)
    rows[:, :8] = query

    out = attend(rows[:, :8], batch, plan, 0.0, (16, 1, 1))

    assert torch.equal(attend(query, batch, plan, 0.0, (16, 1, 1)), out)


def test_blocks_lie_beyond_two_to_the_31() -> None:
    """
    Offsets of blocks have 64 bits.
    """
    torch.manual_seed(2)
    block_stride = 2**27
    # zeros take no memory until they are touched
    memory = torch.from_numpy(np.zeros(20 * block_stride, dtype=np.float16))
    cache = memory.as_strided((2, 20, 1, 16, 64), (16 * 64, block_stride, 16 * 64, 64, 1))
    cache[:, 16:20] = torch.randn(2, 4, 1, 16, 64).half()
    tables = torch.tensor([[17, 16, 18], [17, 16, 19]], dtype=torch.int32)
    batch = PagedBatch(cache, None, tables, torch.tensor([0, 1]).int(), torch.tensor([40, 35]).int())
    query = torch.randn(2, 4, 64).half()
    plain = batch.plan(4)
    plan = cascaded(plain, layout_of(batch, 4, 16, 16), [SharedPrefix(1, 32, np.array([0, 1]))], 64)

    out = attend(query, batch, plan, 0.0, (16, 1, 1))

    assert_near(paged_decode_reference(query.double(), cache, plain, 64**-0.5), out)


@pytest.mark.parametrize("head_dim", [8, 64])
def test_the_untuned_configuration_is_that_of_the_layout(head_dim: int) -> None:
    """
    As the engine calls it, for heads of the least size too.
    """
    torch.manual_seed(1)
    batch = paged_batch([40, 41], num_kv_heads=2, head_dim=head_dim, block_size=16, dtype=torch.float32)
    query = torch.randn(2, 8, head_dim)
    prefixes = share(batch, [([0, 1], 32)])
    layout = cascade_attention.cascade_layout(2, 8, 2, head_dim, torch.float32)
    assert layout is not None
    plain = batch.plan(8)
    plan = cascaded(plain, layout, prefixes, head_dim)
    assert plan.cascade is not None
    cuda.attend_prefixes_triton(query, batch.kv_cache, plan.block_tables, plan.cascade, 0.125)

    out = decode_attention_triton(query, batch.kv_cache, plan, 0.125)

    assert_near(paged_decode_reference(query.double(), batch.kv_cache, plain, 0.125), out)
