"""Head norms, rotation and cache write in Triton's interpreter, against float64."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kernels.cuda.rope import _to_nearest_e4m3, rope_and_store_triton
from tests.support.elementwise import FLOAT8, RopeCase, assert_attended_as_stored, assert_stored, cut_off
from tests.support.numerics import assert_near
from tests.support.pairwise import pairwise

# head size and the rotated part of it; query and KV heads
PARAMETERS = {
    "sizes": [(64, 64), (64, 32), (80, 80), (80, 32), (96, 96), (128, 128), (128, 64), (256, 256), (256, 32)],
    "heads": [(14, 2), (4, 4), (3, 1), (8, 2)],
    "dtype": [torch.float32, torch.float16, torch.bfloat16],
    "has_norms": [False, True],
    "float8": [False, True],
}
ALL = [dict(zip(PARAMETERS, values, strict=True)) for values in itertools.product(*PARAMETERS.values())]


def check(*, sizes: tuple[int, int], heads: tuple[int, int], dtype: torch.dtype, has_norms: bool, float8: bool) -> None:
    """Run one case on tokens with and without slots."""
    (head_dim, rotary_dim), (num_heads, num_kv_heads) = sizes, heads
    case = RopeCase(
        dtype=dtype,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        has_norms=has_norms,
        cache_dtype=FLOAT8 if float8 else None,
    )
    qkv, rotation, norms, slots = case.random(5, case.width), case.rotation(), case.norms(), case.slot_mapping()
    before, kv_cache, kv_scales = qkv.clone(), case.kv_cache(), case.kv_scales()

    query, key, value = rope_and_store_triton(qkv, rotation, slots, kv_cache, num_heads, norms, kv_scales)

    assert query.data_ptr() == qkv.data_ptr()
    if kv_scales is not None:
        assert_attended_as_stored(slots, key, value, kv_cache, kv_scales, 2**-7 if dtype == torch.bfloat16 else 0.0)
        # what was rounded is what a cache of the activations' dtype takes
        qkv, rounding, turned_query = before.clone(), replace(case, cache_dtype=None), query
        query, key, value = rope_and_store_triton(qkv, rotation, slots, rounding.kv_cache(), num_heads, norms)
        assert torch.equal(query, turned_query)
    turned = torch.cat([query, key], dim=1)
    assert_near(case.expected(before, rotation, norms), turned, cut_off(dtype, 3 if has_norms else 1))
    assert torch.equal(before.view(5, -1, head_dim)[:, num_heads + num_kv_heads :], value)
    assert_stored(slots, key, value, kv_cache, kv_scales)


@pytest.mark.parametrize("case", pairwise(PARAMETERS), ids=str)
def test_heads_are_turned_and_stored(case: dict[str, Any]) -> None:
    """
    Queries and keys are normed and turned in place; keys and values lie in their slots and nowhere else.

    Of a float8 cache, keys and values in place are what was stored.
    """
    check(**case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids=str)
def test_all_combinations(case: dict[str, Any]) -> None:
    """
    The same for every combination.
    """
    check(**case)


def test_rows_may_lie_apart() -> None:
    """
    The projections may be a part of a wider tensor, and the rest of it stays.
    """
    case = RopeCase(dtype=torch.float32)
    wide = torch.full((5, case.width + 16), torch.nan)
    qkv = wide[:, : case.width].copy_(case.random(5, case.width))
    before, rotation = qkv.clone(), case.rotation()

    query, key, _ = rope_and_store_triton(qkv, rotation, case.slot_mapping(), case.kv_cache(), case.num_heads)

    assert_near(case.expected(before, rotation, None), torch.cat([query, key], dim=1))
    assert bool(wide[:, case.width :].isnan().all())


@triton.jit
def _round_all(out, x, count, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + places, _to_nearest_e4m3(tl.load(x + places, mask=places < count)), mask=places < count)


def test_numbers_are_rounded_to_the_nearest_float8() -> None:
    """
    All that float8 has, what lies half way between two, what lies close to that, and random numbers, as torch does.
    """
    all_of_it = torch.arange(127, dtype=torch.uint8).view(FLOAT8).float()
    half_way = (all_of_it[1:] + all_of_it[:-1]) / 2
    near = torch.cat([torch.nextafter(half_way, torch.tensor(far)) for far in (-1e9, 1e9)])
    drawn = torch.randn(4000, generator=torch.Generator().manual_seed(6)).clamp(-4, 4) * 112
    x = torch.cat([all_of_it, half_way, near, drawn, drawn / 1000, drawn / 1e5])
    x = torch.cat([x, -x])
    out = torch.empty_like(x)

    _round_all[(-(-len(x) // 1024),)](out, x, len(x), BLOCK=1024)

    assert torch.equal(x.to(FLOAT8).float(), out)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_head_that_is_not_finite_stays_so() -> None:
    """
    One NaN or infinity among a key is no number afterwards, fresh or from a cache of eight bits.
    """
    for wrong in (torch.nan, torch.inf):
        case = RopeCase(dtype=torch.bfloat16, num_tokens=4, cache_dtype=FLOAT8)
        qkv, slots = case.random(4, case.width), case.slot_mapping()
        qkv[0, case.num_heads * case.head_dim + 5] = wrong
        kv_cache, kv_scales = case.kv_cache(), case.kv_scales()
        assert kv_scales is not None

        _, key, _ = rope_and_store_triton(qkv, case.rotation(), slots, kv_cache, case.num_heads, kv_scales=kv_scales)

        block, offset = divmod(int(slots[0]), case.block_size)
        assert [True, False] == kv_scales[0, block, :, offset].isnan().tolist()
        assert [True, False] == key[0].isnan().all(-1).tolist()


def test_heads_of_zeros_have_a_scale() -> None:
    """
    A float8 head without any magnitude is zeros after the round trip, not NaN.
    """
    case = RopeCase(dtype=torch.float32, cache_dtype=FLOAT8)
    kv_cache, kv_scales, slots = case.kv_cache(), case.kv_scales(), torch.tensor([9, -1, 17, 30, -1])
    assert kv_scales is not None

    rope_and_store_triton(
        torch.zeros(5, case.width), case.rotation(), slots, kv_cache, case.num_heads, kv_scales=kv_scales
    )

    assert [0.0] == kv_cache[:, 9 // 4, :, 1].float().unique().tolist()
    assert bool((kv_scales[:, 9 // 4, :, 1] == torch.tensor(1e-12)).all())


def test_slots_may_lie_past_the_range_of_32_bits() -> None:
    """
    A pool of more than 2**31 elements is written where it should be.
    """
    case = RopeCase(dtype=torch.float16)
    num_blocks = 2**31 // (2 * 4 * 64) + 10
    # pages of memory come as they are written: few are
    memory = np.empty((2, num_blocks, case.num_kv_heads, case.block_size, case.head_dim), np.float16)
    kv_cache = torch.from_numpy(memory)
    slots = torch.tensor([num_blocks * 4 - 1, -1, num_blocks * 4 - 9, -1, 5])

    _, key, value = rope_and_store_triton(case.random(5, case.width), case.rotation(), slots, kv_cache, case.num_heads)

    for token in (0, 2, 4):
        block, offset = divmod(int(slots[token]), 4)
        assert torch.equal(key[token], kv_cache[0, block, :, offset])
        assert torch.equal(value[token], kv_cache[1, block, :, offset])
