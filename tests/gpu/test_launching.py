"""On the card: what is started without Triton's look-up computes, bit by bit, what Triton's launches do."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda import (
    activation,
    argmax,
    decode_attention,
    gather_kv,
    gemv,
    launching,
    prefill_attention,
    rms_norm,
    rope,
    skinny_gemm,
)
from kernels.cuda.launching import start_kernel
from kernels.decode_attention import PagedDecode
from kernels.prefill_attention import VarlenPart

MODULES = (
    activation, argmax, decode_attention, gather_kv, gemv, prefill_attention, rms_norm, rope, skinny_gemm,
)  # fmt: skip


class Bound:
    """How many calls Triton bound."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count, run = 0, triton.JITFunction.run

        def counted(kernel: Any, *args: Any, **more: Any) -> Any:
            self.count += 1
            return run(kernel, *args, **more)

        patch.setattr(triton.JITFunction, "run", counted)


@pytest.fixture(autouse=True)
def bound(monkeypatch: pytest.MonkeyPatch) -> Bound:
    monkeypatch.setattr(launching, "_entries", {})
    return Bound(monkeypatch)


@triton.jit
def _mix_kernel(out, FIXED: tl.constexpr, x, y, count, factor, shift, LAST: tl.constexpr = 3):  # noqa: N803
    """out = x * factor + y + shift + LAST, in float32; `count` elements, the rest stays."""
    places = tl.program_id(0) * FIXED + tl.arange(0, FIXED)
    inside = places < count
    value = tl.load(x + places, mask=inside, other=0).to(tl.float32) * factor
    if y is not None:
        value += tl.load(y + places, mask=inside, other=0).to(tl.float32)
    # what 32 bits do not hold of a shift counts too
    value += shift % 1000003 + LAST
    tl.store(out + places, value, mask=inside)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def both_ways(*args: Any, **constants: Any) -> tuple[Tensor, Tensor]:
    """Results of the ordinary way and of ours, where nothing else was written."""
    expected, actual = (torch.full((1024,), -7.0, device="cuda") for _ in range(2))
    _mix_kernel[(4,)](expected, 256, *args, **constants)
    start_kernel(_mix_kernel, (4,), actual, 256, *args, **constants)
    return expected, actual


def test_calls_that_differ_take_turns(bound: Bound) -> None:
    """
    Dtypes, a tensor or none, integers of every kind, floats, warps, views off by one: each in turn, three times over.
    """
    torch.manual_seed(0)
    tensors = [random(1040), random(1040, dtype=torch.float32), random(1040, dtype=torch.float16)]
    cases: list[tuple[Tensor, Tensor | None, int, Any, int, int]] = [
        (x[start:], y if y is None else y[start:], *numbers)
        for (x, y), start, numbers in itertools.product(
            [(tensors[0], None), (tensors[0], tensors[1]), (tensors[1], tensors[2])],
            [0, 1, 8],
            [
                (1000, 2.5, 16, 4),
                (1000, 2.5, 16, 2),
                (1, 1, 1, 4),
                (1024, 1.0, (1 << 33) + 5, 2),
                (16, 3, -(1 << 31), 4),
                (7, -0.0, (1 << 63) - 1, 4),
            ],
        )
    ]
    num_direct, num_aligned, kinds = 0, 0, set()
    for x, y, *numbers in cases * 3:
        num_bound = bound.count
        count, factor, shift, num_warps = numbers
        expected, actual = both_ways(x, y, count, factor, shift, num_warps=num_warps)
        assert torch.equal(expected, actual), (x.dtype, y is None, numbers)
        num_direct += bound.count == num_bound + 1
        if x.data_ptr() % 16 == 0 and (y is None or y.data_ptr() % 16 == 0):
            num_aligned += 1
            kinds.add((x.dtype, y is None, *numbers))
    # the first of a kind is Triton's, and all that 16 does not divide
    assert num_aligned == 2 * len(cases)
    assert num_direct == num_aligned - len(kinds)


