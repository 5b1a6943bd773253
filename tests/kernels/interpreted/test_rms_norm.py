"""The norm kernels in Triton's interpreter, against float64."""

import pytest
import torch

from kernels.cuda.rms_norm import add_rms_norm_triton, rms_norm_triton
from tests.support.elementwise import EPS, cut_off, normed
from tests.support.numerics import assert_near

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (3, 896), (2, 4096), (2, 8192), (2, 3, 80)])
def test_rms_norm_equals_float64(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """
    Every row comes out with its root mean square scaled to the weight, whatever the row's length.
    """
    torch.manual_seed(0)
    x, weight = torch.randn(shape, dtype=dtype) * 3, torch.rand(shape[-1], dtype=dtype)

    out = rms_norm_triton(x, weight, EPS)

    assert out.is_contiguous()
    assert_near(normed(x, weight), out, cut_off(dtype, 2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_lie_apart(dtype: torch.dtype) -> None:
    """
    Rows of a wider tensor are read where they are; what stands between them is not.
    """
    torch.manual_seed(1)
    wide = torch.full((4, 200), torch.nan, dtype=dtype)
    x, residual = wide[:, :96], wide[:, 104:200]
    x.copy_(torch.randn(4, 96))
    residual.copy_(torch.randn(4, 96))
    weight, total = torch.rand(96, dtype=dtype), (x.float() + residual.float()).to(dtype)
    tolerance = cut_off(dtype, 3)

    assert_near(normed(x, weight), rms_norm_triton(x, weight, EPS), tolerance)
    assert_near(normed(total, weight), add_rms_norm_triton(x, residual, weight, EPS), tolerance)
    assert_near(total.double(), residual)
    assert bool(wide[:, 96:104].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [64, 896, 8192])
def test_add_rms_norm_keeps_the_sum_in_the_residual(dtype: torch.dtype, hidden: int) -> None:
    """
    The residual holds the sum afterwards, the result is its norm, and `x` is as it was.
    """
    torch.manual_seed(2)
    x, residual = torch.randn(3, hidden, dtype=dtype), torch.randn(3, hidden, dtype=dtype)
    weight, before, total = torch.rand(hidden, dtype=dtype), x.clone(), x.double() + residual.double()

    out = add_rms_norm_triton(x, residual, weight, EPS)

    assert torch.equal(before, x)
    assert_near(total, residual)
    # of the sum as it was kept: that rounding is not the norm's
    assert_near(normed(residual, weight), out, cut_off(dtype, 2))


def test_no_rows_are_no_work() -> None:
    """
    An empty batch gives an empty result.
    """
    assert (0, 64) == rms_norm_triton(torch.empty(0, 64), torch.ones(64), EPS).shape
