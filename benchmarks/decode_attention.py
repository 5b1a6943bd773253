"""
How near decode attention comes to the memory bandwidth of the GPU it runs on.

    python -m benchmarks.decode_attention
    python -m benchmarks.decode_attention --shapes 2x64x7 --batches 256 --lengths 4096 --dtypes bf16
    python -m benchmarks.decode_attention --sweep --rules /tmp/rules.json

One JSON line a case. A CUDA graph of eight calls or more, over the caches of different layers so
that none is left in the L2 cache, is replayed; the median counts. Keys and values are counted as
read once, and divided by what a large copy moves, reads and writes, in the same process. Shapes are
KV heads x head size x query heads of a KV head. `--spread 1` draws log-normal lengths around the
mean, in any order and with the longest first, as the programs of a launch start in the order of the
rows. `--sweep` tries configurations on two batches of each shape and writes the best as rules for
kernels/tuned/decode_attention.json.
"""

import argparse
import itertools
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.bandwidth import copy_bandwidth
from benchmarks.compiling import faults_of
from benchmarks.device_time import replayed_s
from kernels.cuda.decode_attention import launch
from kernels.decode_attention import PagedDecode
from kernels.decode_config import decode_config
from kernels.decode_parts import cut_sequences, make_parts, programs_of

DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
BLOCK_SIZE = 16
# several times the 50 MB of L2 that an H200 has
COLD_BYTES = 256 << 20
MAX_LAYERS = 64
SWEEP_CASES = ((256, 1024), (256, 4096))
# an uneven batch's longest sequence, in means
MOST_MEANS = 8

