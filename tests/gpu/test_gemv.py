"""The product of a few rows on the card, against float64."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from kernels.cuda.gemv import default_config, gated_gemv_triton, gemv_triton, launch
from kernels.linear import gated_linear, linear
from tests.support.numerics import assert_near, gated_product, product

DTYPES = [torch.bfloat16, torch.float16]
SHAPES = [(1152, 896), (896, 896), (9728, 896), (896, 4864), (6144, 4096), (4096, 4096), (4096, 14336), (131, 1000)]


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN: what a kernel forgets to write is seen. The library's products are refused meanwhile."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4])
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_equals_float64(dtype: torch.dtype, num_rows: int, out_features: int, in_features: int) -> None:
    """
    The kernel's product, and what `linear` chooses, are the truth but for one rounding.
    """
    torch.manual_seed(0)
    x, weight = random(num_rows, in_features, dtype=dtype), random(out_features, in_features, dtype=dtype)
    bias = random(out_features, dtype=dtype)
    truth = product(x, weight, bias)

    with poisoned_memory():
        out = gemv_triton(x, weight, bias)
    assert_near(truth, out)
    assert_near(truth, linear(x, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize(("width", "in_features"), [(4864, 896), (14336, 4096), (131, 1000)])
def test_a_gated_product_equals_float64(dtype: torch.dtype, num_rows: int, width: int, in_features: int) -> None:
    """
    Gate and what it is for at once, by the kernel and by what `gated_linear` chooses.
    """
    torch.manual_seed(5)
    x, weight = random(num_rows, in_features, dtype=dtype), random(2 * width, in_features, dtype=dtype)
    x /= in_features**0.5
    bias = random(2 * width, dtype=dtype)
    truth = gated_product(x, weight, bias)

    with poisoned_memory():
        out = gated_gemv_triton(x, weight, bias)
    assert_near(truth, out)
    # the composition rounds both before the gate
    assert_near(truth, gated_linear(x, weight, bias), 2e-2 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("early", [0, 1])
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize(("block_n", "block_k", "warps"), [(1, 256, 1), (2, 8192, 4), (16, 512, 2), (4, 2048, 8)])
def test_a_configuration_changes_nothing_but_the_time(
    dtype: torch.dtype, early: int, stages: int, block_n: int, block_k: int, warps: int
) -> None:
    """
    However the weight is cut, the product is the same; rows may lie apart.
    """
    torch.manual_seed(1)
    x = random(2, 4000, dtype=dtype)[:, 64:3664]
    weight, bias = random(1003, 3600, dtype=dtype), random(1003, dtype=dtype)
    config = {"block_n": block_n, "block_k": block_k, "warps": warps, "stages": stages, "early": early}

    with poisoned_memory():
        out = launch(x, weight, bias, config)
    assert_near(product(x, weight, bias), out)


def test_weights_past_two_billion_elements_are_addressed() -> None:
    """
    The last output features of a huge weight are right.
    """
    torch.manual_seed(2)
    weight = torch.zeros((1 << 31) // 4096 + 8, 4096, dtype=torch.bfloat16, device="cuda")
    x, last = random(1, 4096, dtype=torch.bfloat16), random(8, 4096, dtype=torch.bfloat16)
    weight[-8:] = last

    out = gemv_triton(x, weight)

    assert_near(x.double() @ last.double().T, out[:, -8:])
    assert 0 == out[:, :-8].count_nonzero().item()


def test_a_graph_replays_with_new_rows() -> None:
    """
    Nothing of the rows is kept by the launch: a replay multiplies what stands in them then.
    """
    torch.manual_seed(3)
    x, weight = random(1, 896, dtype=torch.bfloat16), random(1152, 896, dtype=torch.bfloat16)
    bias = random(1152, dtype=torch.bfloat16)
    linear(x, weight, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = linear(x, weight, bias)
    x.copy_(random(1, 896, dtype=torch.bfloat16))

    graph.replay()

    assert_near(product(x, weight, bias), out)


@pytest.mark.parametrize("captured", [False, True])
def test_an_early_start_waits_for_the_rows(captured: bool) -> None:
    """
    A chain whose every product takes the one before as its rows is right, again and again.
    """
    torch.manual_seed(4)
    weights = [random(896, 896, dtype=torch.float16) / 30 for _ in range(24)]
    x = random(1, 896, dtype=torch.float16)
    config = default_config(1, 896, 896)

    def chain(early: int) -> Tensor:
        rows = x
        for weight in weights:
            rows = launch(rows.clone(), weight, None, config | {"early": early})
        return rows

    expected = chain(0)
    again = chain(1)
    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            again = chain(1)

    for _ in range(100):
        if captured:
            graph.replay()
        else:
            again = chain(1)
        assert torch.equal(expected, again)
