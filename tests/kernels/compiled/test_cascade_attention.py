"""What the compiler makes of the pass over shared prefixes for an H200."""

from typing import Any

import pytest
import torch

from kernels.cascade_attention import CascadeLayout, cascade_config
from kernels.cuda.cascade_attention import _prefix_kernel, constants
from tests.support.compile import MAX_SHARED_BYTES, Compiled, compile_sm90

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
}
SIGNATURE = {
    "outputs": "*fp32",
    "lses": "*fp32",
    "kv_scales": "*fp32",
    "block_tables": "*i32",
    "items": "*i32",
    "members": "*i32",
    "scale": "fp32",
    "softcap": "fp32",
    "query_seq_stride": "i32:16",
    "query_head_stride": "i32:16",
    "cache_half_stride": "i64:16",
    "cache_block_stride": "i32:16",
    "cache_head_stride": "i32:16",
    "cache_token_stride": "i32:16",
    "scale_half_stride": "i32:16",
    "scale_block_stride": "i32:16",
    "scale_head_stride": "i32:16",
    "table_stride": "i32",
}


def compile_prefix(
    head_dim: int, group_size: int, dtype: torch.dtype, *, softcap: bool = False, **config: int
) -> Compiled:
    """With the configuration that untuned GPUs get, but for what is given."""
    chosen = cascade_config(head_dim, group_size, dtype) | config
    layout = CascadeLayout(1, 2, chosen["rows"], chosen["rows"] // group_size, chosen["tile"], 1)
    query = torch.empty(1, 2 * group_size, head_dim, dtype=dtype if dtype.itemsize > 1 else torch.bfloat16)
    cache = torch.empty(2, 1, 2, 16, head_dim, device="meta", dtype=dtype)
    fixed: dict[str, Any] = constants(query, cache, layout) | {"SOFTCAP": softcap, "SCALED": dtype.itemsize == 1}
    fixed["EARLY"] = True
    if dtype.itemsize > 1:
        fixed["kv_scales"] = None
    signature = SIGNATURE | {"query": TYPES[query.dtype], "kv_cache": TYPES[dtype]}
    return compile_sm90(_prefix_kernel, signature, fixed, chosen["warps"], chosen["stages"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("head_dim", "group_size"), [(64, 7), (80, 1), (96, 8), (128, 4), (256, 2)])
def test_keeps_what_it_needs_in_registers(head_dim: int, group_size: int, dtype: torch.dtype) -> None:
    """
    The default configurations spill nothing, run as many at once as they say, and take the large products.
    """
    compiled = compile_prefix(head_dim, group_size, dtype)

    together = cascade_config(head_dim, group_size, dtype)["programs"] // 132
    assert 0 == compiled.spills
    assert together * compiled.shared <= MAX_SHARED_BYTES
    assert together * compiled.registers * 32 * compiled.num_warps <= 65536
    assert compiled.count("wgmma.mma_async") > 0


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("tile", [32, 64, 128])
def test_other_tiles_spill_nothing(rows: int, tile: int) -> None:
    """
    Those that a sweep may choose.
    """
    compiled = compile_prefix(128, 4, torch.bfloat16, rows=rows, tile=tile, warps=rows // 16, stages=2)

    assert 0 == compiled.spills
    assert compiled.shared <= MAX_SHARED_BYTES


def test_a_cap_spills_nothing() -> None:
    """
    Caps cost no registers that are not there.
    """
    assert 0 == compile_prefix(128, 4, torch.bfloat16, softcap=True).spills


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_float32_is_not_rounded_to_tf32(head_dim: int) -> None:
    """
    Products of float32 take no matrix instructions.
    """
    compiled = compile_prefix(head_dim, 4, torch.float32)

    assert 0 == compiled.spills
    assert 0 == compiled.count("mma.sync")
    assert 0 == compiled.count("wgmma")


def test_reads_sixteen_bytes_at_a_time() -> None:
    """
    Keys and values are copied asynchronously, in the widest pieces there are.
    """
    compiled = compile_prefix(128, 4, torch.bfloat16)

    assert 0 < sum("cp.async.cg" in line and "0x10" in line for line in compiled.ptx.splitlines())
