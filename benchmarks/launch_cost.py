"""
What a launch of a step's kernels costs the host, by Triton's own way and by `kernels.cuda.launching`.

    python -m benchmarks.launch_cost

One JSON line a kernel: microseconds of the host until a call has queued its kernel, the wrapper left
out, and how many times as fast ours is. The two take turns; a figure is the median of its rounds. The
arguments are those of a layer of Qwen2.5 0.5B and a mixed step of 256 tokens, over and over the same.
It needs a GPU.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from kernels.cuda import activation, decode_attention, gather_kv, prefill_attention, rms_norm, rope
from kernels.cuda.launching import start_kernel
from kernels.decode_attention import PagedDecode
from kernels.prefill_attention import VarlenPart

MODULES = (activation, decode_attention, gather_kv, prefill_attention, rms_norm, rope)
NUM_TOKENS, NUM_BLOCKS = 256, 64
# so few launches that the queue does not fill
LAUNCHES, ROUNDS = 100, 21


@dataclass(frozen=True, slots=True)
class Call:
    """A launch, with its arguments."""

    name: str
    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]

    def by_triton(self) -> None:
        self.kernel[self.grid](*self.args, **self.constants)

    def by_ours(self) -> None:
        start_kernel(self.kernel, self.grid, *self.args, **self.constants)


def layer_calls() -> list[Call]:
    """What the kernels of a layer are launched with."""
    calls = []

    def note(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        calls.append(Call(kernel.__name__.strip("_"), kernel, grid, args, constants))

    with ExitStack() as stack:
        for module in MODULES:
            stack.enter_context(mock.patch.object(module, "start_kernel", note))
        run_layer()
    return calls


def run_layer() -> None:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def numbers(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    # small, for the residual grows by it at every launch
    x, residual, weight = random(NUM_TOKENS, 896) * 1e-3, random(NUM_TOKENS, 896), random(896)
    rms_norm.rms_norm_triton(x, weight, 1e-6)
    rms_norm.add_rms_norm_triton(x, residual, weight, 1e-6)
    cache, angles = random(2, NUM_BLOCKS, 2, 16, 64), torch.rand(NUM_TOKENS, 1, 64, device="cuda")
    places = torch.arange(NUM_TOKENS, device="cuda") + 16
    rope.rope_and_store_triton(random(NUM_TOKENS, 1152), (angles.cos(), angles.sin()), places, cache, 14)
    tables, slots = torch.arange(1, 33, dtype=torch.int32, device="cuda").view(1, 32), numbers(0)
    keys, values = gather_kv.gather_kv_triton(cache, tables, slots, numbers(0, 512), 512)
    part = VarlenPart(NUM_TOKENS, numbers(0, NUM_TOKENS), numbers(0, 512), NUM_TOKENS, 512, 512, None, None)
    query, tiles = random(NUM_TOKENS, 14, 64), prefill_attention.Tiles(64, 64, 4, 2)
    prefill_attention.attend(query, keys, values, part, None, 0.125, 0.0, tiles, tma=False)
    if torch.cuda.get_device_capability() >= (9, 0):
        prefill_attention.attend(query, keys, values, part, None, 0.125, 0.0, tiles, tma=True)
    plan = PagedDecode(tables, slots, numbers(512), None, None)
    decode_attention.decode_attention_triton(query[:1], cache, plan, 0.125)
    activation.silu_mul_triton(random(NUM_TOKENS, 2 * 4864))


def host_us(work: Callable[[], None]) -> float:
    """Of a call, until its kernel is queued."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(LAUNCHES):
        work()
    took = time.perf_counter() - start
    torch.cuda.synchronize()
    return took / LAUNCHES * 1e6


def measure(call: Call) -> dict[str, Any]:
    rounds = [(host_us(call.by_triton), host_us(call.by_ours)) for _ in range(ROUNDS + 1)]
    # the first compiles
    triton_us, ours_us = (statistics.median(found) for found in zip(*rounds[1:], strict=True))
    line = {"kernel": call.name, "triton_us": round(triton_us, 2), "ours_us": round(ours_us, 2)}
    return line | {"ratio": round(triton_us / ours_us, 2)}


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("benchmarks.launch_cost needs a GPU that torch can use: launches are what it measures")
    for call in layer_calls():
        print(json.dumps(measure(call)), flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
