"""Which kernel multiplies a few rows, as tables say."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cuda import gemv, skinny_gemm
from kernels.cuda.few_rows import few_rows_product
from kernels.rms_norm import RowNorm


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """
    What kernels would have been launched with, which are never launched.
    """
    calls: list[dict[str, Any]] = []

    def launch(x: Tensor, weight: Tensor, bias: Tensor | None, config: dict[str, int], **more: Any) -> Tensor:  # noqa: ARG001
        calls.append(more)
        return torch.empty(len(x), len(weight))

    for kernel in (gemv, skinny_gemm):
        monkeypatch.setattr(kernel, "launch", launch)
    return calls


def choose(num_rows: int, dtype: torch.dtype = torch.bfloat16, **more: Any) -> bool:
    x, weight = torch.zeros(num_rows, 64, dtype=dtype), torch.zeros(640, 64, dtype=dtype)
    return few_rows_product(x, weight, None, **more) is not None


NORM = RowNorm(torch.ones(64), 1e-5)


def test_nothing_is_fused_that_nobody_measured(launched: list[dict[str, Any]]) -> None:
    """
    One row of a weight of ordinary size has a kernel of its own, without the norm and the sum around it.
    """
    assert choose(1)
    assert not choose(1, norm=NORM)
    assert not choose(1, residual=torch.zeros(1, 640))
    assert 1 == len(launched)


@pytest.mark.parametrize(
    ("num_rows", "dtype", "fused"), [(1, torch.float16, True), (8, torch.bfloat16, True), (8, torch.float16, False)]
)
def test_rows_that_could_overflow_are_normed_before(
    launched: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, num_rows: int, dtype: torch.dtype, fused: bool
) -> None:
    """
    More than four rows meet the norm's weight in 16 bits before they are scaled: float16 is too narrow for that.
    """
    for kernel in (gemv, skinny_gemm):
        monkeypatch.setattr(kernel, "config_for", lambda *_: {"use": 1, "fuse": 1})

    assert fused == choose(num_rows, dtype, norm=NORM)
    assert choose(num_rows, dtype, residual=torch.zeros(num_rows, 640, dtype=dtype))
    assert (2 if fused else 1) == len(launched)
