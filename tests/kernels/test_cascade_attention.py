"""How shared prefixes are cut into tiles and items, and the reference of the pass over them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import cascade_attention
from kernels.cascade_attention import (
    COLUMNS,
    ITEM_SLOT,
    ITEM_START,
    ITEM_STOP,
    ITEM_TILE,
    ROW_ITEM,
    ROW_ITEMS,
    ROW_PLACE,
    ROW_TOKENS,
    CascadeLayout,
    SharedPrefix,
    cascade_layout,
    pack_prefixes,
)
from kernels.decode_attention import decode_attention
from tests.support.numerics import assert_near
from tests.support.paged import paged_batch
from tests.support.shared import cascaded, share


def pack(layout: CascadeLayout, prefixes: list[SharedPrefix], num_rows: int) -> dict[str, np.ndarray]:
    """The sections by name, after what another batch had left in them."""
    numbers = np.full(layout.num_numbers, -9, dtype=np.int32)
    num_items = pack_prefixes(layout, prefixes, num_rows, numbers)
    found = {name: numbers[place] for name, place in layout.sections.items()}
    found |= {name: found[name].reshape(-1, COLUMNS) for name in ("items", "rows")}
    assert num_items == np.count_nonzero(found["items"][:, ITEM_STOP])
    assert not found["items"][num_items:].any()
    return found


def check(layout: CascadeLayout, prefixes: list[SharedPrefix], num_rows: int) -> set[int]:
    """Every row has all of its prefix, once; returns the rows that have one."""
    sections = pack(layout, prefixes, num_rows)
    assert not sections["items"][layout.max_items(num_rows) :].any()
    members = sections["members"].reshape(-1, layout.tile_seqs)
    prefix_of = {row: prefix for prefix in prefixes for row in prefix.rows.tolist()}
    seen = set()
    for row, (num_tokens, first_item, count, place) in enumerate(sections["rows"].tolist()):
        if not num_tokens:
            assert [0, 0, 0, 0] == sections["rows"][row].tolist()
            continue
        seen.add(row)
        prefix = prefix_of[row]
        assert num_tokens == prefix.num_tokens // layout.unit * layout.unit
        items = sections["items"][first_item : first_item + count]
        assert {prefix.slot} == set(items[:, ITEM_SLOT].tolist())
        assert {tile := int(items[0, ITEM_TILE])} == set(items[:, ITEM_TILE].tolist())
        assert row == members[tile, place]
        # one after the other, whole tiles of keys, none of them empty
        starts, stops = items[:, ITEM_START].tolist(), items[:, ITEM_STOP].tolist()
        assert [0, *stops] == [*starts, num_tokens]
        assert all(start < stop and not start % layout.unit for start, stop in zip(starts, stops, strict=True))
    return seen


@st.composite
def batches(draw: st.DrawFn) -> tuple[CascadeLayout, list[SharedPrefix], int]:
    """Prefixes of all sizes, on rows at random."""
    rows, group_size = draw(st.sampled_from([16, 64, 128])), draw(st.sampled_from([1, 4, 7, 8]))
    num_rows = draw(st.integers(2, 300))
    layout = CascadeLayout(
        num_rows + draw(st.integers(0, 200)),
        draw(st.sampled_from([1, 2, 8, 32])),
        rows,
        rows // group_size,
        draw(st.sampled_from([16, 64])),
        draw(st.sampled_from([1, 264])),
    )
    order = np.array(draw(st.permutations(range(num_rows))))
    cuts = sorted(draw(st.sets(st.integers(1, num_rows), max_size=30)) | {num_rows})
    prefixes = []
    for start, stop in zip([0, *cuts], cuts, strict=False):
        num_tokens = draw(st.sampled_from([16, 48, 512, 528, 2048, 100_000]))
        prefixes.append(SharedPrefix(draw(st.integers(0, 500)), num_tokens, order[start:stop]))
    return layout, prefixes, num_rows


@settings(max_examples=150, deadline=None, derandomize=True)
@given(batches())
def test_every_row_has_its_whole_prefix_once(batch: tuple[CascadeLayout, list[SharedPrefix], int]) -> None:
    """
    However rows, prefixes and heads are dealt out; and no batch has more items than its graph launches.
    """
    layout, prefixes, num_rows = batch

    seen = check(layout, prefixes, num_rows)

    whole = {prefix.num_tokens >= layout.unit for prefix in prefixes}
    assert bool(seen) == (True in whole)


def test_a_prefix_of_many_sequences_fills_the_gpu() -> None:
    """
    200 sequences with 2,048 tokens in common, 8 KV heads with 4 query heads each.
    """
    layout = CascadeLayout(1024, 8, 64, 16, 64, 264)

    sections = pack(layout, [SharedPrefix(3, 2048, np.arange(200))], 200)

    # thirteen tiles in two chunks each
    assert [3, 1024, 2048, 12] == sections["items"][25].tolist()
    assert 132 < 26 * 8 <= 264
    assert [2048, 24, 2, 7] == sections["rows"][199].tolist()
    assert [ROW_TOKENS, ROW_ITEM, ROW_ITEMS, ROW_PLACE] == [0, 1, 2, 3]


def test_the_least_worthwhile_are_left_out() -> None:
    """
    Where a batch has fewer tiles than groups of two would take.
    """
    layout = CascadeLayout(256, 8, 128, 32, 64, 264)
    prefixes = [SharedPrefix(slot, 512, np.array([2 * slot, 2 * slot + 1])) for slot in range(128)]

    seen = check(layout, prefixes, 256)

    assert set(range(2 * layout.max_tiles(256))) == seen
    assert 32 == layout.max_tiles(256)


def test_one_long_prefix_among_short_ones_is_cut() -> None:
    """
    So that no program is left to read it all while the others have ended.
    """
    layout = CascadeLayout(1024, 8, 64, 16, 64, 264)
    prefixes = [SharedPrefix(0, 16384, np.arange(8))]
    prefixes += [SharedPrefix(slot, 512, np.arange(8 * slot, 8 * slot + 8)) for slot in range(1, 36)]

    sections = pack(layout, prefixes, 1024)

    assert 16 <= sections["rows"][0, ROW_ITEMS]
    assert 1 == sections["rows"][8, ROW_ITEMS]


def test_heads_that_no_tile_holds_have_no_layout() -> None:
    """
    More query heads of a KV head than a product has rows.
    """
    assert cascade_layout(8, 128, 1, 64, torch.float32) is None
    assert cascade_layout(8, 16, 2, 64, torch.float32) is not None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_the_reference_is_as_without_the_pass(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, softcap: float
) -> None:
    """
    The same sums in another order.
    """
    monkeypatch.setattr(cascade_attention, "MIN_CHUNK", 32)
    torch.manual_seed(0)
    batch = paged_batch([70, 3, 80, 65, 20], num_kv_heads=2, head_dim=16, block_size=4, dtype=dtype)
    prefixes = share(batch, [([0, 2, 3], 64)])
    query = torch.randn(5, 6, 16, dtype=torch.float64)
    plain = batch.plan(6)
    plan = cascaded(plain, CascadeLayout(5, 2, 16, 5, 16, 264), prefixes, 16)
    assert plan.cascade is not None

    expected, actual = (
        decode_attention(query, batch.kv_cache, one, 0.25, softcap=softcap, kv_scales=batch.kv_scales)
        for one in (plain, plan)
    )

    assert 2 == plan.cascade.items[:, ITEM_STOP].count_nonzero()
    # what the pass leaves is float32 here
    assert_near(expected, actual, 2e-6)
