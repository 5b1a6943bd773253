"""Products with packed weights."""

import pytest
import torch

from kernels.linear import gated_linear, linear, pack_weight
from tests.support.numerics import assert_near, gated_product, product


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 64, 48), (7, 80, 129), (40, 576, 960)])
def test_equals_float64(dtype: torch.dtype, rows: int, inner: int, columns: int) -> None:
    """
    A packed weight gives the product that the plain one stands for, with and without bias.
    """
    torch.manual_seed(0)
    x, weight = torch.randn(rows, inner, dtype=dtype), torch.randn(columns, inner, dtype=dtype)
    bias = torch.randn(columns, dtype=dtype)
    packed = pack_weight(weight)

    assert_near(product(x, weight), linear(x, packed))
    assert_near(product(x, weight, bias), linear(x, packed, bias))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_gated_product_equals_float64(dtype: torch.dtype) -> None:
    """
    SiLU of the gate's product times the other's, with and without bias.
    """
    torch.manual_seed(2)
    x, weight = torch.randn(7, 80, dtype=dtype), torch.randn(2 * 66, 80, dtype=dtype)
    bias = torch.randn(2 * 66, dtype=dtype)
    packed = pack_weight(weight)

    assert_near(gated_product(x, weight), gated_linear(x, packed))
    assert_near(gated_product(x, weight, bias), gated_linear(x, packed, bias))


@pytest.mark.parametrize(("inner", "columns"), [(576, 960), (1536, 576), (80, 129)])
def test_a_row_does_not_depend_on_its_neighbours(inner: int, columns: int) -> None:
    """
    In float32 a row's product has the same bits in a batch of any size.
    """
    torch.manual_seed(1)
    weight, x = torch.randn(columns, inner), torch.randn(600, inner)
    packed = pack_weight(weight)
    if packed is weight:
        pytest.skip("this build of torch does not pack weights")
    together = linear(x, packed)

    different = [
        rows for rows in (1, 2, 3, 7, 16, 31, 33, 64, 257) if not torch.equal(together[:rows], linear(x[:rows], packed))
    ]

    assert [] == different
