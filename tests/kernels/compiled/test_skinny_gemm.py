"""What the compiler makes of the product of some rows."""

import pytest

from kernels.cuda.skinny_gemm import _skinny_gemm_kernel
from tests.support.compile import MAX_SHARED_BYTES, compile_sm90

SIGNATURE = {"out": "*bf16", "x": "*bf16", "weight": "*bf16", "bias": "*bf16", "parts": "*fp32", "arrivals": "*i32"} | {
    "num_rows": "i32",
    "width": "i32",
    "in_features": "i32:16",
    "x_stride": "i32:16",
}


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize(("block_n", "block_k", "warps", "stages"), [(32, 128, 4, 4), (64, 64, 4, 6), (128, 128, 8, 3)])
def test_the_weight_is_copied_ahead_and_nothing_spills(
    gated: bool, rows: int, block_n: int, block_k: int, warps: int, stages: int
) -> None:
    """
    Weights go to shared memory asynchronously, 16 bytes at a time; 64 of their rows feed a warp group's product.
    """
    blocks = {"ROWS": rows, "BLOCK_N": block_n, "BLOCK_K": block_k, "STAGES": stages, "AHEAD": 4}

    compiled = compile_sm90(
        _skinny_gemm_kernel,
        SIGNATURE,
        blocks | {"GATED": gated, "EARLY": True, "PRECISION": "tf32"},
        warps,
        stages,
    )

    assert 0 == compiled.spills
    assert compiled.shared <= MAX_SHARED_BYTES
    # of the weight and of the rows, once for each stage that is ahead and once in the loop
    pieces = (block_n + rows) * block_k // (8 * 32 * warps)
    assert stages * pieces == compiled.count(", 0x10, ")
    assert (block_n >= 64) == (compiled.count("wgmma.mma_async") > 0)
    # what is asked for before the wait is not waited for
    before = compiled.ptx[: compiled.ptx.index("griddepcontrol.wait")]
    assert "prefetch.global.L2" in before
    assert "cp.async" not in before
