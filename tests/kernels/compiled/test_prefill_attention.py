"""What the compiler makes of prefill attention's kernels: matrix units, shared memory, no spills."""

import json
import subprocess
import sys

import pytest

from kernels.configs import tuned
from tests.support.compile import MAX_SHARED_BYTES

# a compiler's assertion ends its process, so each kernel is compiled in one of its own
_COMPILE = """
import json, sys
import triton.language as tl
from kernels.cuda import prefill_attention as kernels
from tests.support.compile import compile_sm90

name, constants, warps, stages = json.loads(sys.argv[1])
kernel = getattr(kernels, name)
types = {f"{x}_ptr": "*bf16" for x in ("query", "key", "value", "out")} | {"query_start": "*i32", "key_start": "*i32"}
types |= {f"{x}_{y}": "i32:16" for x in ("query", "key", "value", "out") for y in ("token", "head")}
types |= {"group_size": "i32", "window": "i32", "scale_log2": "fp32", "cap_in": "fp32", "cap": "fp32"}
made = compile_sm90(kernel, types, constants | {"CDT": tl.bfloat16}, warps, stages)
counts = {x: made.count(x) for x in ("wgmma.mma_async", "cp.async.bulk.tensor", "cp.async.cg")}
print(json.dumps({"shared": made.shared, "spills": made.spills} | counts))
"""


def compiled(kernel: str, head_dim: int, *, window: bool = False, cap: bool = False) -> dict[str, int]:
    """Compile "plain" or "tma" as `kernels/tuned` has it."""
    padded = max(16, 1 << (head_dim - 1).bit_length())
    config = tuned("prefill_attention", padded_dim=padded, group_size=4, dtype="bfloat16")
    rows, keys, warps, stages = (config[f"{kernel}_{name}"] for name in ("rows", "keys", "warps", "stages"))
    constants = {"D": head_dim, "DP": padded, "BM": rows, "BN": keys, "HAS_WINDOW": window, "HAS_CAP": cap}
    constants |= {} if kernel == "tma" else {"PRECISION": "ieee"}
    argument = json.dumps([f"_{kernel}_kernel", constants, warps, stages])
    done = subprocess.run([sys.executable, "-c", _COMPILE, argument], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("head_dim", [64, 128])
def test_pointers_feed_the_matrix_units(head_dim: int) -> None:
    """
    The plain kernel multiplies by wgmma from tiles that asynchronous copies bring.
    """
    made = compiled("plain", head_dim)
    assert made["wgmma.mma_async"] > 0
    assert made["cp.async.cg"] > 0
    assert made["shared"] <= MAX_SHARED_BYTES
    assert made["spills"] == 0


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_descriptors_feed_the_matrix_units(head_dim: int) -> None:
    """
    The other multiplies by wgmma from tiles that the TMA engine brings.
    """
    made = compiled("tma", head_dim)
    assert made["wgmma.mma_async"] > 0
    assert made["cp.async.bulk.tensor"] > 0
    assert made["shared"] <= MAX_SHARED_BYTES
    assert made["spills"] == 0


@pytest.mark.parametrize("kernel", ["plain", "tma"])
def test_a_window_and_a_cap_cost_no_spill(kernel: str) -> None:
    """
    The rarer masks fit into the registers too.
    """
    made = compiled(kernel, 128, window=True, cap=True)
    assert made["wgmma.mma_async"] > 0
    assert made["shared"] <= MAX_SHARED_BYTES
    assert made["spills"] == 0
