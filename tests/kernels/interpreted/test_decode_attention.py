"""The decode kernel against float64, through scattered blocks in a cache of NaN."""

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kernels.cuda.decode_attention import decode_attention_triton, launch
from kernels.decode_attention import paged_decode_reference
from tests.support.numerics import assert_near
from tests.support.paged import PagedBatch, cut, paged_batch
from tests.support.pairwise import pairwise

FP8_TOLERANCE = 1e-2
SEQ_LENS = [1, 32, 75]
GRID: dict[str, list[Any]] = {
    "head_dim": [64, 80, 96, 128],
    "group_size": [1, 4, 7, 8],
    "dtype": [torch.float32, torch.float16, torch.float8_e4m3fn],
    # tokens that are not cut
    "longest_part": [None, 5, 16, 32, 40],
    "block_size": [16, 32],
    "window": [None, 24],
    "softcap": [0.0, 3.0],
    # tokens of a stream, streams of a head, heads of a program
    "streams": [(16, 1, 1), (32, 1, 1), (16, 2, 1), (16, 1, 2), (16, 2, 2)],
}


def check(case: dict[str, Any]) -> None:
    torch.manual_seed(0)
    dtype, window = case["dtype"], case["window"]
    batch = paged_batch(SEQ_LENS, num_kv_heads=2, head_dim=case["head_dim"], block_size=case["block_size"], dtype=dtype)
    fp8 = batch.kv_scales is not None
    # 2 scales the scores so that a cap bends them
    query = 2 * torch.randn(len(SEQ_LENS), 2 * case["group_size"], case["head_dim"])
    query = query.to(torch.float32 if fp8 else dtype)
    plan = batch.plan(query.shape[1], window, case["longest_part"])
    scale, softcap = case["head_dim"] ** -0.5, case["softcap"]
    tile, slices, heads = case["streams"]
    config = {"tile": tile, "slices": slices, "heads": heads, "warps": 4, "stages": 3}

    actual = launch(query, batch.kv_cache, plan, scale, softcap, batch.kv_scales, config)

    expected = paged_decode_reference(
        query.double(), batch.kv_cache, plan, scale, softcap=softcap, kv_scales=batch.kv_scales
    )
    assert actual.dtype == query.dtype
    assert plan.parts is None or 0 == plan.parts.arrivals.count_nonzero()
    assert_near(expected, actual, FP8_TOLERANCE if fp8 else None)


def case_id(case: dict[str, Any]) -> str:
    return "-".join(str(value).removeprefix("torch.") for value in case.values())


@pytest.mark.parametrize("case", pairwise(GRID), ids=case_id)
def test_equals_float64(case: dict[str, Any]) -> None:
    """
    Each sequence attends to its own tokens, whatever the heads, blocks, parts and streams.
    """
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", GRID["head_dim"])
@pytest.mark.parametrize("dtype", GRID["dtype"], ids=str)
def test_combinations_at_random(head_dim: int, dtype: torch.dtype) -> None:
    """
    The same for 60 of the 800 combinations of all else.
    """
    grid = GRID | {"head_dim": [head_dim], "dtype": [dtype]}
    for values in random.Random(0).sample(list(itertools.product(*grid.values())), 60):
        check(dict(zip(grid, values, strict=True)))


def tiny_batch(seq_lens: list[int]) -> tuple[PagedBatch, torch.Tensor]:
    torch.manual_seed(1)
    batch = paged_batch(seq_lens, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32)
    return batch, torch.randn(len(seq_lens), 8, 64)


@pytest.mark.parametrize("longest_part", [None, 8])
def test_rows_of_a_padded_batch_are_finite(longest_part: int | None) -> None:
    """
    A sequence of no tokens gives zeros, and so does one whose table holds the null block alone.
    """
    batch, query = tiny_batch([20, 3, 3])
    seq_lens, slots = batch.seq_lens.clone(), batch.slots.clone()
    seq_lens[1], slots[2] = 0, 0
    plan = replace(batch.plan(8), seq_lens=seq_lens, slots=slots)
    if longest_part is not None:
        plan = cut(plan, 8, batch.kv_cache, longest_part)

    out = decode_attention_triton(query, batch.kv_cache, plan, 0.125)

    assert_near(paged_decode_reference(query.double(), batch.kv_cache, plan, 0.125), out)
    assert torch.equal(torch.zeros(2, 8, 64), out[1:])


def test_what_is_not_cut_has_the_bits_of_an_uncut_batch() -> None:
    """
    Beside a sequence in parts, those that are short enough are read by one program.
    """
    batch, query = tiny_batch([20, 200, 33])

    out = decode_attention_triton(query, batch.kv_cache, batch.plan(8, None, 64), 0.125)

    plain = decode_attention_triton(query, batch.kv_cache, batch.plan(8), 0.125)
    assert torch.equal(plain[[0, 2]], out[[0, 2]])
    assert_near(plain, out)


def test_parts_meet_again_in_the_next_layer() -> None:
    """
    The same workspace serves one call after the other.
    """
    batch, query = tiny_batch([75, 130])
    plan = batch.plan(8, None, 32)

    first, second = (decode_attention_triton(query, batch.kv_cache, plan, 0.125) for _ in range(2))

    assert torch.equal(first, second)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
def test_a_cap_of_huge_scores_does_not_overflow() -> None:
    """
    Scores far beyond the cap saturate.
    """
    batch, query = tiny_batch([20, 9])
    plan = batch.plan(8)

    out = decode_attention_triton(1e4 * query, batch.kv_cache, plan, 0.125, softcap=5.0)

    expected = paged_decode_reference(1e4 * query.double(), batch.kv_cache, plan, 0.125, softcap=5.0)
    assert_near(expected, out)


def test_reads_queries_where_the_projection_left_them() -> None:
    """
    Queries may be a part of wider rows.
    """
    batch, query = tiny_batch([20, 9])
    rows = torch.full((2, 8 + 4, 64), torch.nan)
    rows[:, :8] = query
    plan = batch.plan(8)

    out = decode_attention_triton(rows[:, :8], batch.kv_cache, plan, 0.125)

    assert torch.equal(decode_attention_triton(query, batch.kv_cache, plan, 0.125), out)


def test_blocks_lie_beyond_two_to_the_31() -> None:
    """
    Offsets of blocks have 64 bits.
    """
    torch.manual_seed(2)
    block_stride = 2**27
    # zeros take no memory until they are touched
    memory = torch.from_numpy(np.zeros(18 * block_stride, dtype=np.float16))
    cache = memory.as_strided((2, 18, 1, 16, 64), (16 * 64, block_stride, 16 * 64, 64, 1))
    cache[:, 16:18] = torch.randn(2, 2, 1, 16, 64).half()
    batch = PagedBatch(
        cache, None, torch.tensor([[17, 16]], dtype=torch.int32), torch.tensor([0]).int(), torch.tensor([32]).int()
    )
    query = torch.randn(1, 4, 64).half()
    plan = batch.plan(4)

    out = decode_attention_triton(query, cache, plan, 0.125)

    assert_near(paged_decode_reference(query.double(), cache, plan, 0.125), out)
