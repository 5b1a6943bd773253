"""The gate kernel in Triton's interpreter, against float64."""

import pytest
import torch

from kernels.cuda.activation import BLOCK, silu_mul_triton
from tests.support.elementwise import gated
from tests.support.numerics import assert_near


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 64), (5, 90), (3, BLOCK), (2, 2 * BLOCK + 16)])
def test_silu_mul_equals_float64(dtype: torch.dtype, num_tokens: int, width: int) -> None:
    """
    Each row's second half is multiplied by the SiLU of its first; the input stays.
    """
    torch.manual_seed(0)
    gate_up = torch.randn(num_tokens, 2 * width, dtype=dtype) * 4
    before = gate_up.clone()

    out = silu_mul_triton(gate_up)

    assert out.is_contiguous()
    assert_near(gated(before), out)
    assert torch.equal(before, gate_up)


def test_rows_may_lie_apart() -> None:
    """
    Rows of a wider tensor are read where they are.
    """
    wide = torch.full((3, 80), torch.nan)
    rows = wide[:, :64].copy_(torch.randn(3, 64))

    assert_near(gated(rows), silu_mul_triton(rows))


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_a_gate_far_below_zero_shuts() -> None:
    """
    Where the exponential overflows the result is zero, not NaN.
    """
    gate_up = torch.tensor([[-1e4, -200.0, 200.0, 0.0, 1.0, 2.0, 3.0, 4.0]])

    assert [[0.0, 0.0, 600.0, 0.0]] == silu_mul_triton(gate_up).abs().tolist()