Config = dict[str, int]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one layer's attention, and of what its cache holds."""

    num_kv_heads: int
    head_dim: int
    group_size: int
    dtype: str

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group_size

    @property
    def cache_dtype(self) -> str:
        return str(DTYPES[self.dtype]).removeprefix("torch.")

    @property
    def programs(self) -> int:
        """That read a sequence which is not cut."""
        return programs_of(self.num_heads, self.num_kv_heads, self.head_dim, DTYPES[self.dtype])

    @property
    def token_bytes(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class Case:
    """
    A batch of equal lengths, ready to be attended.

    Args:
        caches: One a layer, with its scales.
    """

    shape: Shape
    query: Tensor
    plan: PagedDecode
    caches: list[tuple[Tensor, Tensor | None]]
    num_bytes: int

    def attend(self, config: Config, num_calls: int) -> None:
        scale = self.shape.head_dim**-0.5
        for cache, scales in itertools.islice(itertools.cycle(self.caches), num_calls):
            launch(self.query, cache, self.plan, scale, 0.0, scales, config)


def uneven_lengths(batch: int, mean: int, spread: float) -> list[int]:
    """
    Log-normal lengths with that mean, at most `MOST_MEANS` of it: as many as a workload's, in no order.

    Args:
        spread: Standard deviation of their logarithms; 0 makes them equal.
    """
    draws = np.random.default_rng(batch).normal(0.0, spread, batch)
    lengths = mean * np.exp(draws - spread**2 / 2)
    return [int(length) for length in lengths.clip(1, MOST_MEANS * mean)]


def make_case(shape: Shape, lengths: Sequence[int], whole: bool = False, num_layers: int | None = None) -> Case:
    """
    Blocks in random order, values of ordinary size.

    Args:
        whole: Cut no sequence.
    """
    torch.cuda.empty_cache()
    batch, num_bytes = len(lengths), sum(lengths) * shape.token_bytes
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    cache_shape = (2, sum(counts) + 1, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
    caches: list[tuple[Tensor, Tensor | None]] = []
    for _ in range(num_layers or min(MAX_LAYERS, -(-COLD_BYTES // num_bytes))):
        if shape.dtype == "fp8":
            # positive numbers below 256; 0x7f would be NaN
            cache = torch.randint(0, 0x78, cache_shape, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
            caches.append((cache, torch.full(cache_shape[:4], 0.01, device="cuda")))
        else:
            caches.append((torch.empty(cache_shape, dtype=DTYPES[shape.dtype], device="cuda").normal_(), None))
    parts = None if whole else make_parts(batch, shape.programs, shape.num_heads, shape.head_dim, torch.device("cuda"))
    plan = PagedDecode(
        block_tables(counts).cuda(),
        torch.arange(batch, dtype=torch.int32, device="cuda"),
        torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        None,
        parts,
    )
    if parts is not None:
        cut_sequences(parts, plan.seq_lens, None, shape.programs)
    query = torch.randn(batch, shape.num_heads, shape.head_dim, dtype=torch.bfloat16, device="cuda")
    return Case(shape, query, plan, caches, num_bytes)


def block_tables(counts: Sequence[int]) -> Tensor:
    """[len(counts), most] int32: so many blocks of each sequence, in random order; 0 behind them."""
    blocks = (torch.randperm(sum(counts), dtype=torch.int32) + 1).split(list(counts))
    return torch.nn.utils.rnn.pad_sequence(blocks, batch_first=True)


def measure(case: Case, config: Config, repeats: int) -> float:
    """Seconds of one call."""
    num_calls = max(8, len(case.caches))
    return replayed_s(lambda: case.attend(config, num_calls), repeats) / num_calls


def config_of(shape: Shape, num_seqs: int) -> Config:
    return decode_config(shape.head_dim, shape.group_size, getattr(torch, shape.cache_dtype), num_seqs)


def candidates(shape: Shape) -> list[Config]:
    """One stream by several warps, and a stream for each warp."""
    single = [(64, 1, 1, 2), (64, 1, 1, 4), (128, 1, 1, 4), (128, 1, 1, 8)]
    streams = [(tile, warps // heads, heads, warps) for tile in (16, 32, 64) for warps in (2, 4) for heads in (1, 2)]
    alone = [(32, 1, 1, 1), (64, 1, 1, 1)]
    configs = []
    for (tile, slices, heads, warps), stages in itertools.product(single + streams + alone, (3, 5, 7)):
        # keys and values in flight: more leave room for too few programs
        held = tile * slices * heads * 2 * shape.head_dim * DTYPES[shape.dtype].itemsize * ((stages - 1) // 2)
        if 4 << 10 <= held <= 132 << 10 and shape.num_kv_heads % heads == 0:
            configs.append({"tile": tile, "slices": slices, "heads": heads, "warps": warps, "stages": stages})
    return configs


def attempt(shape: Shape, config: Config) -> None:
    """Compile a configuration into the cache on disk, and run it."""
    # strides that 16 divides and numbers of blocks like those of a real batch
    make_case(shape, [16 * BLOCK_SIZE] * 2, whole=True, num_layers=1).attend(config, 1)
    torch.cuda.synchronize()


def compile_all(shapes: list[Shape], patience_s: float) -> dict[Shape, list[Config]]:
    """The candidates that compile in time, in processes of their own: Python's part is half of it."""
    pairs = [(shape, config) for shape in shapes for config in candidates(shape)]
    working: dict[Shape, list[Config]] = {shape: [] for shape in shapes}
    for (shape, config), fault in zip(pairs, faults_of(attempt, pairs, patience_s), strict=True):
        if fault is None:
            working[shape].append(config)
        else:
            print(json.dumps({"shape": repr(shape), "skipped": config, "because": fault}), flush=True)
    return working


def sweep(shapes: list[Shape], bandwidth: float, budget_s: float) -> list[dict[str, object]]:
    """The rules that the best configurations make; shapes are left out when time is up."""
    deadline = time.monotonic() + budget_s
    rules: list[dict[str, object]] = []
    for shape, configs in compile_all(shapes, 0.6 * budget_s).items():
        if not configs or time.monotonic() > deadline:
            print(json.dumps({"shape": repr(shape), "left_out": len(configs)}), flush=True)
            continue
        scores = [1.0] * len(configs)
        for batch, length in SWEEP_CASES:
            case = make_case(shape, [length] * batch, whole=True)
            for index, config in enumerate(configs):
                scores[index] *= case.num_bytes / measure(case, config, 3) / bandwidth
            del case
        ranked = sorted(range(len(configs)), key=scores.__getitem__, reverse=True)
        for index in ranked[:5]:
            print(json.dumps({"shape": repr(shape), "of_copy": round(math.sqrt(scores[index]), 3)} | configs[index]))
        when = {"gpu": torch.cuda.get_device_name(), "head_dim": shape.head_dim, "group_size": shape.group_size}
        rules.append({"when": when | {"dtype": shape.cache_dtype}, "use": configs[ranked[0]]})
    return rules


def table(args: argparse.Namespace, shapes: list[Shape], bandwidth: float) -> None:
    for shape, batch, length, whole in itertools.product(shapes, args.batches, args.lengths, args.whole):
        lengths = uneven_lengths(batch, length, args.spread)
        orders = {"any": lengths, "longest first": sorted(lengths, reverse=True)} if args.spread else {"equal": lengths}
        for order, ordered in orders.items():
            case = make_case(shape, ordered, bool(whole))
            line = line_of(case, measure(case, config_of(shape, batch), 10), bandwidth)
            print(json.dumps(line | {"length": length, "spread": args.spread, "order": order}), flush=True)
            del case


def line_of(case: Case, seconds: float, bandwidth: float) -> dict[str, object]:
    shape = case.shape
    return {
        "kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "group_size": shape.group_size,
        "dtype": shape.dtype,
        "batch": len(case.query),
        "parts": int(case.plan.parts.firsts[-1]) if case.plan.parts is not None else len(case.query),
        "whole": case.plan.parts is None,
        "us": round(seconds * 1e6, 1),
        "gb_per_s": round(case.num_bytes / seconds / 1e9),
        "of_copy": round(case.num_bytes / seconds / bandwidth, 3),
    }


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="8x128x4,2x64x7,4x128x8,8x64x4")
    parser.add_argument("--dtypes", default="bf16,fp8")
    parser.add_argument("--batches", type=numbers, default=[1, 8, 32, 64, 256, 1024])
    parser.add_argument("--lengths", type=numbers, default=[256, 1024, 4096])
    parser.add_argument("--whole", type=numbers, default=[0], help="1 cuts no sequence; 0,1 measures both")
    parser.add_argument("--spread", type=float, default=0.0, help="of log-normal lengths; 0 makes them equal")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--rules", help="where the rules of a sweep go")
    parser.add_argument("--budget-s", type=float, default=140.0, help="a sweep starts no shape after it")
    args = parser.parse_args()
    torch.manual_seed(0)
    sizes = [tuple(map(int, text.split("x"))) for text in args.shapes.split(",")]
    shapes = [Shape(*size, dtype) for dtype in args.dtypes.split(",") for size in sizes]

    bandwidth = copy_bandwidth()
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "copy_gb_per_s": round(bandwidth / 1e9)}), flush=True)
    if not args.sweep:
        table(args, shapes, bandwidth)
        return
    rules = sweep(shapes, bandwidth, args.budget_s)
    if args.rules:
        with open(args.rules, "w", encoding="utf-8") as file:
            file.write("[\n  " + ",\n  ".join(map(json.dumps, rules)) + "\n]\n")


if __name__ == "__main__":
    main()
