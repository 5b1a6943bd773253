"""Which kernel multiplies a few rows by a weight: what benchmarks/few_rows.py found to be the fastest."""

from torch import Tensor

from kernels.cuda import gemv, skinny_gemm


def few_rows_product(x: Tensor, weight: Tensor, bias: Tensor | None, *, gated: bool = False) -> Tensor | None:
    """
    `kernels.linear.linear` or `gated_linear` by one of our kernels; None where the library is the faster.

    Args:
        x: [num_rows, in_features], of 16 bits.
        weight: [out_features, in_features].
    """
    if len(x) > skinny_gemm.MAX_ROWS or not weight.is_contiguous():
        return None
    out_features, in_features = weight.shape
    kernel = gemv if len(x) <= gemv.MAX_ROWS else skinny_gemm
    config = kernel.config_for(len(x), in_features, out_features, x.dtype, gated)
    return kernel.launch(x, weight, bias, config, gated=gated) if config["use"] else None
