"""What the sweep of products of few rows tries."""

import pytest

from benchmarks.few_rows import candidates, kernel_for
from kernels.cuda import gemv, skinny_gemm


@pytest.mark.parametrize(("num_rows", "whole"), [(1, gemv.default_config(1, 896, 896)), (32, skinny_gemm.DEFAULT)])
def test_a_candidate_has_all_that_a_launch_asks_for(num_rows: int, whole: dict[str, int]) -> None:
    """
    Also what is asked for on a GPU alone.
    """
    found = candidates(num_rows)

    assert found
    assert all(whole.keys() - {"use"} == config.keys() for config in found), kernel_for(num_rows)
