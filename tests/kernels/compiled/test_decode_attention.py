"""What the compiler makes of the decode kernel for an H200."""

from typing import Any

import pytest
import torch

from kernels.configs import tuned
from kernels.cuda.decode_attention import _decode_kernel, constants
from tests.support.compile import MAX_SHARED_BYTES, Compiled, compile_sm90

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
}
SIGNATURE = {
    "kv_scales": "*fp32",
    "block_tables": "*i32",
    "slots": "*i32",
    "seq_lens": "*i32",
    "window": "i32",
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
    "turn_stride": "i32:16",
}


def compile_decode(
    head_dim: int,
    dtype: torch.dtype,
    *,
    split: bool = False,
    softcap: bool = False,
    prefix_rows: int = 0,
    newest: bool = False,
    group_size: int = 4,
    **config: int,
) -> Compiled:
    """With the configuration that untuned GPUs get, but for what is given."""
    name = str(dtype).removeprefix("torch.")
    chosen = tuned("decode_attention", head_dim=head_dim, group_size=group_size, dtype=name) | config
    query = torch.empty(1, 2 * group_size, head_dim, dtype=dtype if dtype.itemsize > 1 else torch.bfloat16)
    cache = torch.empty(2, 1, 2, 16, head_dim, device="meta", dtype=dtype)
    signature = SIGNATURE | {"out": TYPES[query.dtype], "query": TYPES[query.dtype]}
    fixed: dict[str, Any] = constants(query, cache, chosen) | {
        "HEADS": chosen["heads"],
        "SOFTCAP": softcap,
        "SCALED": dtype.itemsize == 1,
        "SPLIT": split,
        "PREFIX_ROWS": prefix_rows,
        "EARLY": True,
    }
    splits = dict.fromkeys(("items", "shares", "firsts", "arrivals"), "*i32")
    splits |= dict.fromkeys(("part_outputs", "part_lses"), "*fp32")
    if split:
        signature |= splits
    else:
        fixed |= dict.fromkeys(splits)
    prefixes = {"prefix_rows": "*i32", "prefix_outputs": "*fp32", "prefix_lses": "*fp32"}
    if prefix_rows:
        signature |= prefixes
    else:
        fixed |= dict.fromkeys(prefixes)
    fresh = {"slot_mapping": "*i64", "cos": "*fp32", "sin": "*fp32"}
    if newest:
        signature |= fresh
    else:
        fixed |= dict.fromkeys(fresh) | {"turn_stride": 0}
    if dtype.itemsize > 1:
        fixed["kv_scales"] = None
    return compile_sm90(
        _decode_kernel, signature | {"kv_cache": TYPES[dtype]}, fixed, chosen["warps"], chosen["stages"]
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_keeps_what_it_needs_in_registers(head_dim: int, dtype: torch.dtype) -> None:
    """
    The default configurations spill nothing, and leave room for two thread blocks at least.
    """
    compiled = compile_decode(head_dim, dtype)

    assert 0 == compiled.spills
    assert compiled.shared <= MAX_SHARED_BYTES // 2
    assert compiled.registers * 32 * compiled.num_warps <= 65536 // 2
    assert compiled.count("mma.sync") > 0


@pytest.mark.parametrize(
    "options",
    [
        {"split": True},
        {"softcap": True},
        {"prefix_rows": 128},
        # as tuned for an H200, and with slices
        {"prefix_rows": 128, "tile": 32, "heads": 2, "warps": 2, "stages": 3},
        {"prefix_rows": 64, "split": True, "tile": 32, "slices": 4, "heads": 1, "warps": 4, "stages": 5},
    ],
    ids=str,
)
def test_variants_spill_nothing(options: dict[str, Any]) -> None:
    """
    Splits, caps and what begins behind a shared prefix cost no registers that are not there.
    """
    assert 0 == compile_decode(128, torch.bfloat16, **options).spills


# as tuned for an H200, and for few sequences on it
NEWEST = [
    (64, 7, {"tile": 64, "slices": 1, "heads": 1, "warps": 1, "stages": 5}),
    (64, 4, {"tile": 32, "slices": 1, "heads": 2, "warps": 2, "stages": 3}),
    (128, 4, {"tile": 32, "slices": 1, "heads": 2, "warps": 2, "stages": 3}),
    (64, 7, {"tile": 32, "slices": 1, "heads": 1, "warps": 1, "stages": 5}),
    (128, 4, {"tile": 32, "slices": 1, "heads": 2, "warps": 2, "stages": 4}),
]


@pytest.mark.parametrize(("head_dim", "group_size", "config"), NEWEST)
def test_the_newest_token_costs_no_room(head_dim: int, group_size: int, config: dict[str, int]) -> None:
    """
    To rotate and store it takes no more shared memory, and no more thread blocks fit without it.
    """
    plain, newest = (
        compile_decode(head_dim, torch.bfloat16, split=True, newest=newest, group_size=group_size, **config)
        for newest in (False, True)
    )

    assert 0 == newest.spills
    assert newest.shared <= plain.shared
    assert blocks_that_fit(plain) == blocks_that_fit(newest)


def blocks_that_fit(compiled: Compiled) -> int:
    """Thread blocks of one multiprocessor: its registers are given to warps, eight to each thread at a time."""
    registers = -(-compiled.registers // 8) * 8 * 32 * compiled.num_warps
    # a KiB of each is the system's
    return min(65536 // registers, 233472 // (compiled.shared + 1024))


@pytest.mark.parametrize(("head_dim", "group_size", "config"), [NEWEST[0], NEWEST[2]])
def test_what_is_read_of_the_newest_token_is_asked_for_at_once(
    head_dim: int, group_size: int, config: dict[str, int]
) -> None:
    """
    No load waits for another's result to go through shared memory, and heads are read in the widest pieces.
    """
    compiled = compile_decode(head_dim, torch.bfloat16, newest=True, group_size=group_size, **config)

    lines = compiled.ptx.splitlines()
    loads = [index for index, line in enumerate(lines) if "ld.global" in line]
    assert not any("bar." in line for line in lines[loads[0] : loads[-1]])
    # a length, a slot, the cache's, cosines and sines
    assert sum(".v4" not in lines[index] for index in loads) == 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_the_newest_token_spills_nothing(head_dim: int, dtype: torch.dtype) -> None:
    """
    In the default configurations; with parts and a cap, but in float32, where joining parts takes more by itself.
    """
    full = dtype != torch.float32

    assert 0 == compile_decode(head_dim, dtype, newest=True, split=full, softcap=full).spills


def test_float32_is_not_rounded_to_tf32() -> None:
    """
    Products of float32 take no matrix instructions.
    """
    compiled = compile_decode(64, torch.float32)

    assert 0 == compiled.spills
    assert 0 == compiled.count("mma.sync")


@pytest.mark.parametrize("streams", [{"slices": 4, "heads": 1}, {"slices": 2, "heads": 2}], ids=str)
def test_streams_keep_to_their_warps(streams: dict[str, int]) -> None:
    """
    With a stream for each warp, the loop exchanges nothing among warps: no weights go through shared memory.
    """
    compiled = compile_decode(64, torch.bfloat16, tile=32, warps=4, stages=5, **streams)

    assert 0 == compiled.spills
    assert 0 == compiled.count("stmatrix")
    assert compiled.count("ldmatrix") > 0


def test_reads_sixteen_bytes_at_a_time() -> None:
    """
    Keys and values are copied asynchronously, in the widest pieces there are.
    """
    compiled = compile_decode(128, torch.bfloat16)

    # a tile of 128 tokens by 4 warps: 32 pieces a thread, once before the loop and once in it
    assert 64 == sum("cp.async.cg" in line and "0x10" in line for line in compiled.ptx.splitlines())


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, torch.bfloat16), (128, torch.bfloat16), (128, torch.float8_e4m3fn)]
)
def test_joining_parts_costs_the_loop_nothing(head_dim: int, dtype: torch.dtype) -> None:
    """
    What joins parts takes no more registers than leave room for two thread blocks.
    """
    compiled = compile_decode(head_dim, dtype, split=True)

    assert 0 == compiled.spills
    assert compiled.registers * 32 * compiled.num_warps <= 65536 // 2