def test_streams_are_those_of_the_moment(bound: Bound) -> None:
    """
    A launch waits for its own stream's work only, and a capture takes it in.
    """
    x = random(1024)
    for _ in range(2):
        expected, _ = both_ways(x, None, 1024, 2.0, 5)
    num_bound, delayed, side = bound.count, torch.empty_like(x), torch.cuda.Stream()
    out = torch.empty(1024, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        delayed.copy_(x)
        start_kernel(_mix_kernel, (4,), out, 256, delayed, None, 1024, 2.0, 5)
    side.synchronize()
    assert torch.equal(expected, out)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        start_kernel(_mix_kernel, (4,), out, 256, delayed, None, 1024, 2.0, 5)
    for seed in range(3):
        torch.manual_seed(seed)
        delayed.copy_(random(1024))
        out.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        actual = out.clone()
        start_kernel(_mix_kernel, (4,), out, 256, delayed, None, 1024, 2.0, 5)
        assert torch.equal(out, actual)
        assert not torch.equal(expected, actual)
    assert num_bound == bound.count


def norms(rows: int) -> list[Tensor]:
    x, residual, weight = random(rows, 896), random(rows, 896), random(896)
    return [
        rms_norm.rms_norm_triton(x, weight, 1e-6),
        rms_norm.add_rms_norm_triton(x, residual, weight, 1e-6),
        residual,
        activation.silu_mul_triton(random(rows, 1792)),
        argmax.argmax_triton(random(rows, 30_000)),
    ]


def attention(rows: int) -> list[Tensor]:
    """Rotation with its cache write, gather, prefill and decode of sequences of 48 tokens."""
    cache = random(2, 3 * rows + 1, 2, 16, 64)
    tables = torch.arange(1, 3 * rows + 1, dtype=torch.int32, device="cuda").view(rows, 3)
    slots, lengths = torch.arange(rows, dtype=torch.int32, device="cuda"), torch.full((rows,), 48, device="cuda").int()
    angles, places = random(rows, 1, 64, dtype=torch.float32), torch.arange(rows, device="cuda") + 16
    query, key, value = rope.rope_and_store_triton(random(rows, 1152), (angles.cos(), angles.sin()), places, cache, 14)
    plan = PagedDecode(tables, slots, lengths, None, None)
    starts = torch.arange(0, 48 * rows + 1, 48, dtype=torch.int32, device="cuda")
    keys, values = gather_kv.gather_kv_triton(cache, tables, slots, starts, 48 * rows)
    part = VarlenPart(rows * 48, starts, starts, 48, 48, rows * 48, None, None)
    asked, tiles = random(rows * 48, 14, 64), prefill_attention.Tiles(64, 64, 4, 2)
    out = [
        prefill_attention.attend(asked, keys, values, part, None, 0.125, 0.0, tiles, tma=tma) for tma in (False, True)
    ]
    decoded = decode_attention.decode_attention_triton(query, cache, plan, 0.125)
    return [cache, query, key, value, keys, values, decoded, *out]


def products(rows: int) -> list[Tensor]:
    weight, bias, few = random(512, 1024), random(512), min(rows, gemv.MAX_ROWS)
    config = skinny_gemm.DEFAULT | {"splits": 2}
    return [
        gemv.gemv_triton(random(few, 1024), weight, bias),
        gemv.gated_gemv_triton(random(few, 1024), weight),
        skinny_gemm.launch(random(min(rows, 64), 1024), weight, bias, config),
    ]


@pytest.mark.parametrize("work", [norms, attention, products])
def test_kernels_of_a_step_compute_the_same(
    work: Callable[[int], list[Tensor]], bound: Bound, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Steps of few and of many rows in turns, three times over; only the first time is Triton's.
    """

    def ordinary(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        kernel[grid](*args, **constants)

    for repeat in range(3):
        for rows in (1, 3, 64, 130):
            torch.manual_seed(rows)
            with monkeypatch.context() as patch:
                for module in MODULES:
                    patch.setattr(module, "start_kernel", ordinary)
                expected = work(rows)
            num_bound = bound.count
            torch.manual_seed(rows)
            actual = work(rows)
            assert repeat == 0 or num_bound == bound.count, "a known call went through Triton"
            for wanted, got in zip(expected, actual, strict=True):
                assert torch.equal(wanted.view(torch.uint8), got.view(torch.uint8))
