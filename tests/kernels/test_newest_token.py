"""Which layers rotate inside attention, and what they do on a CPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.cascade_attention import Cascade
from kernels.decode_attention import DecodePlan, PagedDecode, decode_attention
from kernels.newest_token import rotate_and_attend, rotates_inside
from kernels.rope import HeadNorms, rope_and_store
from tests.support.newest import newest_case

NUMBERS = torch.zeros(1, dtype=torch.int32)
PAGED = PagedDecode(NUMBERS[None], NUMBERS, NUMBERS, None, None)
CASCADE = Cascade.__new__(Cascade)
NORMS = HeadNorms(torch.ones(64), torch.ones(64), 1e-6)
PLAIN: dict[str, Any] = {
    "plan": PAGED,
    "head_dim": 64,
    "cache_dtype": torch.bfloat16,
    "dtype": torch.bfloat16,
    "num_heads": 14,
    "rotary_dim": 64,
    "norms": None,
}


def rotates(**changes: Any) -> bool:
    case = PLAIN | changes
    kv_cache = torch.empty(2, 1, 2, 16, case["head_dim"], dtype=case["cache_dtype"])
    return rotates_inside(case["plan"], kv_cache, case["dtype"], case["num_heads"], case["rotary_dim"], case["norms"])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"plan": replace(PAGED, window=8)},
        {"dtype": torch.float32, "cache_dtype": torch.float32},
        {"head_dim": 16, "rotary_dim": 16},
        {"num_heads": 28},
    ],
    ids=str,
)
def test_plain_heads_are_rotated_inside(changes: dict[str, Any]) -> None:
    """
    With windows or without, up to fourteen queries of a KV head.
    """
    assert rotates(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"plan": DecodePlan(NUMBERS[None], NUMBERS, None, None, ())},
        {"plan": replace(PAGED, cascade=CASCADE)},
        {"norms": NORMS},
        {"cache_dtype": torch.float8_e4m3fn},
        {"rotary_dim": 32},
        {"head_dim": 80, "rotary_dim": 80},
        {"head_dim": 8, "rotary_dim": 8},
        {"num_heads": 30},
    ],
    ids=["cpu", "cascade", "norms", "float8", "partial", "no power of two", "small", "many queries"],
)
def test_others_are_rotated_before(changes: dict[str, Any]) -> None:
    """
    What the kernel does not know keeps a launch of its own.
    """
    assert not rotates(**changes)


def test_a_cpu_does_one_after_the_other() -> None:
    """
    The same attention, and the same cache, as by two calls.
    """
    case = newest_case([1, 17, 40], 2, 4, 64, 16, torch.float32)
    plan = case.batch.plan(case.num_heads)
    expected_cache = case.kv_cache.clone()
    query, _, _ = rope_and_store(*case.inputs(expected_cache), case.num_heads)
    expected = decode_attention(query, expected_cache, plan, case.scale)

    actual = rotate_and_attend(*case.inputs(case.kv_cache), plan, case.num_heads, case.scale)

    assert torch.equal(expected, actual)
    assert torch.equal(expected_cache.nan_to_num(6e4), case.kv_cache.nan_to_num(6e4))
