"""The product of some rows in Triton's interpreter, against float64."""

import pytest
import torch

from kernels.cuda.skinny_gemm import DEFAULT, Config, config_for, launch, padded, skinny_gemm_triton
from tests.support.numerics import assert_near, gated_product, product

DTYPES = [torch.float32, torch.float16]
SMALL = DEFAULT | {"block_n": 16, "block_k": 32}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "rows"), [(5, 16), (16, 16), (17, 32), (64, 64)])
@pytest.mark.parametrize(("out_features", "in_features"), [(3, 24), (70, 200)])
def test_equals_float64(dtype: torch.dtype, num_rows: int, rows: int, out_features: int, in_features: int) -> None:
    """
    Any number of rows gives every output feature, with and without bias.
    """
    torch.manual_seed(0)
    x, weight = torch.randn(num_rows, in_features, dtype=dtype), torch.randn(out_features, in_features, dtype=dtype)
    bias = torch.randn(out_features, dtype=dtype)

    assert rows == padded(num_rows)
    assert_near(product(x, weight), skinny_gemm_triton(x, weight))
    assert_near(product(x, weight, bias), skinny_gemm_triton(x, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 8, 37])
@pytest.mark.parametrize("splits", [1, 3])
def test_a_gated_product_equals_float64(dtype: torch.dtype, width: int, splits: int) -> None:
    """
    Gate and what it is for are multiplied at once, with and without bias.
    """
    torch.manual_seed(1)
    x, weight = torch.randn(9, 104, dtype=dtype), torch.randn(2 * width, 104, dtype=dtype)
    bias = torch.randn(2 * width, dtype=dtype)
    config = SMALL | {"splits": splits}

    assert_near(gated_product(x, weight), launch(x, weight, None, config, gated=True))
    assert_near(gated_product(x, weight, bias), launch(x, weight, bias, config, gated=True))


@pytest.mark.parametrize(
    "config",
    [
        SMALL | {"splits": 2},
        # the last has nothing left
        SMALL | {"splits": 7, "block_k": 64},
        SMALL | {"block_n": 64, "block_k": 256, "splits": 4},
    ],
)
def test_a_configuration_changes_nothing_but_the_time(config: Config) -> None:
    """
    However the weight is cut, the product is the same; and again, for all arrivals were counted down.
    """
    torch.manual_seed(2)
    x, weight, bias = torch.randn(6, 300), torch.randn(45, 300), torch.randn(45)

    for _ in range(2):
        assert_near(product(x, weight, bias), launch(x, weight, bias, config))


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_what_belongs_to_rows_and_weight_is_read(dtype: torch.dtype) -> None:
    """
    NaN between the rows, and before and after the weight and the bias, never reaches the product.
    """
    torch.manual_seed(3)
    wide = torch.full((9, 200), torch.nan, dtype=dtype)
    memory, biases = torch.full((11, 96), torch.nan, dtype=dtype), torch.full((11,), torch.nan, dtype=dtype)
    x, weight, bias = wide[:, 8:104], memory[2:9], biases[2:9]
    for part in (x, weight, bias):
        part.copy_(torch.randn(part.shape))

    assert_near(product(x, weight, bias), skinny_gemm_triton(x, weight, bias))


def test_what_nobody_measured_is_left_to_the_library() -> None:
    """
    There is a configuration for any shape, but it is not used unasked.
    """
    assert 0 == config_for(32, 1234, 5678, torch.bfloat16, False)["use"]
