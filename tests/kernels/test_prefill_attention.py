"""Prefill attention against a float64 loop: whole prompts, chunks behind a prefix, windows."""

import pytest
import torch
from torch import Tensor

from kernels.prefill_attention import plan_prefill, prefill_attention
from tests.support.numerics import PagedTokens, assert_near, naive_attention

# sequence lengths, and how many of the last tokens are new
LENGTHS = [5, 40, 33, 64, 70, 17]
NEW = [5, 40, 20, 16, 2, 16]


def run_both(
    *, head_dim: int, group_size: int, block_size: int, dtype: torch.dtype, window: int | None
) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    prefixes = [length - new for length, new in zip(LENGTHS, NEW, strict=True)]
    tokens = PagedTokens(
        LENGTHS, num_kv_heads=2, head_dim=head_dim, block_size=block_size, dtype=dtype, num_written=prefixes
    )
    query = torch.randn(sum(NEW), 2 * group_size, head_dim, dtype=dtype)
    bounds = [0, *torch.tensor(NEW).cumsum(0).tolist()]
    query_start = torch.tensor(bounds, dtype=torch.int32)
    scale = head_dim**-0.5
    new = list(zip(tokens.keys, tokens.values, prefixes, strict=True))
    actual = prefill_attention(
        query,
        torch.cat([keys[prefix:] for keys, _, prefix in new]),
        torch.cat([values[prefix:] for _, values, prefix in new]),
        tokens.kv_cache,
        plan_prefill(tokens.kv_cache, tokens.block_tables, query_start, tokens.seq_lens, window),
        scale,
    )
    expected = [
        naive_attention(query[bounds[i] : bounds[i + 1]], keys, values, scale, window)
        for i, (keys, values, _) in enumerate(new)
    ]
    return torch.cat(expected), actual


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize(("group_size", "block_size"), [(1, 16), (4, 32), (7, 16)])
def test_equals_float64(dtype: torch.dtype, head_dim: int, group_size: int, block_size: int) -> None:
    """
    A new token sees its sequence's prefix through the block table, and the new ones up to itself.
    """
    assert_near(*run_both(head_dim=head_dim, group_size=group_size, block_size=block_size, dtype=dtype, window=None))


@pytest.mark.parametrize("window", [1, 8, 16, 50])
def test_a_window_hides_what_is_older(window: int) -> None:
    """
    With window w the token at i sees j where i - w < j <= i, across the chunk's border too.
    """
    assert_near(*run_both(head_dim=64, group_size=3, block_size=16, dtype=torch.float64, window=window))
