"""Plain float64 versions of what the kernels do, and how close is close enough."""

import torch
from torch import Tensor

# relative to the largest value expected, against float64
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def assert_near(expected: Tensor, actual: Tensor, tolerance: float | None = None) -> None:
    """`actual` equals the float64 truth as far as its dtype, or a tolerance, allows."""
    assert expected.shape == actual.shape
    assert bool(torch.isfinite(actual).all())
    error = ((actual.double() - expected).abs().max() / expected.abs().max()).item()
    assert error <= (TOLERANCES[actual.dtype] if tolerance is None else tolerance)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Rows times a weight of [out_features, in_features]."""
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


def gated_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The SiLU of the first half of the output features times the second."""
    gate, up = product(x, weight, bias).chunk(2, dim=1)
    return gate * gate.sigmoid() * up


def naive_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
    """
    One sequence's attention, row by row in float64: the queries are its last tokens.

    Args:
        query: [num_new, num_heads, head_dim].
        key, value: [num_tokens, num_kv_heads, head_dim].
    """
    group_size = query.shape[1] // key.shape[1]
    keys, values = (x.double().repeat_interleave(group_size, dim=1) for x in (key, value))
    rows = []
    for row, position in enumerate(range(len(key) - len(query), len(key))):
        first = max(0, position - window + 1) if window else 0
        seen = slice(first, position + 1)
        scores = torch.einsum("hd,thd->ht", query[row].double(), keys[seen]) * scale
        rows.append(torch.einsum("ht,thd->hd", scores.softmax(-1), values[seen]))
    return torch.stack(rows)


class PagedTokens:
    """
    Sequences' keys and values in a cache of scattered blocks; all else in it is NaN.

    Args:
        seq_lens: Tokens of each sequence.
        num_written: Of each, how many the cache holds; None is all.
    """

    def __init__(
        self,
        seq_lens: list[int],
        *,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        num_written: list[int] | None = None,
    ) -> None:
        widths = [-(-length // block_size) for length in seq_lens]
        num_blocks = sum(widths) + 4
        memory = torch.full((2, num_blocks, block_size, num_kv_heads, head_dim), torch.nan, dtype=dtype)
        self.kv_cache = memory.transpose(2, 3)
        self.kv_cache[:, 0] = 0
        self.keys = [torch.randn(length, num_kv_heads, head_dim, dtype=dtype) for length in seq_lens]
        self.values = [torch.randn(length, num_kv_heads, head_dim, dtype=dtype) for length in seq_lens]
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32)
        self.block_tables = torch.zeros(len(seq_lens), max(widths), dtype=torch.int32)

        free = (torch.randperm(num_blocks - 1) + 1).tolist()
        for seq, width in enumerate(widths):
            self.block_tables[seq, :width] = torch.tensor([free.pop() for _ in range(width)])
            for position in range(seq_lens[seq] if num_written is None else num_written[seq]):
                block, offset = int(self.block_tables[seq, position // block_size]), position % block_size
                self.kv_cache[0, block, :, offset] = self.keys[seq][position]
                self.kv_cache[1, block, :, offset] = self.values[seq][position]
