"""Norms and the gate against plain float64."""

import pytest
import torch

from kernels.activation import silu_mul
from kernels.rms_norm import add_rms_norm, rms_norm
from tests.support.numerics import assert_near

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 64), (3, 576), (33, 80), (5, 4, 96)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_equals_float64(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """
    Every row comes out with its root mean square scaled to the weight.
    """
    torch.manual_seed(0)
    x, weight = torch.randn(shape, dtype=dtype) * 3, torch.rand(shape[-1], dtype=dtype)

    truth = x.double()
    expected = truth / torch.sqrt(truth.square().mean(-1, keepdim=True) + 1e-5) * weight.double()

    assert_near(expected, rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_keeps_the_sum_in_the_residual(dtype: torch.dtype) -> None:
    """
    The residual holds the sum afterwards, and the result is its norm.
    """
    torch.manual_seed(1)
    x, residual = torch.randn(7, 96, dtype=dtype), torch.randn(7, 96, dtype=dtype)
    weight, total = torch.rand(96, dtype=dtype), x + residual

    normed = add_rms_norm(x, residual, weight, 1e-5)

    assert torch.equal(total, residual)
    assert torch.equal(rms_norm(total, weight, 1e-5), normed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_equals_float64(dtype: torch.dtype) -> None:
    """
    The up half is multiplied by gate * sigmoid(gate).
    """
    torch.manual_seed(2)
    gate_up = torch.randn(9, 2 * 72, dtype=dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)

    assert_near(gate * torch.sigmoid(gate) * up, silu_mul(gate_up))
