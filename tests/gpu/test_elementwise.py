"""Norms, gate, rotation with its cache write, and gather of pages on the card, against float64."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.activation import silu_mul
from kernels.cuda.rope import rope_and_store_triton
from kernels.gather_kv import gather_kv
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope import rope_and_store
from tests.support.elementwise import (
    EPS,
    FLOAT8,
    RopeCase,
    assert_attended_as_stored,
    assert_gathered,
    assert_stored,
    gated,
    normed,
)
from tests.support.numerics import PagedTokens, assert_near
from tests.support.pairwise import pairwise

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN: what a kernel forgets to write is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [64, 896, 3584, 4096, 8192])
@pytest.mark.parametrize("num_tokens", [1, 257])
def test_norms_equal_float64(dtype: torch.dtype, hidden: int, num_tokens: int) -> None:
    """
    Rows are normed; with a residual its sum is kept, and is what is normed.
    """
    torch.manual_seed(0)
    x, residual = random(num_tokens, hidden, dtype=dtype), random(num_tokens, hidden, dtype=dtype)
    weight, total = torch.rand(hidden, dtype=dtype, device="cuda"), x.double() + residual.double()

    assert_near(normed(x, weight), rms_norm(x, weight, EPS))
    out = add_rms_norm(x, residual, weight, EPS)
    assert_near(total, residual)
    assert_near(normed(residual, weight), out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_lie_apart(dtype: torch.dtype) -> None:
    """
    Rows of a wider tensor are read where they are.
    """
    torch.manual_seed(1)
    wide, weight = random(33, 1040, dtype=dtype), torch.rand(512, dtype=dtype, device="cuda")

    assert_near(normed(wide[:, 5:517], weight), rms_norm(wide[:, 5:517], weight, EPS))
    assert_near(gated(wide[:, 16:]), silu_mul(wide[:, 16:]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [90, 4864, 14336])
@pytest.mark.parametrize("num_tokens", [1, 300])
def test_the_gate_equals_float64(dtype: torch.dtype, width: int, num_tokens: int) -> None:
    """
    Each row's second half is multiplied by the SiLU of its first.
    """
    torch.manual_seed(2)
    gate_up = random(num_tokens, 2 * width, dtype=dtype) * 4
    truth = gated(gate_up)

    assert_near(truth, silu_mul(gate_up))


def test_a_gate_far_below_zero_shuts() -> None:
    """
    Where the exponential overflows the result is zero, not NaN.
    """
    gate_up = torch.tensor([[-1e4, -200.0, 200.0, 0.0, 1.0, 2.0, 3.0, 4.0]], device="cuda")

    assert [[0.0, 0.0, 600.0, 0.0]] == silu_mul(gate_up).abs().tolist()


ROPE_CASES = pairwise(
    {
        "sizes": [(64, 64), (64, 32), (80, 80), (80, 32), (96, 96), (128, 128), (128, 64), (256, 256), (256, 32)],
        "heads": [(32, 8), (14, 2), (3, 1), (8, 8)],
        "dtype": DTYPES,
        "has_norms": [False, True],
        "float8": [False, True],
        "num_tokens": [1, 7, 1500],
    }
)


@pytest.mark.parametrize("case", ROPE_CASES, ids=str)
def test_heads_are_turned_and_stored(case: dict[str, Any]) -> None:
    """
    Queries and keys are normed and turned in place; keys and values lie in their slots and nowhere else.

    Of a float8 cache, keys and values in place are what was stored.
    """
    (head_dim, rotary_dim), (num_heads, num_kv_heads) = case["sizes"], case["heads"]
    call = RopeCase(
        dtype=case["dtype"],
        num_tokens=case["num_tokens"],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        block_size=16,
        has_norms=case["has_norms"],
        num_blocks=120,
        device="cuda",
        cache_dtype=FLOAT8 if case["float8"] else None,
    )
    qkv, rotation, norms = call.random(call.num_tokens, call.width), call.rotation(), call.norms()
    slots, kv_cache, kv_scales = call.slot_mapping(), call.kv_cache(), call.kv_scales()
    before = qkv.clone()

    query, key, value = rope_and_store_triton(qkv, rotation, slots, kv_cache, num_heads, norms, kv_scales)

    if kv_scales is not None:
        assert_attended_as_stored(slots, key, value, kv_cache, kv_scales)
        # what was rounded is what a cache of the activations' dtype takes
        qkv, rounding, turned_query = before.clone(), replace(call, cache_dtype=None), query
        query, key, value = rope_and_store_triton(qkv, rotation, slots, rounding.kv_cache(), num_heads, norms)
        # two kernels, whose products and sums may be fused differently
        assert_near(query.double(), turned_query)
    assert_near(call.expected(before, rotation, norms), torch.cat([query, key], dim=1))
    assert torch.equal(before.view(call.num_tokens, -1, head_dim)[:, num_heads + num_kv_heads :], value)
    assert_stored(slots, key, value, kv_cache, kv_scales)


def test_a_head_that_is_not_finite_stays_so() -> None:
    """
    One NaN or infinity among a key is no number afterwards, fresh or from a cache of eight bits.
    """
    for wrong in (torch.nan, torch.inf):
        case = RopeCase(dtype=torch.bfloat16, num_tokens=4, cache_dtype=FLOAT8, device="cuda")
        qkv, slots = case.random(4, case.width), case.slot_mapping()
        qkv[0, case.num_heads * case.head_dim + 5] = wrong
        kv_cache, kv_scales = case.kv_cache(), case.kv_scales()
        assert kv_scales is not None

        _, key, _ = rope_and_store_triton(qkv, case.rotation(), slots, kv_cache, case.num_heads, kv_scales=kv_scales)

        block, offset = divmod(int(slots[0]), case.block_size)
        assert [True, False] == kv_scales[0, block, :, offset].isnan().tolist()
        assert [True, False] == key[0].isnan().all(-1).tolist()


def test_slots_may_lie_past_the_range_of_32_bits() -> None:
    """
    A pool of more than 2**31 elements in each part is written and read where it should be.
    """
    call = RopeCase(dtype=torch.bfloat16, num_tokens=3, num_kv_heads=8, head_dim=128, rotary_dim=128, device="cuda")
    num_blocks = 2**31 // (8 * 16 * 128) + 10
    kv_cache = torch.empty(2, num_blocks, 8, 16, 128, dtype=torch.bfloat16, device="cuda")
    first = (num_blocks - 1) * 16
    slots = torch.tensor([first, first + 1, first + 2], device="cuda")

    _, key, value = rope_and_store(call.random(3, call.width), call.rotation(), slots, kv_cache, call.num_heads)
    tables = torch.tensor([[num_blocks - 1]], dtype=torch.int32, device="cuda")
    key_start = torch.tensor([0, 3], dtype=torch.int32, device="cuda")
    keys, values = gather_kv(kv_cache, tables, torch.zeros(1, dtype=torch.int32, device="cuda"), key_start, 3)

    assert torch.equal(key, keys)
    assert torch.equal(value, values)
    assert torch.equal(key, kv_cache[0, num_blocks - 1, :, :3].transpose(0, 1))
    assert torch.equal(value, kv_cache[1, num_blocks - 1, :, :3].transpose(0, 1))


def test_a_captured_graph_follows_its_inputs() -> None:
    """
    A layer's elementwise kernels, captured once, work on what their inputs hold at each replay.
    """
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(3)
    call = RopeCase(dtype=torch.bfloat16, num_tokens=8, device="cuda", num_blocks=64)
    qkv, rotation, slots, kv_cache = call.random(8, call.width), call.rotation(), call.slot_mapping(), call.kv_cache()
    weight = torch.rand(call.width, dtype=torch.bfloat16, device="cuda")

    def work() -> Tensor:
        rope_and_store(qkv, rotation, slots, kv_cache, call.num_heads)
        return silu_mul(rms_norm(qkv, weight, EPS))

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()
    for seed in range(3):
        torch.manual_seed(seed)
        fresh = random(8, call.width, dtype=torch.bfloat16)
        slots.copy_(torch.randperm(call.num_blocks * call.block_size)[:8])
        qkv.copy_(fresh)
        expected = work()
        qkv.copy_(fresh)
        kv_cache.fill_(torch.nan)

        graph.replay()

        assert torch.equal(expected, out)
        heads = qkv.view(8, -1, call.head_dim)[:, call.num_heads :]
        assert_stored(slots, *heads.split(call.num_kv_heads, dim=1), kv_cache, None)


@pytest.mark.parametrize(
    ("head_dim", "num_kv_heads", "dtype"),
    [(64, 2, torch.bfloat16), (80, 1, torch.float16), (96, 4, torch.float32), (128, 8, torch.bfloat16)],
)
@pytest.mark.parametrize("lengths", [[1000], [700, 0, 333, 1], [5] * 90])
def test_pages_come_sequence_by_sequence(
    head_dim: int, num_kv_heads: int, dtype: torch.dtype, lengths: list[int]
) -> None:
    """
    Each sequence's first tokens come out bit by bit, in order, whichever row of the tables names its blocks.
    """
    torch.manual_seed(4)
    seq_lens = [length + 3 for length in lengths]
    paged = PagedTokens(seq_lens, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=16, dtype=dtype)
    slots = torch.randperm(len(lengths) + 2)[: len(lengths)]
    tables = torch.zeros(len(lengths) + 2, paged.block_tables.shape[1], dtype=torch.int32)
    tables[slots] = paged.block_tables
    key_start = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32)

    keys, values = gather_kv(
        paged.kv_cache.contiguous().cuda(), tables.cuda(), slots.int().cuda(), key_start.cuda(), sum(lengths)
    )

    assert_gathered([key[:length] for key, length in zip(paged.keys, lengths, strict=True)], keys.cpu())
    assert_gathered([value[:length] for value, length in zip(paged.values, lengths, strict=True)], values.cpu())


@pytest.mark.parametrize("out_dtype", DTYPES)
def test_float8_is_multiplied_by_its_scales(out_dtype: torch.dtype) -> None:
    """
    Each token's head has a scale of its own; the result is of the dtype that was asked for.
    """
    torch.manual_seed(5)
    kv_cache, kv_scales = (
        (random(2, 6, 2, 16, 128, dtype=torch.float32) * 50).to(FLOAT8),
        torch.rand(2, 6, 2, 16).cuda(),
    )
    tables = torch.tensor([[0, 0, 0], [5, 2, 1]], dtype=torch.int32, device="cuda")
    slots, key_start = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([1], [0, 40]))

    gathered = gather_kv(kv_cache, tables, slots, key_start, 40, kv_scales, out_dtype)

    wide = kv_cache.float() * kv_scales[..., None]
    expected = wide[:, [5, 2, 1]].transpose(2, 3).reshape(2, 48, 2, 128)[:, :40].to(out_dtype)
    for part, rows in enumerate(gathered):
        assert torch.equal(expected[part], rows)
