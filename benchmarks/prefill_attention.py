"""
Prefill attention on the GPU it runs on: FlashAttention-2 of torch, and our two kernels.

    python -m benchmarks.prefill_attention
    python -m benchmarks.prefill_attention --shapes 32x8x128 --lengths 2048,8192
    python -m benchmarks.prefill_attention --write /tmp/rules.json

Some 8,192 tokens of prompts of one length, bf16, causal; one JSON line a shape and length, in
TFLOP/s of what the mask leaves, with the best tiles of each kernel there. Shapes are query heads x
KV heads x head size. Each candidate first compiles and answers in a process of its own, for a
compiler's assertion or a kernel that hangs ends more than its candidate; the faulty are reported
and left out. `--write` makes rules for kernels/tuned/prefill_attention.json of the best tiles, and
of the lengths from which a kernel is the fastest.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.device_time import replayed_s
from kernels.cuda.prefill_attention import Tiles, attend, attend_flash
from kernels.prefill_attention import VarlenPart, varlen_attention_reference

NUM_TOKENS = 8192
# a length that no prompt has
NEVER = 1 << 30
# of the largest value: two ways to round to bf16 and to sum
TOLERANCE = 1.6e-2
# tokens of each chunk, and keys before them
TRIAL = [(1, 300), (129, 0), (300, 77), (5, 1000), (700, 0)]
CANDIDATES = {
    "tma": [(64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2)],
    "plain": [(128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (128, 64, 4, 2), (128, 32, 4, 3), (64, 64, 4, 3)],
}


class Shape(NamedTuple):
    """Heads of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class Candidate(NamedTuple):
    """A kernel of ours, "plain" or "tma", with its tiles."""

    kernel: str
    tiles: Tiles


Inputs = tuple[Tensor, Tensor, Tensor, VarlenPart]
Speeds = dict[Candidate | str, float]


def inputs_of(shape: Shape, chunks: list[tuple[int, int]]) -> Inputs:
    """Views of one product where no chunk has a prefix, as layers have them."""
    starts = [0, *accumulate(new for new, _ in chunks)]
    key_starts = [0, *accumulate(new + before for new, before in chunks)]
    product = torch.randn(
        key_starts[-1], shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim, dtype=torch.bfloat16, device="cuda"
    )
    query, key, value = product.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
    query_start = torch.tensor(starts, dtype=torch.int32, device="cuda")
    key_start = torch.tensor(key_starts, dtype=torch.int32, device="cuda")
    longest, most_keys = max(new for new, _ in chunks), max(sum(chunk) for chunk in chunks)
    part = VarlenPart(starts[-1], query_start, key_start, longest, most_keys, key_starts[-1])
    return query[: starts[-1]], key, value, part


def run(engine: Candidate | str, inputs: Inputs) -> Tensor:
    scale = inputs[0].shape[2] ** -0.5
    if isinstance(engine, Candidate):
        return attend(*inputs, None, scale, 0.0, engine.tiles, tma=engine.kernel == "tma")
    return attend_flash(*inputs, None, scale)


