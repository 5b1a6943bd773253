"""What the compiler makes of the sampling kernels: wide loads, and all in registers."""

from typing import Any

import pytest

from kernels.cuda import argmax, logprobs, penalties, sampling, token_masks
from tests.support.compile import MAX_SHARED_BYTES, Compiled, compile_sm90

OPTIONS = {
    "slots_ptr": "*i64",
    "temperature_ptr": "*fp32",
    "top_k_ptr": "*i32",
    "top_p_ptr": "*fp32",
    "min_p_ptr": "*fp32",
    "streams_ptr": "*i32",
    "positions_ptr": "*i32",
    "temperature_stride": "i32",
    "top_p_stride": "i32",
    "min_p_stride": "i32",
}
ROWS = {"row_stride": "i32:16", "vocab": "i32:16"}
LISTS = {"counts_ptr": "*i32", "lists_ptr": "*i32"}


def _compile(kernel: Any, signature: dict[str, str], constexprs: dict[str, Any], num_warps: int) -> Compiled:
    compiled = compile_sm90(kernel, ROWS | signature, constexprs, num_warps)
    assert 0 == compiled.spills
    assert compiled.shared <= MAX_SHARED_BYTES
    return compiled


def test_argmax_loads_sixteen_bytes_a_thread_and_keeps_threads_many() -> None:
    """
    Two loads are on their way in each of over a thousand threads of a multiprocessor.
    """
    compiled = _compile(
        argmax._argmax_kernel,
        {"logits_ptr": "*bf16", "picked_ptr": "*i64"},
        {"BLOCK": argmax.BLOCK, "EARLY": True},
        argmax.NUM_WARPS,
    )

    assert 2 == compiled.count("ld.global.v4")
    assert 65536 // compiled.registers >= 1024


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_rows_without_filters_keep_threads_many(dtype: str) -> None:
    """
    At least 24 warps fit on a multiprocessor.
    """
    compiled = _compile(
        sampling._draw_kernel,
        OPTIONS | {"logits_ptr": "*" + dtype, "picked_ptr": "*i64"},
        {"top_k_stride": 1, "PEAK_BLOCK": sampling.PEAK_BLOCK, "BLOCK": sampling.DRAW_BLOCK},
        sampling.DRAW_WARPS,
    )

    assert 65536 // compiled.registers >= 24 * 32


@pytest.mark.parametrize(("dtype", "shift"), [("bf16", 16), ("fp32", 0)])
def test_filtered_rows_come_by_asynchronous_copies(dtype: str, shift: int) -> None:
    """
    Tiles ahead are copied to shared memory, sixteen bytes at a time.
    """
    compiled = _compile(
        sampling._filter_kernel,
        OPTIONS | LISTS | {"logits_ptr": "*" + dtype, "picked_ptr": "*i64"},
        {
            "top_k_stride": 1,
            "SHIFT": shift,
            "BLOCK": sampling.FILTER_BLOCK,
            "SEARCH_BLOCK": sampling.SEARCH_BLOCK,
            "CAPACITY": sampling.CAPACITY,
            "STAGES": sampling.STAGES,
        },
        sampling.FILTER_WARPS,
    )

    assert compiled.count("cp.async.cg") > 0


def test_logprobs_penalties_and_masks_fit_in_registers() -> None:
    """
    Neither spills.
    """
    _compile(
        logprobs._logprobs_kernel,
        LISTS
        | {"logits_ptr": "*bf16", "tokens_ptr": "*i64", "chosen_ptr": "*fp32", "best_ptr": "*i64"}
        | {"values_ptr": "*fp32", "num_top": "i32"},
        {"SHIFT": 16, "BLOCK": logprobs.BLOCK, "CAPACITY": logprobs.CAPACITY},
        logprobs.NUM_WARPS,
    )
    _compile(
        penalties._penalties_kernel,
        {"logits_ptr": "*fp32", "rows_ptr": "*i64", "slots_ptr": "*i64", "in_prompt_ptr": "*u8", "counts_ptr": "*i32"}
        | {"strengths_ptr": "*fp32", "prompt_stride": "i32:16", "counts_stride": "i32:16", "strengths_stride": "i32"},
        {"BLOCK": penalties.BLOCK},
        penalties.NUM_WARPS,
    )
    _compile(
        token_masks._masks_kernel,
        {"logits_ptr": "*fp32", "rows_ptr": "*i64", "masks_ptr": "*i32", "mask_stride": "i32"},
        {"BLOCK": token_masks.BLOCK},
        token_masks.NUM_WARPS,
    )
