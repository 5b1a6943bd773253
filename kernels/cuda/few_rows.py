"""
Which kernel multiplies a few rows by a weight: what benchmarks/few_rows.py found to be the fastest.

Whether it norms its rows and adds to the residual stream too ("fuse") is for whole steps to tell.
"""

import torch
from torch import Tensor

from kernels.cuda import gemv, skinny_gemm
from kernels.rms_norm import RowNorm


def few_rows_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    gated: bool = False,
    norm: RowNorm | None = None,
    residual: Tensor | None = None,
) -> Tensor | None:
    """
    `kernels.linear.linear` or `gated_linear` by one of our kernels; None where the library is the faster.

    Args:
        x: [num_rows, in_features], of 16 bits.
        weight: [out_features, in_features].
        norm: Of the rows, before; None as well where a kernel of its own for it is the faster.
        residual: [num_rows, out_features], contiguous rows; the product is added to it, and it is what is returned.
    """
    if len(x) > skinny_gemm.MAX_ROWS or not weight.is_contiguous():
        return None
    out_features, in_features = weight.shape
    kernel = gemv if len(x) <= gemv.MAX_ROWS else skinny_gemm
    if norm is not None and kernel is skinny_gemm and x.dtype == torch.float16:
        # rows meet the norm's weight before they are scaled, and are rounded in between: too large for these
        return None
    config = kernel.config_for(len(x), in_features, out_features, x.dtype, gated)
    if not config["use"] or (not config["fuse"] and (norm is not None or residual is not None)):
        return None
    product: Tensor = kernel.launch(x, weight, bias, config, gated=gated, norm=norm, residual=residual)
    return product
