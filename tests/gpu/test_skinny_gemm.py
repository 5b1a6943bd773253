"""The product of some rows on the card, against float64."""

import itertools

import pytest
import torch
from torch import Tensor

from kernels.cuda.skinny_gemm import DEFAULT, launch, skinny_gemm_triton
from kernels.linear import gated_linear, linear
from tests.support.numerics import assert_near, gated_product, product

DTYPES = [torch.bfloat16, torch.float16]
SHAPES = [(1152, 896), (896, 4864), (4096, 4096), (131, 1000)]
CUTS = list(itertools.product((16, 64, 128), (64, 128), (1, 4)))


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [5, 16, 24, 32, 64])
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_equals_float64(dtype: torch.dtype, num_rows: int, out_features: int, in_features: int) -> None:
    """
    The kernel's product, and what `linear` chooses, are the truth but for one rounding.
    """
    torch.manual_seed(0)
    x, weight = random(num_rows, in_features, dtype=dtype), random(out_features, in_features, dtype=dtype)
    bias = random(out_features, dtype=dtype)
    truth = product(x, weight, bias)

    assert_near(truth, skinny_gemm_triton(x, weight, bias))
    assert_near(truth, linear(x, weight, bias))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("block_n", "block_k", "splits"), CUTS)
def test_a_configuration_changes_nothing_but_the_time(gated: bool, block_n: int, block_k: int, splits: int) -> None:
    """
    However the weight is cut, the product is the same, with the same bits every time; rows may lie apart.
    """
    torch.manual_seed(1)
    x = random(23, 4000, dtype=torch.bfloat16)[:, 64:3664] / 60
    weight, bias = random(1006, 3600, dtype=torch.bfloat16), random(1006, dtype=torch.bfloat16)
    config = DEFAULT | {"block_n": block_n, "block_k": block_k, "splits": splits, "stages": 3}
    truth = (gated_product if gated else product)(x, weight, bias)

    first = launch(x, weight, bias, config, gated=gated)

    assert_near(truth, first)
    for _ in range(20):
        assert torch.equal(first, launch(x, weight, bias, config, gated=gated))


@pytest.mark.parametrize("num_rows", [8, 32])
def test_a_gated_product_is_chosen_right(num_rows: int) -> None:
    """
    What `gated_linear` chooses is the truth but for the rounding before the gate.
    """
    torch.manual_seed(2)
    x, weight = random(num_rows, 896, dtype=torch.bfloat16) / 30, random(9728, 896, dtype=torch.bfloat16)

    assert_near(gated_product(x, weight), gated_linear(x, weight), 2e-2)


@pytest.mark.parametrize("captured", [False, True])
def test_a_chain_that_starts_early_is_right(captured: bool) -> None:
    """
    Every product takes the one before as its rows, and all share the counters of what is split.
    """
    torch.manual_seed(3)
    weights = [random(896, 896, dtype=torch.float16) / 30 for _ in range(24)]
    x = random(32, 896, dtype=torch.float16)
    config = DEFAULT | {"splits": 4, "block_n": 32}

    def chain() -> Tensor:
        rows = x
        for weight in weights:
            rows = launch(rows, weight, None, config)
        return rows

    truth = x.double()
    for weight in weights:
        truth = (truth @ weight.double().T).half().double()
    again = first = chain()
    assert_near(truth, first, 2e-2)
    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            again = chain()

    for _ in range(100):
        if captured:
            graph.replay()
        else:
            again = chain()
        assert torch.equal(first, again)
