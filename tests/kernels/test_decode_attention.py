"""Decode attention against a float64 loop, through scattered blocks in a cache of NaN."""

import pytest
import torch
from torch import Tensor

from kernels.decode_attention import (
    PagedDecode,
    decode_attention,
    num_splits_for,
    paged_decode_reference,
    plan_decode,
    plan_splits,
    programs_of,
    split_tokens_for,
    split_workspace,
)
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


def test_a_launch_has_room_for_splits() -> None:
    """
    The fewer sequences, the more parts each may have: a power of two, as far as its length makes sense of them.
    """
    assert [32, 32, 32, 8, 2, 1] == [num_splits_for(8 * n, 128, 8192) for n in (1, 8, 32, 128, 512, 1024)]
    assert [1, 1, 4, 8] == [num_splits_for(8, 128, length) for length in (16, 127, 300, 600)]


def test_a_part_is_short_beside_the_batch() -> None:
    """
    A large batch is cut into long parts, a small one into parts that are worth a program of their own.
    """
    assert [64, 199, 795, 6356] == [split_tokens_for(batch * 512, 8) for batch in (1, 32, 128, 1024)]


def test_a_program_may_have_several_heads() -> None:
    """
    As the tables of configurations say, and one where they do not divide evenly; without a GPU always one.
    """
    assert [8, 3] == [programs_of(4 * heads, heads, 128, torch.bfloat16) for heads in (8, 3)]


@pytest.mark.parametrize(("num_kv_heads", "max_model_len"), [(8, 8192), (2, 1024), (1, 16)])
def test_one_workspace_fits_every_batch(num_kv_heads: int, max_model_len: int) -> None:
    """
    Partial results of any batch up to the largest are views of the same memory that do not overlap.
    """
    num_heads = 4 * num_kv_heads
    workspace = split_workspace(100, num_kv_heads, num_heads, 64, max_model_len, torch.device("cpu"))
    for num_seqs in range(1, 101):
        num_splits = num_splits_for(num_seqs * num_kv_heads, 64, max_model_len)

        splits = plan_splits(num_seqs, num_splits, torch.ones(1), workspace, num_heads, 64)

        if num_splits == 1:
            assert splits is None
            continue
        assert splits is not None
        assert (num_seqs, num_heads, num_splits, 64) == splits.outputs.shape
        assert splits.lses.data_ptr() == splits.outputs.data_ptr() + 4 * splits.outputs.numel()
        assert len(splits.arrivals) >= num_seqs * num_kv_heads
