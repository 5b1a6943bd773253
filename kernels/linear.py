"""
Matrix products with weights laid out once for the device.

On a CPU in float32, oneDNN multiplies by a weight that it has reordered beforehand: up to 3.5
times as fast as `torch.nn.functional.linear` for 1 to 512 rows on AVX2, and a row's result has
the same bits whatever rows stand beside it. Elsewhere the weight stays as it is.

On a GPU a row or a few in 16 bits go to a kernel that reads the weight once, where it is the faster.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

# layouts made for one row change the order of the sums from 1 row to 2; those for 32 and more do not
ROWS_HINT = 128
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
        return _multiply_halves(x, weight, bias)
    return F.linear(x, weight, bias)


def _multiply_halves(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    from kernels.cuda.gemv import MAX_ROWS, config_for, launch

    if len(x) <= MAX_ROWS and weight.is_contiguous():
        out_features, in_features = weight.shape
        config = config_for(len(x), in_features, out_features, x.dtype)
        if config["use"]:
            return launch(x, weight, bias, config)
    return F.linear(x, weight, bias)


def _reorder(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
    return packed


def _multiply_packed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return product


@cache
def _can_pack() -> bool:
    """Try it: these operators are not part of torch's public face."""
    x, weight, bias = torch.eye(3, 16), torch.arange(128.0).view(8, 16), torch.ones(8)
    try:
        product = _multiply_packed(x, _reorder(weight), bias)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return torch.equal(F.linear(x, weight, bias), product)
