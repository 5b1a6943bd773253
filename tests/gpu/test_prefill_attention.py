"""Prefill attention on the GPU against the reference in float64, at real sizes."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from kernels.configs import tuned
from kernels.cuda import prefill_attention as cuda
from kernels.prefill_attention import VarlenPart, VarlenPrefill, prefill_attention, varlen_attention_reference
from tests.support.numerics import assert_near

# tokens of each chunk, and keys before them
FRESH = [(1, 0), (127, 0), (128, 0), (129, 0), (700, 0), (2050, 0)]
BEHIND = [(1, 900), (16, 2048), (130, 77), (513, 512), (1000, 1)]


def part_of(chunks: list[tuple[int, int]]) -> VarlenPart:
    query_start = torch.tensor([0, *accumulate(new for new, _ in chunks)], dtype=torch.int32, device="cuda")
    keys = [new + before for new, before in chunks]
    key_start = torch.tensor([0, *accumulate(keys)], dtype=torch.int32, device="cuda")
    if not any(before for _, before in chunks):
        key_start = query_start
    lengths = [new for new, _ in chunks]
    return VarlenPart(sum(lengths), query_start, key_start, max(lengths), max(keys), sum(keys))


def strided(rows: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Views of one product, as layers have them."""
    product = torch.randn(rows, heads + 2 * kv_heads, head_dim, dtype=dtype, device="cuda")
    query, key, value = product.split([heads, kv_heads, kv_heads], dim=1)
    return query, key, value


def run(
    engine: str, query: Tensor, key: Tensor, value: Tensor, part: VarlenPart, window: int | None, scale: float
) -> Tensor:
    if engine == "flash":
        return cuda.attend_flash(query, key, value, part, window, scale)
    padded = 1 << (query.shape[2] - 1).bit_length()
    dtype = str(query.dtype).removeprefix("torch.")
    group_size = query.shape[1] // key.shape[1]
    config = tuned("prefill_attention", padded_dim=padded, group_size=group_size, dtype=dtype)
    tiles = cuda.tiles_of(config, engine)
    return cuda.attend(query, key, value, part, window, scale, 0.0, tiles, tma=engine == "tma")


BF16, FP16 = torch.bfloat16, torch.float16
LAYERS = [
    (32, 8, 128, BF16),
    (14, 2, 64, BF16),
    (8, 8, 96, BF16),
    (8, 2, 80, BF16),
    (8, 2, 256, BF16),
    (8, 2, 128, FP16),
]


@pytest.mark.parametrize("window", [None, 1, 100, 1024])
@pytest.mark.parametrize("chunks", [FRESH, BEHIND], ids=["fresh", "behind"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "dtype"), LAYERS)
@pytest.mark.parametrize("engine", ["flash", "plain", "tma"])
def test_each_engine_equals_float64(
    engine: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    chunks: list[tuple[int, int]],
    window: int | None,
) -> None:
    """
    Fresh chunks and chunks behind a prefix, with windows and without, in 16 bits.
    """
    torch.manual_seed(0)
    part = part_of(chunks)
    query, key, value = strided(part.num_keys, heads, kv_heads, head_dim, dtype)
    query = query[: sum(new for new, _ in chunks)]
    if engine == "flash" and not cuda.takes_flash(query):
        pytest.skip("FlashAttention-2 pads this head size")
    if engine == "tma" and not cuda.takes_tma(query, key, value):
        pytest.skip("this GPU has no TMA")
    scale = head_dim**-0.5
    expected = varlen_attention_reference(query.double(), key.double(), value.double(), part, window, scale)
    assert_near(expected, run(engine, query, key, value, part, window, scale))


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("chunks", [FRESH, BEHIND], ids=["fresh", "behind"])
def test_float32_is_summed_in_float32(head_dim: int, chunks: list[tuple[int, int]]) -> None:
    """
    Not in the ten bits that matrix units keep of a float32.
    """
    torch.manual_seed(0)
    part = part_of(chunks)
    query, key, value = strided(part.num_keys, 4, 2, head_dim, torch.float32)
    query = query[: sum(new for new, _ in chunks)]
    scale = head_dim**-0.5
    expected = varlen_attention_reference(query.double(), key.double(), value.double(), part, None, scale)
    assert_near(expected, run("plain", query, key, value, part, None, scale))


@pytest.mark.parametrize("engine", ["plain", "tma"])
def test_a_cap_bounds_the_scores(engine: str) -> None:
    """
    Scores become cap * tanh(score / cap).
    """
    torch.manual_seed(0)
    part = part_of(FRESH)
    query, key, value = strided(part.num_keys, 8, 2, 128, torch.bfloat16)
    if engine == "tma" and not cuda.takes_tma(query, key, value):
        pytest.skip("this GPU has no TMA")
    config = tuned("prefill_attention", padded_dim=128, group_size=4, dtype="bfloat16")
    actual = cuda.attend(query, key, value, part, 500, 0.5, 20.0, cuda.tiles_of(config, engine), tma=engine == "tma")
    expected = varlen_attention_reference(query.double(), key.double(), value.double(), part, 500, 0.5, 20.0)
    assert_near(expected, actual)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [None, 300])
def test_a_step_has_fresh_chunks_and_chunks_behind_a_prefix(window: int | None, dtype: torch.dtype) -> None:
    """
    Fresh chunks read the keys as computed, the others all of theirs from the cache, by slot.
    """
    torch.manual_seed(0)
    block_size, kv_heads, head_dim = 16, 2, 128
    fresh, behind = part_of(FRESH), part_of(BEHIND)
    stored = torch.randn(2, behind.num_keys, kv_heads, head_dim, dtype=dtype, device="cuda")
    widths = [-(-(new + before) // block_size) for new, before in BEHIND]
    cache = torch.full((2, sum(widths) + 3, kv_heads, block_size, head_dim), torch.nan, dtype=dtype, device="cuda")
    tables = torch.zeros(len(BEHIND) + 2, max(widths), dtype=torch.int32)
    free = (torch.randperm(sum(widths)) + 2).tolist()
    first = 0
    for row, (width, (new, before)) in enumerate(zip(widths, BEHIND, strict=True), start=1):
        tables[row, :width] = torch.tensor([free.pop() for _ in range(width)])
        positions = torch.arange(new + before)
        blocks, offsets = tables[row, positions // block_size].long().cuda(), (positions % block_size).cuda()
        cache[:, blocks, :, offsets] = stored[:, first : first + new + before].transpose(0, 1)
        first += new + before
    slots = torch.arange(1, len(BEHIND) + 1, dtype=torch.int32, device="cuda")
    part = replace(behind, block_tables=tables.cuda(), slots=slots)
    num_fresh, num_behind = fresh.num_keys, sum(new for new, _ in BEHIND)
    query, key, value = strided(num_fresh + num_behind, 8, kv_heads, head_dim, dtype)
    # those of chunks behind a prefix are in the cache
    key[num_fresh:] = torch.nan
    value[num_fresh:] = torch.nan

    actual = prefill_attention(query, key, value, cache, VarlenPrefill(window, fresh, (part,)), 0.1)

    wide = [x.double() for x in (query, key, value, *stored)]
    expected = [
        varlen_attention_reference(*(x[:num_fresh] for x in wide[:3]), fresh, window, 0.1),
        varlen_attention_reference(wide[0][num_fresh:], *wide[3:], part, window, 0.1),
    ]
    assert_near(torch.cat(expected), actual)
