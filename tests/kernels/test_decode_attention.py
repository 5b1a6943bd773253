"""Decode attention against a float64 loop, through scattered blocks in a cache of NaN."""

import pytest
import torch
from torch import Tensor

from kernels.decode_attention import PagedDecode, decode_attention, paged_decode_reference, plan_decode
from tests.support.numerics import PagedTokens, assert_near, naive_attention


def attend(tokens: PagedTokens, query: Tensor, window: int | None = None) -> Tensor:
    plan = plan_decode(tokens.kv_cache, tokens.block_tables, tokens.seq_lens, window)
    return decode_attention(query, tokens.kv_cache, plan, query.shape[-1] ** -0.5)


def expect(tokens: PagedTokens, query: Tensor, window: int | None = None) -> Tensor:
    scale = query.shape[-1] ** -0.5
    pairs = zip(tokens.keys, tokens.values, strict=True)
    rows = [naive_attention(query[i : i + 1], k, v, scale, window) for i, (k, v) in enumerate(pairs)]
    return torch.cat(rows)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize(("group_size", "block_size"), [(1, 16), (4, 32), (7, 16)])
def test_equals_float64(dtype: torch.dtype, head_dim: int, group_size: int, block_size: int) -> None:
    """
    Each sequence attends to all its own tokens and to nothing else.
    """
    torch.manual_seed(0)
    tokens = PagedTokens(
        [1, 15, 16, 17, 65, 190, 64], num_kv_heads=2, head_dim=head_dim, block_size=block_size, dtype=dtype
    )
    query = torch.randn(7, 2 * group_size, head_dim, dtype=dtype)

    assert_near(expect(tokens, query), attend(tokens, query))


@pytest.mark.parametrize("window", [1, 8, 16, 50])
def test_a_window_hides_what_is_older(window: int) -> None:
    """
    With window w the token at i sees j where i - w < j <= i.
    """
    torch.manual_seed(1)
    tokens = PagedTokens([1, 7, 8, 9, 20, 130], num_kv_heads=3, head_dim=64, block_size=16, dtype=torch.float64)
    query = torch.randn(6, 9, 64, dtype=torch.float64)

    assert_near(expect(tokens, query, window), attend(tokens, query, window))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """
    A sequence's result has the same bits alone and among others.
    """
    torch.manual_seed(2)
    tokens = PagedTokens([70, 3, 300, 71, 90, 128], num_kv_heads=3, head_dim=64, block_size=16, dtype=torch.float32)
    query = torch.randn(6, 9, 64)
    together = attend(tokens, query)

    for seq in range(6):
        one = slice(seq, seq + 1)
        plan = plan_decode(tokens.kv_cache, tokens.block_tables[one], tokens.seq_lens[one])
        alone = decode_attention(query[one], tokens.kv_cache, plan, 64**-0.5)
        assert torch.equal(together[one], alone)


@pytest.mark.parametrize("window", [None, 16])
def test_the_reference_of_the_gpu_says_the_same(window: int | None) -> None:
    """
    Rows of tables by slot, and no plan made of lengths.
    """
    torch.manual_seed(3)
    tokens = PagedTokens([70, 3, 128], num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.float64)
    query = torch.randn(3, 8, 64, dtype=torch.float64)
    slots = torch.tensor([2, 0, 1], dtype=torch.int32)
    tables = torch.empty_like(tokens.block_tables)
    tables[slots.long()] = tokens.block_tables
    plan = PagedDecode(tables, slots, tokens.seq_lens, window, None)

    assert_near(expect(tokens, query, window), decode_attention(query, tokens.kv_cache, plan, 64**-0.5))


def test_the_reference_of_the_gpu_caps_scores_and_scales_fp8() -> None:
    """
    Capped scores weigh the values, and each token has a scale for its key and one for its value.
    """
    cache = torch.full((2, 2, 1, 16, 64), torch.nan)
    cache[:, 1, :, :2] = torch.tensor([1.0, 2.0])[:, None]
    scales = torch.full((2, 2, 1, 16), torch.nan)
    scales[0, 1, 0, :2], scales[1, 1, 0, :2] = torch.tensor([0.5, 1.0]), torch.tensor([4.0, 8.0])
    tables, slots, seq_lens = torch.tensor([[1]]).int(), torch.tensor([0]).int(), torch.tensor([2]).int()
    plan = PagedDecode(tables, slots, seq_lens, None, None)
    query = torch.ones(1, 1, 64, dtype=torch.float64)

    out = paged_decode_reference(query, cache.to(torch.float8_e4m3fn), plan, 0.125, softcap=3.0, kv_scales=scales)

    # keys of 0.5 and 2 give scores of 4 and 16; the values are 4 and 16
    numbers = torch.tensor([4.0, 16.0], dtype=torch.float64)
    expected = ((3.0 * torch.tanh(numbers / 3.0)).softmax(0) * numbers).sum()
    assert_near(expected.expand(1, 1, 64), out)
