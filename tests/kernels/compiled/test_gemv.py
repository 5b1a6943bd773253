"""What the compiler makes of the product of a few rows."""

import pytest

from kernels.cuda.gemv import _gemv_kernel, default_config
from tests.support.compile import compile_sm90

SIGNATURE = {"out": "*bf16", "x": "*bf16", "weight": "*bf16", "bias": "*bf16"} | {
    "num_rows": "i32",
    "out_features": "i32",
    "in_features": "i32:16",
    "x_stride": "i32:16",
}


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 4])
@pytest.mark.parametrize(
    ("in_features", "out_features"), [(896, 1152), (896, 896), (4864, 896), (4096, 6144), (14336, 4096)]
)
def test_the_weight_is_read_wide_and_nothing_spills(
    early: bool, num_rows: int, in_features: int, out_features: int
) -> None:
    """
    Every load takes 16 bytes, threads keep what they loaded, and sums meet at the end.
    """
    config = default_config(num_rows, in_features, out_features)
    columns, spans = config["block_n"], config["block_k"] // (256 * config["warps"])
    blocks = {"ROWS": num_rows, "BLOCK_N": columns, "BLOCK_K": config["block_k"], "STAGES": 1, "GATED": False}
    blocks["EARLY"] = early

    compiled = compile_sm90(_gemv_kernel, SIGNATURE, blocks, config["warps"], 1)

    assert 0 == compiled.spills
    assert compiled.registers <= 128
    before_sums = compiled.ptx[: compiled.ptx.index("shfl.sync")]
    # of the first piece, and of the loop over those that follow
    assert 2 * spans * (columns + num_rows) == before_sums.count(".v4.b32") == before_sums.count("ld.global")
    assert 0 == before_sums.count("bar.sync") == before_sums.count("st.shared")
    # weights are asked for before the wait, rows after it
    parts = before_sums.split("griddepcontrol.wait")
    assert 1 + early == len(parts)
    assert not early or spans * columns == parts[0].count("ld.global")


@pytest.mark.parametrize("num_rows", [1, 4])
def test_a_gate_spills_nothing(num_rows: int) -> None:
    """
    A gated product has its first weights on the way before the wait too.
    """
    config = default_config(num_rows, 896, 9728)
    blocks = {"ROWS": num_rows, "BLOCK_N": config["block_n"], "BLOCK_K": config["block_k"], "STAGES": 1}

    compiled = compile_sm90(_gemv_kernel, SIGNATURE, blocks | {"GATED": True, "EARLY": True}, config["warps"], 1)

    assert 0 == compiled.spills
    assert 0 < compiled.ptx.split("griddepcontrol.wait")[0].count(".v4.b32")


def test_stages_load_ahead_into_shared_memory() -> None:
    """
    With stages the same loads are asynchronous, and as wide.
    """
    blocks = {"ROWS": 1, "BLOCK_N": 4, "BLOCK_K": 1024, "STAGES": 4, "GATED": False, "EARLY": False}

    compiled = compile_sm90(_gemv_kernel, SIGNATURE, blocks, 4, 4)

    assert 0 == compiled.spills
    assert 0 < compiled.count("cp.async.cg.shared.global") == compiled.count(", 0x10, ")
