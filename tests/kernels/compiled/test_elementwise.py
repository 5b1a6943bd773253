"""What the compiler makes of the memory-bound kernels for an H200: wide loads and no spills."""

from typing import Any

import pytest
import triton

from kernels.cuda import activation, copy_blocks, gather_kv, rms_norm, rope
from tests.support.compile import Compiled, compile_sm90


def count_wide(compiled: Compiled, kind: str) -> int:
    """Loads ("ld") or stores ("st") of 16 bytes."""
    return sum(
        f"{kind}.global" in line and (".v4.b32" in line or ".v2.b64" in line) for line in compiled.ptx.splitlines()
    )


def assert_lean(compiled: Compiled, max_registers: int, num_loads: int, num_stores: int) -> None:
    assert 0 == compiled.spills
    # what decides how many programs run at once, and so how many bytes are under way
    assert compiled.registers <= max_registers
    assert count_wide(compiled, "ld") >= num_loads
    assert count_wide(compiled, "st") >= num_stores


@pytest.mark.parametrize("hidden", [896, 4096, 8192])
def test_norms_load_wide(hidden: int) -> None:
    """
    A row is loaded, kept in registers and stored in pieces of 16 bytes, however long.
    """
    block, num_warps = rms_norm._tile(hidden)
    signature = dict.fromkeys(["x", "residual", "weight", "out"], "*bf16")
    signature |= dict.fromkeys(["x_stride", "residual_stride", "hidden"], "i32:16") | {"eps": "fp32"}

    compiled = compile_sm90(rms_norm._add_rms_norm_kernel, signature, {"BLOCK": block, "EARLY": True}, num_warps)

    pieces = block // (num_warps * 32 * 8)
    assert_lean(compiled, max_registers=96, num_loads=3 * pieces, num_stores=2 * pieces)


def test_the_gate_loads_wide() -> None:
    """
    One piece of each half a thread.
    """
    signature = {"gate_up": "*bf16", "out": "*bf16", "row_stride": "i32:16", "width": "i32:16", "num_blocks": "i32"}

    compiled = compile_sm90(activation._silu_mul_kernel, signature, {"BLOCK": activation.BLOCK, "EARLY": True})

    assert_lean(compiled, max_registers=40, num_loads=2, num_stores=1)


def compile_rope(head_dim: int, rotary_dim: int, *, norms: bool, float8: bool) -> Compiled:
    signature = dict.fromkeys(["qkv", "query_weight", "key_weight"], "*bf16")
    signature |= {"cos": "*fp32", "sin": "*fp32", "slot_mapping": "*i64", "eps": "fp32"}
    signature |= {"kv_cache": "*fp8e4nv", "kv_scales": "*fp32"} if float8 else {"kv_cache": "*bf16"}
    signature |= dict.fromkeys(["num_rows", "num_heads", "num_kv_heads"], "i32")
    strides = ["qkv", "cos", "sin", *(f"cache_{part}" for part in ("part", "block", "head", "token"))]
    signature |= {f"{name}_stride": "i32:16" for name in (*strides, "scale_part", "scale_block", "scale_head")}
    half, tail = rotary_dim // 2, head_dim - rotary_dim
    half_pad, tail_pad = triton.next_power_of_2(half), triton.next_power_of_2(tail) if tail else 0
    rows = rope.TILE // triton.next_power_of_2(2 * half_pad + tail_pad)
    constexprs: dict[str, Any] = {"HEAD_DIM": head_dim, "HALF": half, "BLOCK_SIZE": 16, "ROWS": rows, "EARLY": True}
    constexprs |= {"HALF_PAD": half_pad, "TAIL_PAD": tail_pad}
    if not norms:
        constexprs |= {"query_weight": None, "key_weight": None}
    if not float8:
        constexprs |= {"kv_scales": None}
    return compile_sm90(rope._rope_and_store_kernel, signature, constexprs, rope.NUM_WARPS)


@pytest.mark.parametrize(
    ("head_dim", "norms", "float8"), [(128, False, False), (128, True, True), (64, False, False), (80, False, False)]
)
def test_rotation_loads_wide(head_dim: int, norms: bool, float8: bool) -> None:
    """
    Halves are loaded, turned in registers, and stored twice: in place and in the cache.
    """
    compiled = compile_rope(head_dim, head_dim, norms=norms, float8=float8)

    # two of qkv and four of angles; two in place, and two in the cache where it is as wide
    assert_lean(compiled, max_registers=64, num_loads=6, num_stores=2 if float8 else 4)


def test_partial_rotation_keeps_its_registers() -> None:
    """
    With three narrow parts a head, norms and a float8 cache nothing is spilled.
    """
    assert_lean(compile_rope(80, 32, norms=True, float8=True), max_registers=96, num_loads=3, num_stores=1)


@pytest.mark.parametrize("float8", [False, True])
def test_pages_are_loaded_wide(float8: bool) -> None:
    """
    Keys and values in pieces of 16 bytes, all under way at once.
    """
    signature = dict.fromkeys(["keys", "values"], "*bf16") | dict.fromkeys(
        ["block_tables", "slots", "key_start"], "*i32"
    )
    signature |= {"kv_cache": "*fp8e4nv", "kv_scales": "*fp32"} if float8 else {"kv_cache": "*bf16"}
    counts = ["num_keys", "num_seqs", "num_halvings", "num_kv_heads", "table_stride"]
    signature |= dict.fromkeys(counts, "i32")
    strides = ["cache_part", "cache_block", "cache_head", "cache_token", "scale_part", "scale_block", "scale_head"]
    signature |= {f"{name}_stride": "i32:16" for name in strides}
    constexprs: dict[str, Any] = {"HEAD_DIM": 128, "BLOCK_SIZE": 16, "TOKENS": gather_kv.TILE // 128, "DIM_PAD": 128}
    if not float8:
        constexprs |= {"kv_scales": None}

    compiled = compile_sm90(gather_kv._gather_kv_kernel, signature, constexprs, gather_kv.NUM_WARPS)

    assert_lean(compiled, max_registers=128, num_loads=2 if float8 else 8, num_stores=8)


@pytest.mark.parametrize("given", ["source_blocks", "target_blocks"])
def test_blocks_are_copied_wide(given: str) -> None:
    """
    Addresses that come from a table are taken for aligned.
    """
    signature = dict.fromkeys(["source_addresses", "target_addresses", given], "*i64")
    signature |= dict.fromkeys(["num_layers", "num_chunks"], "i32")
    strides = [f"{side}_{part}_stride" for side in ("source", "target") for part in ("part", "block")]
    signature |= dict.fromkeys(["piece", *strides], "i32:16")
    missing = {"source_blocks", "target_blocks"} - {given}

    compiled = compile_sm90(
        copy_blocks._copy_blocks_kernel, signature, {"WORDS": copy_blocks.WORDS, **dict.fromkeys(missing)}
    )

    assert_lean(compiled, max_registers=64, num_loads=4, num_stores=4)
