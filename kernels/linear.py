"""
Matrix products with weights laid out once for the device.

On a CPU in float32, oneDNN multiplies by a weight that it has reordered beforehand: up to 3.5
times as fast as `torch.nn.functional.linear` for 1 to 512 rows on AVX2, and a row's result has
the same bits whatever rows stand beside it. Elsewhere the weight stays as it is.

On a GPU few rows in 16 bits go to kernels that read the weight once, where they are the faster.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.activation import silu_mul

# layouts made for one row change the order of the sums from 1 row to 2; those for 32 and more do not
ROWS_HINT = 128
# with AVX-512 a lone row's longer sums are cut in two; those of two rows are not
LONGEST_SUM = 1024
HALVES = (torch.bfloat16, torch.float16)


def pack_weight(weight: Tensor) -> Tensor:
    """
    Lay a weight out for `linear`; the result may be opaque, and replaces the weight.

    Args:
        weight: [out_features, in_features].
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not _can_pack():
        return weight
    return _reorder(weight)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """
    Multiply rows by a weight that went through `pack_weight`.

    Args:
        x: [num_rows, in_features], contiguous, at least one row.
        weight: [out_features, in_features], packed or plain.
        bias: [out_features].

    Returns:
        [num_rows, out_features], the dtype of `x`.
    """
    if weight.layout is torch._mkldnn:  # type: ignore[attr-defined]
        return _multiply_packed(x, weight, bias)
    if x.is_cuda and x.dtype in HALVES:
        from kernels.cuda.few_rows import few_rows_product

        product = few_rows_product(x, weight, bias)
        if product is not None:
            return product
    return F.linear(x, weight, bias)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """
    Multiply rows by a gate and by what it is for at once: SiLU(x @ gate) * (x @ up).

    Args:
        x: As for `linear`.
        weight: [2 * width, in_features], gate then up, packed or plain.
        bias: [2 * width].

    Returns:
        [num_rows, width], the dtype of `x`.
    """
    if x.is_cuda and x.dtype in HALVES:
        from kernels.cuda.few_rows import few_rows_product

        product = few_rows_product(x, weight, bias, gated=True)
        if product is not None:
            return product
    return silu_mul(linear(x, weight, bias))


def _reorder(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
    return packed


def _multiply_packed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.expand(2, -1).contiguous() if len(x) == 1 and x.shape[1] > LONGEST_SUM else x
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(rows, weight, bias, "none", [], "")
    return product[: len(x)]


@cache
def _can_pack() -> bool:
    """Try it: these operators are not part of torch's public face."""
    x, weight, bias = torch.eye(3, 16), torch.arange(128.0).view(8, 16), torch.ones(8)
    try:
        product = _multiply_packed(x, _reorder(weight), bias)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return torch.equal(F.linear(x, weight, bias), product)
