"""Pages gathered to adjacent rows, in Triton's interpreter."""

import numpy as np
import pytest
import torch

from kernels.cuda.gather_kv import gather_kv_triton
from kernels.gather_kv import gather_kv_reference
from tests.support.elementwise import FLOAT8, assert_gathered
from tests.support.numerics import PagedTokens


@pytest.mark.parametrize(
    ("head_dim", "num_kv_heads", "block_size", "dtype"),
    [(64, 2, 4, torch.float32), (80, 1, 16, torch.float16), (96, 4, 8, torch.bfloat16), (256, 2, 16, torch.float16)],
)
@pytest.mark.parametrize("lengths", [[40], [7, 0, 33, 1], [5] * 9])
@pytest.mark.parametrize("function", [gather_kv_triton, gather_kv_reference])
def test_rows_come_sequence_by_sequence(
    head_dim: int, num_kv_heads: int, block_size: int, dtype: torch.dtype, lengths: list[int], function: object
) -> None:
    """
    Each sequence's first tokens come out bit by bit, in order, whichever row of the tables names its blocks.
    """
    torch.manual_seed(0)
    seq_lens = [length + 3 for length in lengths]
    paged = PagedTokens(seq_lens, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype)
    slots = torch.randperm(len(lengths) + 2)[: len(lengths)].int()
    tables = torch.full((len(lengths) + 2, paged.block_tables.shape[1]), -1, dtype=torch.int32)
    tables[slots] = paged.block_tables
    key_start = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)

    assert callable(function)
    keys, values = function(paged.kv_cache.contiguous(), tables, slots, key_start, sum(lengths))

    assert_gathered([key[:length] for key, length in zip(paged.keys, lengths, strict=True)], keys)
    assert_gathered([value[:length] for value, length in zip(paged.values, lengths, strict=True)], values)


@pytest.mark.parametrize("function", [gather_kv_triton, gather_kv_reference])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16])
def test_float8_is_multiplied_by_its_scales(out_dtype: torch.dtype, function: object) -> None:
    """
    Each token's head has a scale of its own; the result is of the dtype that was asked for.
    """
    torch.manual_seed(1)
    kv_cache = (torch.randn(2, 6, 2, 4, 64) * 50).to(FLOAT8)
    kv_scales = torch.rand(2, 6, 2, 4)
    tables, slots = torch.tensor([[0, 0, 0], [5, 2, 1]], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)

    assert callable(function)
    keys, values = function(kv_cache, tables, slots, torch.tensor([0, 10], dtype=torch.int32), 10, kv_scales, out_dtype)

    wide = kv_cache.float() * kv_scales[..., None]
    expected = wide[:, [5, 2, 1]].transpose(2, 3).reshape(2, 12, 2, 64)[:, :10]
    for part, rows in enumerate((keys, values)):
        torch.testing.assert_close(rows, expected[part].to(out_dtype), rtol=2e-3, atol=1e-3)


def test_blocks_may_lie_past_the_range_of_32_bits() -> None:
    """
    Blocks of a pool of more than 2**31 elements are read where they are.
    """
    num_blocks = 2**31 // (2 * 4 * 64) + 10
    # pages of memory come as they are written: few are
    kv_cache = torch.from_numpy(np.empty((2, num_blocks, 2, 4, 64), np.float16))
    kv_cache[:, num_blocks - 2] = torch.randn(2, 2, 4, 64)
    tables = torch.tensor([[num_blocks - 2]], dtype=torch.int32)

    keys, values = gather_kv_triton(
        kv_cache, tables, torch.zeros(1, dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32), 4
    )

    assert torch.equal(kv_cache[0, num_blocks - 2].transpose(0, 1), keys)
    assert torch.equal(kv_cache[1, num_blocks - 2].transpose(0, 1), values)
