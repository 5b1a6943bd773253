"""The product of a few rows in Triton's interpreter, against float64."""

import pytest
import torch

from kernels.cuda.gemv import Config, config_for, default_config, gated_gemv_triton, gemv_triton, launch
from tests.support.numerics import assert_near, gated_product, product

DTYPES = [torch.float32, torch.float16]
SMALL = {"block_n": 4, "block_k": 256, "warps": 1, "stages": 1, "early": 0}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4])
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 8), (5, 63), (17, 300), (8, 896)])
def test_equals_float64(dtype: torch.dtype, num_rows: int, out_features: int, in_features: int) -> None:
    """
    Rows of any length give every output feature, with and without bias.
    """
    torch.manual_seed(0)
    x, weight = torch.randn(num_rows, in_features, dtype=dtype), torch.randn(out_features, in_features, dtype=dtype)
    bias = torch.randn(out_features, dtype=dtype)

    assert_near(product(x, weight), gemv_triton(x, weight))
    assert_near(product(x, weight, bias), gemv_triton(x, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize(("width", "in_features"), [(1, 8), (5, 63), (17, 300)])
def test_a_gated_product_equals_float64(dtype: torch.dtype, num_rows: int, width: int, in_features: int) -> None:
    """
    Gate and what it is for are multiplied at once, with and without bias.
    """
    torch.manual_seed(4)
    x, weight = torch.randn(num_rows, in_features, dtype=dtype), torch.randn(2 * width, in_features, dtype=dtype)
    bias = torch.randn(2 * width, dtype=dtype)

    assert_near(gated_product(x, weight), gated_gemv_triton(x, weight))
    assert_near(gated_product(x, weight, bias), launch(x, weight, bias, SMALL, gated=True))


@pytest.mark.parametrize(
    "config", [SMALL, SMALL | {"block_n": 1, "block_k": 1024}, SMALL | {"block_n": 16, "stages": 3}]
)
def test_a_configuration_changes_nothing_but_the_time(config: Config) -> None:
    """
    However the weight is cut, the product is the same.
    """
    torch.manual_seed(1)
    x, weight, bias = torch.randn(2, 560), torch.randn(21, 560), torch.randn(21)

    assert_near(product(x, weight, bias), launch(x, weight, bias, config))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_lie_apart(dtype: torch.dtype) -> None:
    """
    Rows of a wider tensor are read where they are; what stands between them is not.
    """
    torch.manual_seed(2)
    wide = torch.full((3, 200), torch.nan, dtype=dtype)
    x, weight = wide[:, 8:128], torch.randn(9, 120, dtype=dtype)
    x.copy_(torch.randn(3, 120))

    assert_near(product(x, weight), gemv_triton(x, weight))


def test_only_what_belongs_to_the_weight_is_read() -> None:
    """
    NaN before and after the weight and the bias never reaches the product.
    """
    torch.manual_seed(3)
    memory, biases = torch.full((11, 96), torch.nan), torch.full((11,), torch.nan)
    weight, bias = memory[2:9], biases[2:9]
    weight.copy_(torch.randn(7, 96))
    bias.copy_(torch.randn(7))
    x = torch.randn(1, 96)

    assert_near(product(x, weight, bias), launch(x, weight, bias, SMALL))


@pytest.mark.parametrize(
    ("num_rows", "in_features", "out_features", "use"),
    [
        (1, 896, 1152, 1),
        (1, 14336, 4096, 1),
        (2, 896, 1152, 0),
        (1, 4096, 128256, 0),
        (1, 900, 64, 0),
    ],
)
def test_an_unmeasured_shape_has_a_sound_configuration(
    num_rows: int, in_features: int, out_features: int, use: int
) -> None:
    """
    One row of an ordinary weight is the kernel's; many rows, huge weights and rows at odd addresses are not.
    """
    config = default_config(num_rows, in_features, out_features)

    assert use == config["use"]
    assert config["block_k"] % (256 * config["warps"]) == 0
    assert config.keys() <= config_for(num_rows, in_features, out_features, torch.bfloat16, False).keys()
