"""The decode kernel that rotates and stores the newest tokens, against one after the other."""

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cuda.decode_attention import launch
from kernels.cuda.rope import rope_and_store_triton
from kernels.decode_attention import PagedDecode
from kernels.newest_token import NewestTokens, rotate_and_attend_reference
from tests.support.newest import NewestCase, newest_case
from tests.support.numerics import assert_near
from tests.support.paged import cut
from tests.support.pairwise import pairwise

# one token; the first and the last of a block of 16 and of 32; the first and the last of a part of 32
SEQ_LENS = [1, 16, 17, 32, 33, 64, 75]
GRID: dict[str, list[Any]] = {
    "head_dim": [16, 64, 128],
    "group_size": [1, 4, 7, 8, 14],
    "dtype": [torch.float32, torch.float16],
    # tokens that are not cut
    "longest_part": [None, 16, 32, 40],
    "block_size": [16, 32],
    "window": [None, 1, 24],
    "softcap": [0.0, 3.0],
    # tokens of a stream, streams of a head, heads of a program
    "streams": [(16, 1, 1), (32, 1, 1), (16, 2, 1), (16, 1, 2), (16, 2, 2)],
}


def attend(case: NewestCase, plan: PagedDecode, streams: tuple[int, int, int], softcap: float = 0.0) -> Tensor:
    tile, slices, heads = streams
    config = {"tile": tile, "slices": slices, "heads": heads, "warps": 4, "stages": 3}
    newest = NewestTokens(case.rotation, case.slot_mapping)
    return launch(case.query, case.kv_cache, plan, case.scale, softcap, None, config, newest=newest)


def check(values: dict[str, Any]) -> None:
    case = newest_case(SEQ_LENS, 2, values["group_size"], values["head_dim"], values["block_size"], values["dtype"])
    plan = case.batch.plan(case.num_heads, values["window"])
    expected_cache = case.kv_cache.clone()
    expected = rotate_and_attend_reference(
        *case.inputs(expected_cache), plan, case.num_heads, case.scale, softcap=values["softcap"]
    )
    if values["longest_part"] is not None:
        plan = cut(plan, case.num_heads, case.kv_cache, values["longest_part"])

    actual = attend(case, plan, values["streams"], values["softcap"])

    assert plan.parts is None or 0 == plan.parts.arrivals.count_nonzero()
    assert_near(expected.double(), actual)
    # the reference may round between its product and its sum
    torch.testing.assert_close(expected_cache, case.kv_cache, equal_nan=True)


def case_id(values: dict[str, Any]) -> str:
    return "-".join(str(value).removeprefix("torch.") for value in values.values())


@pytest.mark.parametrize("values", pairwise(GRID), ids=case_id)
def test_equals_rotation_then_attention(values: dict[str, Any]) -> None:
    """
    What is attended, what the cache holds afterwards, and that nothing else of it changed.
    """
    check(values)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", GRID["head_dim"])
@pytest.mark.parametrize("dtype", GRID["dtype"], ids=str)
def test_combinations_at_random(head_dim: int, dtype: torch.dtype) -> None:
    """
    The same for 40 of the 1,200 combinations of all else.
    """
    grid = GRID | {"head_dim": [head_dim], "dtype": [dtype]}
    for values in random.Random(0).sample(list(itertools.product(*grid.values())), 40):
        check(dict(zip(grid, values, strict=True)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_cache_has_the_bits_of_the_rotation_alone(dtype: torch.dtype) -> None:
    """
    Whether a step has prompts makes no difference to what later steps read.
    """
    case = newest_case(SEQ_LENS, 2, 4, 64, 16, dtype)
    expected = case.kv_cache.clone()
    rope_and_store_triton(*case.inputs(expected), case.num_heads)

    attend(case, case.batch.plan(case.num_heads), (16, 1, 1))

    assert torch.equal(expected.nan_to_num(), case.kv_cache.nan_to_num())
    assert torch.equal(expected.isnan(), case.kv_cache.isnan())


@pytest.mark.parametrize("streams", [(16, 1, 1), (16, 2, 2)])
def test_the_newest_position_is_not_read_from_the_cache(streams: tuple[int, int, int]) -> None:
    """
    Programs of one launch do not wait for one another: it holds NaN until the step, and is read in the next.
    """
    case = newest_case([1, 17, 40], 2, 4, 64, 16, torch.float32)
    blocks, offsets = case.slot_mapping // 16, case.slot_mapping % 16

    assert bool(case.kv_cache[:, blocks, :, offsets].isnan().all())
    assert bool(attend(case, case.batch.plan(case.num_heads, None, 16), streams).isfinite().all())
    assert bool(case.kv_cache[:, blocks, :, offsets].isfinite().all())


@pytest.mark.parametrize("longest_part", [None, 8])
@pytest.mark.parametrize("streams", [(16, 1, 1), (16, 2, 2)])
def test_rows_of_a_padded_batch_store_nothing_and_give_zeros(
    longest_part: int | None, streams: tuple[int, int, int]
) -> None:
    """
    One token of the null block, as the padding of a graph has it, or no token at all.
    """
    case = newest_case([20, 1, 1], 2, 4, 64, 16, torch.float32)
    seq_lens, slots = case.batch.seq_lens.clone(), case.batch.slots.clone()
    case.slot_mapping[1:] = -1
    slots[1], seq_lens[2] = 0, 0
    plan = replace(case.batch.plan(case.num_heads), seq_lens=seq_lens, slots=slots)
    before = case.kv_cache.clone()
    if longest_part is not None:
        plan = cut(plan, case.num_heads, case.kv_cache, longest_part)

    out = attend(case, plan, streams)

    assert torch.equal(torch.zeros(2, 8, 64), out[1:])
    changed = case.kv_cache.nan_to_num(9e9) != before.nan_to_num(9e9)
    block, offset = divmod(int(case.slot_mapping[0]), 16)
    assert bool(changed[:, block, :, offset].all())
    assert 2 * 2 * 64 == int(changed.sum())
