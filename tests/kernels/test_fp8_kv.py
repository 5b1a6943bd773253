"""Rounding of heads to eight bits and back, and what attends through it."""

import pytest
import torch
from torch import Tensor

from kernels.decode_attention import decode_attention, plan_decode
from kernels.fp8_kv import FP8_MAX, dequantise_kv, quantise_kv
from kernels.prefill_attention import plan_prefill, prefill_attention
from tests.support.numerics import PagedTokens

FLOAT8 = torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_error_is_a_sixteenth_at_most(dtype: torch.dtype) -> None:
    """
    Of each number, or half the least step at the head's largest magnitude where that is more.
    """
    heads = (torch.randn(50, 3, 64) * torch.logspace(-8, 8, 50)[:, None, None]).to(dtype)

    stored, scales = quantise_kv(heads)

    assert (FLOAT8, torch.float32) == (stored.dtype, scales.dtype)
    error = (dequantise_kv(stored, scales, torch.float64) - heads.double()).abs()
    least = heads.double().abs().amax(-1, keepdim=True) / FP8_MAX * 2**-10
    assert bool((error <= (heads.double().abs() / 16).maximum(least) * (1 + 1e-6)).all())


def test_a_head_is_stored_by_itself() -> None:
    """
    An outlier takes bits from the numbers beside it in its head, and from no other token or head.
    """
    heads = torch.randn(4, 2, 16)
    stored, scales = quantise_kv(heads)
    heads[1, 1, 3] = 300.0

    stored_again, scales_again = quantise_kv(heads)

    same = torch.ones(4, 2, dtype=torch.bool)
    same[1, 1] = False
    assert torch.equal(stored[same].float(), stored_again[same].float())
    assert torch.equal(scales[same], scales_again[same])


def test_zeros_come_back() -> None:
    """
    A head without any magnitude has a scale too, and no NaN.
    """
    stored, scales = quantise_kv(torch.zeros(1, 8))

    assert 0.0 < float(scales)
    assert [0.0] == dequantise_kv(stored, scales, torch.float32).unique().tolist()


def rounded(tokens: PagedTokens) -> tuple[Tensor, Tensor, Tensor]:
    """The cache in eight bits, its scales, and the numbers that they stand for; NaN where nothing was written."""
    stored, scales = quantise_kv(tokens.kv_cache.transpose(2, 3))
    wide = dequantise_kv(stored, scales, tokens.kv_cache.dtype)
    return stored.transpose(2, 3), scales.transpose(2, 3), wide.transpose(2, 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 5])
def test_decodes_read_what_the_scales_make_of_the_cache(dtype: torch.dtype, window: int | None) -> None:
    """
    On a CPU bit by bit what a cache of these numbers in the dtype of the queries gives.
    """
    torch.manual_seed(0)
    tokens = PagedTokens([1, 40, 7, 16, 40], num_kv_heads=2, head_dim=16, block_size=4, dtype=dtype)
    stored, scales, wide = rounded(tokens)
    query = torch.randn(5, 6, 16, dtype=dtype)
    tables, lens = tokens.block_tables, tokens.seq_lens
    expected = decode_attention(query, wide, plan_decode(wide, tables, lens, window), 0.25)

    plan = plan_decode(stored, tables, lens, window, dtype)
    actual = decode_attention(query, stored, plan, 0.25, kv_scales=scales)

    assert torch.equal(expected, actual)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 5])
def test_prefixes_are_what_the_scales_make_of_the_cache(dtype: torch.dtype, window: int | None) -> None:
    """
    On a CPU bit by bit what a cache of these numbers in the dtype of the queries gives.
    """
    torch.manual_seed(0)
    tokens = PagedTokens([9, 33, 12], num_kv_heads=2, head_dim=16, block_size=4, dtype=dtype)
    stored, scales, wide = rounded(tokens)
    start = torch.tensor([0, 9, 20, 25], dtype=torch.int32)
    query, key, value = (torch.randn(25, heads, 16, dtype=dtype) for heads in (6, 2, 2))
    tables, lens = tokens.block_tables, tokens.seq_lens
    plan = plan_prefill(wide, tables, start, lens, window)
    expected = prefill_attention(query, key, value, wide, plan, 0.25)

    plan = plan_prefill(stored, tables, start, lens, window, dtype)
    actual = prefill_attention(query, key, value, stored, plan, 0.25, kv_scales=scales)

    assert torch.equal(expected, actual)