def error_of(expected: Tensor, actual: Tensor) -> float:
    return ((actual.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


def attempt(shape: Shape, candidate: Candidate) -> None:
    """Compile into the cache on disk, and compare with the reference; exit with the fault."""
    torch.manual_seed(0)
    inputs = inputs_of(shape, TRIAL)
    error = error_of(varlen_attention_reference(*inputs, None, shape.head_dim**-0.5), run(candidate, inputs))
    if not error <= TOLERANCE:
        sys.exit(f"wrong by {error:.2g}")


def fault_of(shape: Shape, candidate: Candidate, patience_s: float) -> str | None:
    argument = json.dumps([shape, candidate.kernel, candidate.tiles])
    command = [sys.executable, "-m", "benchmarks.prefill_attention", "--attempt", argument]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience_s)
    except subprocess.TimeoutExpired:
        return "out of time"
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return lines[-1][:200] if done.returncode else None


def working(shapes: list[Shape], patience_s: float) -> dict[Shape, list[Candidate]]:
    """The candidates that compile and answer rightly."""
    candidates = [Candidate(kernel, Tiles(*tiles)) for kernel, all_tiles in CANDIDATES.items() for tiles in all_tiles]
    pairs = [(shape, candidate) for shape in shapes for candidate in candidates]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        faults = list(pool.map(lambda pair: fault_of(*pair, patience_s), pairs))
    right: dict[Shape, list[Candidate]] = {shape: [] for shape in shapes}
    for (shape, candidate), fault in zip(pairs, faults, strict=True):
        if fault is None:
            right[shape].append(candidate)
        else:
            print(json.dumps({"shape": shape, "skipped": candidate, "because": fault}), flush=True)
    return right


def measure(shape: Shape, length: int, candidates: list[Candidate]) -> Speeds:
    """TFLOP/s of FlashAttention-2, under "flash", and of the candidates that agree with it."""
    num_prompts = max(1, NUM_TOKENS // length)
    inputs = inputs_of(shape, [(length, 0)] * num_prompts)
    # a token sees half of its prompt, and each key costs two products
    flops = 4 * num_prompts * (length * (length + 1) / 2) * shape.num_heads * shape.head_dim
    expected = run("flash", inputs)
    speeds: Speeds = {}
    for engine in ("flash", *candidates):
        error = error_of(expected, run(engine, inputs))
        if not error <= TOLERANCE:
            print(json.dumps({"shape": shape, "length": length, "skipped": engine, "because": f"wrong by {error:.2g}"}))
            continue
        speeds[engine] = 4 * flops / replayed_s(_four_times(engine, inputs), 7) / 1e12
    return speeds


def _four_times(engine: Candidate | str, inputs: Inputs) -> Callable[[], None]:
    def work() -> None:
        for _ in range(4):
            run(engine, inputs)

    return work


def show(shape: Shape, length: int, speeds: Speeds) -> None:
    line: dict[str, object] = {"shape": shape, "length": length, "flash": round(speeds["flash"], 1)}
    for kernel in CANDIDATES:
        own = [engine for engine in speeds if isinstance(engine, Candidate) and engine.kernel == kernel]
        if own:
            best = max(own, key=speeds.__getitem__)
            line |= {kernel: round(speeds[best], 1), f"{kernel}_tiles": best.tiles}
    print(json.dumps(line), flush=True)


def best_of(kernel: str, by_length: dict[int, Speeds]) -> Candidate | None:
    """The tiles with the best geometric mean over the longer half of the lengths."""
    longer = [by_length[length] for length in sorted(by_length)[len(by_length) // 2 :]]
    common = [e for e in longer[0] if isinstance(e, Candidate) and e.kernel == kernel and all(e in s for s in longer)]
    return max(common, key=lambda engine: sum(math.log(speeds[engine]) for speeds in longer), default=None)


def fastest_from(engine: Candidate, rivals: list[Candidate | str], by_length: dict[int, Speeds]) -> int:
    """The least length from which the engine beats its rivals all the way up."""
    start = NEVER
    for length in sorted(by_length, reverse=True):
        speeds = by_length[length]
        if speeds.get(engine, 0.0) <= max(speeds.get(rival, 0.0) for rival in rivals):
            break
        start = length
    return start


def rules_of(shape: Shape, by_length: dict[int, Speeds]) -> list[dict[str, object]]:
    plain, tma = best_of("plain", by_length), best_of("tma", by_length)
    use: dict[str, int] = {"plain_from": NEVER, "tma_from": NEVER}
    if tma is not None:
        use["tma_from"] = fastest_from(tma, ["flash", *([plain] if plain else [])], by_length)
    if plain is not None:
        below = {length: speeds for length, speeds in by_length.items() if length < use["tma_from"]}
        use["plain_from"] = fastest_from(plain, ["flash"], below)
    for candidate in (plain, tma):
        if candidate is not None:
            use |= {f"{candidate.kernel}_{name}": size for name, size in candidate.tiles._asdict().items()}
    when = {"gpu": torch.cuda.get_device_name(), "padded_dim": shape.head_dim}
    return [{"when": when | {"dtype": dtype}, "use": use} for dtype in ("bfloat16", "float16")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="32x8x128,14x2x64")
    parser.add_argument("--lengths", default="128,512,1024,2048,4096,8192")
    parser.add_argument("--patience-s", type=float, default=45.0, help="for a candidate to compile and answer")
    parser.add_argument("--write", help="where the rules go")
    parser.add_argument("--attempt", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.attempt:
        sizes, kernel, tiles = json.loads(args.attempt)
        attempt(Shape(*sizes), Candidate(kernel, Tiles(*tiles)))
        return

    shapes = [Shape(*map(int, text.split("x"))) for text in args.shapes.split(",")]
    rules: list[dict[str, object]] = []
    for shape, candidates in working(shapes, args.patience_s).items():
        by_length: dict[int, Speeds] = {}
        for length in map(int, args.lengths.split(",")):
            by_length[length] = measure(shape, length, candidates)
            show(shape, length, by_length[length])
        rules += rules_of(shape, by_length)
    if args.write:
        with open(args.write, "w", encoding="utf-8") as file:
            file.write("[\n  " + ",\n  ".join(map(json.dumps, rules)) + "\n]\n")


if __name__ == "__main__":
    main()
