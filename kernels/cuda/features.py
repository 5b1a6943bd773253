"""
The output features of a product's program, shared by the kernels of few rows.

A gated product has two rows of the weight for each feature, the gate's and what it is for, which
lies behind all gates. A program takes as many of the one as of the other.

Source: Shazeer 2020, arXiv:2002.05202, "GLU Variants Improve Transformer".
"""

import triton
import triton.language as tl


@triton.jit
def weight_rows(tile, num_features, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """[BLOCK_N] int32, the rows of the weight that a program reads, and whether there are such."""
    places = tl.arange(0, BLOCK_N)
    if GATED:
        half: tl.constexpr = BLOCK_N // 2
        features = tile * half + places % half
        return features + places // half * num_features, features < num_features
    features = tile * BLOCK_N + places
    return features, features < num_features


@triton.jit
def through_gate(sums):
    """SiLU of the first half of the rows times the second: [2 * features, rows] to [features, rows]."""
    pairs = tl.permute(tl.reshape(sums, [2, sums.shape[0] // 2, sums.shape[1]]), [1, 2, 0])
    gate, up = tl.split(pairs)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def store_features(out, sums, tile, num_rows, num_features):
    """Write a program's [features, rows], cast, to `out`, [num_rows, num_features]."""
    features = tile * sums.shape[0] + tl.arange(0, sums.shape[0])[:, None]
    rows = tl.arange(0, sums.shape[1])[None, :]
    places = out + rows.to(tl.int64) * num_features + features
    tl.store(places, sums.to(out.dtype.element_ty), mask=(rows < num_rows) & (features < num_features))
