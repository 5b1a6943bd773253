"""Root mean square norm, alone or after adding to the residual stream."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """
    Scale each row of `x` to unit root mean square, then by `weight`.

    Args:
        x: [..., hidden].
        weight: [hidden], the dtype of `x`.
        eps: Added to the mean square before the root.

    Returns:
        [..., hidden], the dtype of `x`. Computed in float32, or on a CPU in float64 for float64; the
        row is cast before it meets the weight, as Llama does.
    """
    if x.is_cuda:
        from kernels.cuda.rms_norm import rms_norm_triton

        return rms_norm_triton(x, weight, eps)
    return rms_norm_reference(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """
    Add `x` to the residual stream in place, and return the norm of the sum.

    Args:
        x: [num_tokens, hidden].
        residual: [num_tokens, hidden]; holds the sum afterwards.
        weight: [hidden].
        eps: Added to the mean square before the root.

    Returns:
        [num_tokens, hidden], as `rms_norm` of the sum.
    """
    if x.is_cuda:
        from kernels.cuda.rms_norm import add_rms_norm_triton

        return add_rms_norm_triton(x, residual, weight, eps)
    return add_rms_norm_reference(x, residual, weight, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows = x if x.dtype == torch.float64 else x.float()
    scale = rows.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (rows * scale).to(x.dtype).mul_(weight)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm_reference(residual.add_(x), weight, eps)
