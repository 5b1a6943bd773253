"""Prefill attention's kernels in Triton's interpreter, against a float64 loop."""

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from kernels.cuda.prefill_attention import Tiles, attend, varlen_attention_triton
from kernels.prefill_attention import VarlenPart, VarlenPrefill, prefill_attention, varlen_attention_reference
from tests.support.numerics import PagedTokens, assert_near, naive_attention

# tokens of each chunk, and keys before them
FRESH = [(1, 0), (16, 0), (33, 0), (46, 0)]
BEHIND = [(1, 40), (20, 13), (17, 31), (34, 1)]
TILES = Tiles(rows=32, keys=32, warps=4, stages=2)


def part_of(chunks: list[tuple[int, int]]) -> VarlenPart:
    query_start = torch.tensor([0, *accumulate(new for new, _ in chunks)], dtype=torch.int32)
    keys = [new + before for new, before in chunks]
    key_start = torch.tensor([0, *accumulate(keys)], dtype=torch.int32)
    if torch.equal(query_start, key_start):
        key_start = query_start
    lengths = [new for new, _ in chunks]
    return VarlenPart(sum(lengths), query_start, key_start, max(lengths), max(keys), sum(keys))


def strided(rows: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Views of one product, as layers have them; a row of NaN follows the last."""
    product = torch.randn(rows + 1, heads + 2 * kv_heads, head_dim, dtype=dtype)
    product[rows:] = torch.nan
    return tuple(product[:rows].split([heads, kv_heads, kv_heads], dim=1))


def truth(query: Tensor, key: Tensor, value: Tensor, part: VarlenPart, window: int | None, scale: float) -> Tensor:
    bounds = zip(pairwise(part.query_start.tolist()), pairwise(part.key_start.tolist()), strict=True)
    return torch.cat(
        [
            naive_attention(query[slice(*rows)], key[slice(*keys)], value[slice(*keys)], scale, window)
            for rows, keys in bounds
        ]
    )


def check(
    chunks: list[tuple[int, int]],
    *,
    head_dim: int = 64,
    group_size: int = 2,
    kv_heads: int = 2,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    tma: bool = False,
    tiles: Tiles = TILES,
) -> None:
    torch.manual_seed(0)
    part = part_of(chunks)
    query, key, value = strided(part.num_keys, kv_heads * group_size, kv_heads, head_dim, dtype)
    query = query[: int(part.query_start[-1])]
    scale = head_dim**-0.5
    actual = attend(query, key, value, part, window, scale, 0.0, tiles, tma=tma)
    assert_near(truth(query, key, value, part, window, scale), actual)


# each pair of values of two parameters occurs
PAIRWISE = [
    (64, 1, torch.float32, False, FRESH),
    (64, 4, torch.float16, True, BEHIND),
    (64, 7, torch.float32, True, FRESH),
    (64, 8, torch.float16, False, BEHIND),
    (80, 1, torch.float16, True, FRESH),
    (80, 4, torch.float32, False, BEHIND),
    (80, 7, torch.float16, False, FRESH),
    (80, 8, torch.float32, True, BEHIND),
    (96, 1, torch.float32, True, BEHIND),
    (96, 4, torch.float16, False, FRESH),
    (96, 7, torch.float32, False, BEHIND),
    (96, 8, torch.float16, True, FRESH),
    (128, 1, torch.float16, False, BEHIND),
    (128, 4, torch.float32, True, FRESH),
    (128, 7, torch.float16, True, BEHIND),
    (128, 8, torch.float32, False, FRESH),
]


@pytest.mark.parametrize(("head_dim", "group_size", "dtype", "tma", "chunks"), PAIRWISE)
def test_equals_float64(
    head_dim: int, group_size: int, dtype: torch.dtype, tma: bool, chunks: list[tuple[int, int]]
) -> None:
    """
    A token sees its chunk's keys up to itself, the last token the last key.
    """
    # time goes with the number of heads and chunks
    kv_heads = 2 if group_size == 1 else 1
    if group_size > 4:
        chunks = chunks[1:3]
    check(chunks, head_dim=head_dim, group_size=group_size, kv_heads=kv_heads, dtype=dtype, tma=tma)


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [FRESH, BEHIND], ids=["fresh", "behind"])
@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("group_size", [1, 4, 7, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_equals_float64_in_full(
    head_dim: int, group_size: int, dtype: torch.dtype, tma: bool, chunks: list[tuple[int, int]]
) -> None:
    """
    The same for every combination.
    """
    check(chunks, head_dim=head_dim, group_size=group_size, dtype=dtype, tma=tma)


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("window", [1, 8, 16, 50])
def test_a_window_hides_what_is_older(window: int, tma: bool) -> None:
    """
    With window w the token at i sees j where i - w < j <= i, whole tiles of older keys are skipped.
    """
    check([*FRESH, *BEHIND], head_dim=16, group_size=1, kv_heads=1, window=window, tma=tma)


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("tiles", [Tiles(16, 32, 4, 2), Tiles(64, 64, 8, 2), Tiles(128, 32, 4, 3)])
def test_any_tiles_give_the_same(tiles: Tiles, tma: bool) -> None:
    """
    Tiles may be wider than high, and larger than all chunks.
    """
    check([*FRESH, *BEHIND], head_dim=16, group_size=1, kv_heads=1, tma=tma, tiles=tiles)


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_lengths_from_1_to_70(step: int, tma: bool) -> None:
    """
    Chunks of many lengths, and prefixes of others.
    """
    check([(length, length * 7 % 23) for length in range(1, 71, step)], head_dim=16, group_size=1, kv_heads=1, tma=tma)


@pytest.mark.parametrize("tma", [False, True])
def test_a_cap_bounds_the_scores(tma: bool) -> None:
    """
    Scores become cap * tanh(score / cap), before what is hidden is hidden.
    """
    torch.manual_seed(0)
    part = part_of(BEHIND)
    query, key, value = strided(part.num_keys, 2, 1, 64, torch.float32)
    query = query[: int(part.query_start[-1])] * 8
    expected = varlen_attention_reference(query.double(), key.double(), value.double(), part, 20, 0.125, 5.0)
    assert_near(expected, attend(query, key, value, part, 20, 0.125, 5.0, TILES, tma=tma))


@pytest.mark.parametrize("tma", [False, True])
def test_a_neighbour_s_nan_stays_there(tma: bool) -> None:
    """
    A sequence whose values are NaN spoils no other, though their rows are adjacent.
    """
    part = part_of([(5, 3), (20, 2), (7, 9)])
    query, key, value = strided(part.num_keys, 1, 1, 16, torch.float32)
    value[8:30] = torch.nan
    query = query[:32]
    out = attend(query, key, value, part, None, 0.25, 0.0, TILES, tma=tma)
    assert bool(out[:5].isfinite().all())
    assert bool(out[5:25].isnan().all())
    assert bool(out[25:].isfinite().all())


@pytest.mark.parametrize("window", [None, 24])
def test_a_step_has_fresh_chunks_and_chunks_behind_a_prefix(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Fresh chunks read the keys as computed, the others all of theirs from the cache, by slot.
    """
    monkeypatch.setattr("kernels.prefill_attention.varlen_attention", varlen_attention_triton)
    torch.manual_seed(0)
    lengths = [new + before for new, before in BEHIND]
    tokens = PagedTokens(lengths, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32)
    fresh, behind = part_of(FRESH), part_of(BEHIND)
    # row 0 of the device's tables and one in the middle belong to nobody here
    slots = torch.tensor([4, 1, 3, 5], dtype=torch.int32)
    tables = torch.zeros(6, tokens.block_tables.shape[1], dtype=torch.int32)
    tables[slots] = tokens.block_tables
    behind = replace(behind, block_tables=tables, slots=slots)
    num_fresh, num_behind = int(fresh.query_start[-1]), int(behind.query_start[-1])
    query, key, value = strided(num_fresh + num_behind, 4, 2, 64, torch.float32)
    # those of chunks behind a prefix are in the cache
    key[num_fresh:] = torch.nan
    value[num_fresh:] = torch.nan

    plan = VarlenPrefill(window, fresh, (behind,))
    actual = prefill_attention(query, key, value, tokens.kv_cache, plan, 0.125)

    expected = [
        truth(query[:num_fresh], key, value, fresh, window, 0.125),
        truth(query[num_fresh:], torch.cat(tokens.keys), torch.cat(tokens.values), behind, window, 0.125),
    ]
    assert_near(torch.cat(expected), actual)


def test_the_reference_equals_float64() -> None:
    """
    What a machine without a GPU gives for a step planned for one.
    """
    torch.manual_seed(0)
    part = part_of(BEHIND)
    query, key, value = strided(part.num_keys, 4, 2, 64, torch.float64)
    query = query[: int(part.query_start[-1])]
    actual = varlen_attention_reference(query, key, value, part, 16, 0.125)
    assert_near(truth(query, key, value, part, 16, 0.125), actual)
