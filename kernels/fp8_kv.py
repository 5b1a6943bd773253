"""
Keys and values in eight bits: float8_e4m3fn, with a float32 scale for each token and head.

A head's largest magnitude becomes 448, the largest number of the format. Its three bits after the
leading one leave a relative error of 1/16 at most, down to 1/28,672 of the largest. Scales come with
the tokens, so that no calibration is needed and no token changes what another one was stored as.

Source: Micikevicius et al. 2022, arXiv:2209.05433, for the format.
"""

import torch
from torch import Tensor

FP8_MAX = 448.0
# of a head of zeros
LEAST_SCALE = 1e-12


def quantise_kv(heads: Tensor) -> tuple[Tensor, Tensor]:
    """
    Round heads to eight bits.

    Args:
        heads: [..., head_dim].

    Returns:
        [..., head_dim] float8_e4m3fn and [...] float32, what it is multiplied by.
    """
    wide = heads.float()
    scales = (wide.abs().amax(-1) / FP8_MAX).clamp(min=LEAST_SCALE)
    # rounding can pass the largest number by a hair
    return (wide / scales[..., None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scales


def dequantise_kv(stored: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """
    Make numbers of what `quantise_kv` gave.

    Args:
        stored: [..., head_dim] float8_e4m3fn.
        scales: [...] float32.
    """
    return (stored.float() * scales[..., None]).to(dtype)


def as_bytes(cache: Tensor) -> Tensor:
    """The same memory in a dtype that all of torch's indexing takes: not all of it takes float8."""
    return cache.view(torch.uint8) if cache.itemsize == 1 else cache
