"""
How near the memory-bound kernels come to the card's copy bandwidth.

    python -m benchmarks.elementwise

One JSON line a case: seconds of a launch in a replayed CUDA graph, its bytes over the time that a
plain copy of as many takes per byte, and microseconds of the host for an eager call. A graph repeats
its kernel on the same tensors: up to some tens of MB they are read from the L2 cache, as in a model,
and the fraction may pass 1; the few microseconds of a launch are all that small cases show. Swaps
are given over a plain copy between pinned memory and the card. bfloat16, random data.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.bandwidth import copy_bandwidth
from benchmarks.device_time import elapsed_s, replayed_s
from kernels.activation import silu_mul
from kernels.cuda.copy_blocks import BlockSwapper
from kernels.cuda.rope import rope_and_store_triton
from kernels.gather_kv import gather_kv
from kernels.rms_norm import add_rms_norm, rms_norm

NUM_TOKENS = (1, 32, 256, 1024, 8192)
BLOCK_SIZE = 16
LAUNCHES, REPLAYS = 20, 5


@dataclass(frozen=True, slots=True)
class Layer:
    """The sizes of a decoder layer."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class Case:
    """Work and the bytes that it must read and write."""

    name: str
    num_bytes: int
    work: Callable[[], object]


# of Llama 3.1 8B and of Qwen2.5 0.5B
LAYERS = (Layer(4096, 14336, 32, 8, 128), Layer(896, 4864, 14, 2, 64))


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def host_us(work: Callable[[], object]) -> float:
    """Of an eager call, until it has queued its kernel."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    # few enough that the queue does not fill
    for _ in range(100):
        work()
    took = time.perf_counter() - start
    torch.cuda.synchronize()
    return took / 100 * 1e6


def norm_and_gate_cases(layer: Layer, num_tokens: int) -> Iterator[Case]:
    rows, hidden, width = num_tokens, layer.hidden, layer.intermediate
    # small, for the residual grows by it at every launch
    x, residual, weight = random(rows, hidden) * 1e-3, random(rows, hidden), random(hidden)
    gate_up = random(rows, 2 * width)
    yield Case("rms_norm", 2 * x.nbytes, lambda: rms_norm(x, weight, 1e-5))
    yield Case("add_rms_norm", 4 * x.nbytes, lambda: add_rms_norm(x, residual, weight, 1e-5))
    yield Case("silu_mul", gate_up.nbytes * 3 // 2, lambda: silu_mul(gate_up))


def cache_cases(layer: Layer, num_tokens: int, dtype: torch.dtype) -> Iterator[Case]:
    num_blocks = -(-num_tokens // BLOCK_SIZE) + 1
    shape = (2, num_blocks, layer.num_kv_heads, BLOCK_SIZE, layer.head_dim)
    kv_cache = torch.zeros(shape, device="cuda").to(dtype)
    kv_scales = torch.ones(shape[:4], device="cuda") if dtype.itemsize == 1 else None
    table = (torch.randperm(num_blocks - 1, device="cuda") + 1).int()[None]
    places = torch.arange(num_tokens, device="cuda")
    slots = table[0, places // BLOCK_SIZE].long() * BLOCK_SIZE + places % BLOCK_SIZE

    qkv = random(num_tokens, layer.qkv_width)
    angles = torch.rand(num_tokens, 1, layer.head_dim, device="cuda")
    rotation = angles.cos(), angles.sin()
    suffix = "" if kv_scales is None else "_fp8"
    num_stored = num_tokens * 2 * layer.num_kv_heads * layer.head_dim
    stored_bytes = num_stored * dtype.itemsize + (0 if kv_scales is None else num_stored // layer.head_dim * 4)
    # queries and keys are written back, and values that were rounded; of cosines and sines one half each is read
    kept_bytes = num_stored // 2 * qkv.itemsize if kv_scales is None else 0
    turned_bytes = 2 * qkv.nbytes - kept_bytes + angles.nbytes
    yield Case(
        f"rope_and_store{suffix}",
        turned_bytes + stored_bytes,
        lambda: rope_and_store_triton(qkv, rotation, slots, kv_cache, layer.num_heads, kv_scales=kv_scales),
    )
    row = torch.zeros(1, dtype=torch.int32, device="cuda")
    key_start = torch.tensor([0, num_tokens], dtype=torch.int32, device="cuda")
    yield Case(
        f"gather_kv{suffix}",
        stored_bytes + num_stored * qkv.itemsize,
        lambda: gather_kv(kv_cache, table, row, key_start, num_tokens, kv_scales, qkv.dtype),
    )


def report_kernels(limit: float) -> None:
    for layer in LAYERS:
        for num_tokens in NUM_TOKENS:
            cases = [*norm_and_gate_cases(layer, num_tokens)]
            for dtype in (torch.bfloat16, torch.float8_e4m3fn):
                cases += cache_cases(layer, num_tokens, dtype)
            for case in cases:
                seconds = replayed_s(case.work, REPLAYS, LAUNCHES)
                line = {"kernel": case.name, "hidden": layer.hidden, "num_tokens": num_tokens, "seconds": seconds}
                line |= {"of_copy": round(case.num_bytes / seconds / limit, 3)}
                print(json.dumps(line | {"host_us": round(host_us(case.work), 1)}), flush=True)


def report_swaps(num_blocks: int = 256) -> None:
    """Blocks of a model of 32 layers like the first, scattered on the card, adjacent and scattered on the host."""
    layer, num_layers = LAYERS[0], 32
    piece = (layer.num_kv_heads, BLOCK_SIZE, layer.head_dim)
    layers = [torch.zeros(2, num_blocks, *piece, dtype=torch.bfloat16, device="cuda") for _ in range(num_layers)]
    host_pool = torch.zeros(num_blocks, num_layers, 2, *piece, dtype=torch.bfloat16, pin_memory=True)
    swapper = BlockSwapper(host_pool[0].nbytes, layers[0].device)
    flat = torch.empty_like(host_pool, device="cuda")
    plain_s = {
        "swap_out": elapsed_s(lambda: host_pool.copy_(flat, non_blocking=True), REPLAYS),
        "swap_in": elapsed_s(lambda: flat.copy_(host_pool, non_blocking=True), REPLAYS),
    }
    chosen = torch.randperm(num_blocks)[: num_blocks // 2].numpy()
    for order, host_blocks in (("adjacent", range(num_blocks // 2)), ("scattered", range(0, num_blocks, 2))):
        for name, swap in (("swap_out", swapper.swap_out), ("swap_in", swapper.swap_in)):
            seconds = elapsed_s(lambda swap=swap, ids=host_blocks: swap(layers, host_pool, chosen, ids), REPLAYS)
            line = {"kernel": name, "host_blocks": order, "seconds": seconds}
            line |= {"bytes_s": host_pool.nbytes / 2 / seconds, "of_copy": round(plain_s[name] / 2 / seconds, 3)}
            print(json.dumps(line), flush=True)


def main() -> None:
    limit = copy_bandwidth()
    print(json.dumps({"kernel": "copy", "bytes_s": limit}), flush=True)
    report_kernels(limit)
    report_swaps()


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
