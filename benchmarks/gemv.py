"""
How long one row, or a few, take through each weight of a model: the library's product and ours.

    python -m benchmarks.gemv
    python -m benchmarks.gemv --shapes 1152x896,9728x896 --rows 1
    python -m benchmarks.gemv --sweep --rules /tmp/gemv.json

One JSON line a case. A CUDA graph of eight calls or more, over weights of different layers so that
none is left in the L2 cache, is replayed; the median counts, and so a launch among others is in it.
Bytes are those of the weight, divided by what a large copy moves, reads and writes. Shapes are
output x input features. `--sweep` tries configurations and writes rules for kernels/tuned/gemv.json:
the best of them, or that the library is to be used. `early` of a rule is measured among products
alone, where each starts behind another. bfloat16, random data.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.bandwidth import copy_bandwidth
from benchmarks.compiling import faults_of
from benchmarks.device_time import replayed_s
from kernels.cuda.gemv import WARP_SPAN, Config, config_for, launch

# several times the 50 MB of L2 that an H200 has
COLD_BYTES = 192 << 20
MIN_WEIGHTS, MAX_WEIGHTS = 8, 128
DTYPE = torch.bfloat16
# less than this is noise, and the library is the one that others test
GAIN = 0.98


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a weight."""

    out_features: int
    in_features: int
    has_bias: bool = False

    @property
    def weight_bytes(self) -> int:
        return self.out_features * self.in_features * DTYPE.itemsize


# queries with keys and values, output, gate with up, down, head: Qwen2.5 0.5B, then Llama 3.1 8B
SHAPES = (
    Shape(1152, 896, has_bias=True),
    Shape(896, 896),
    Shape(9728, 896),
    Shape(896, 4864),
    Shape(151936, 896),
    Shape(6144, 4096),
    Shape(4096, 4096),
    Shape(28672, 4096),
    Shape(4096, 14336),
    Shape(128256, 4096),
)


@dataclass(frozen=True, slots=True)
class Case:
    """Rows, and a weight a layer."""

    x: Tensor
    weights: list[Tensor]
    bias: Tensor | None

    def seconds(self, multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor], repeats: int) -> float:
        """Of one call."""

        def calls() -> None:
            for weight in self.weights:
                multiply(self.x, weight, self.bias)

        return replayed_s(calls, repeats) / len(self.weights)

    def seconds_with(self, config: Config, repeats: int) -> float:
        return self.seconds(lambda x, weight, bias: launch(x, weight, bias, config), repeats)


def make_case(shape: Shape, num_rows: int) -> Case:
    torch.cuda.empty_cache()
    count = min(MAX_WEIGHTS, max(MIN_WEIGHTS, -(-COLD_BYTES // shape.weight_bytes)))
    weights = [random(shape.out_features, shape.in_features) for _ in range(count)]
    return Case(random(num_rows, shape.in_features), weights, random(shape.out_features) if shape.has_bias else None)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=DTYPE)


def candidates(num_rows: int) -> list[Config]:
    """Some loads in flight for each thread, and not more sums than it has registers for."""
    configs = []
    most = 16 if num_rows == 1 else 8
    for columns, warps, vectors in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8), (1, 2, 4, 8)):
        loads = columns * vectors
        if columns > most or loads > 16 or loads * num_rows > 32:
            continue
        block = {"block_n": columns, "block_k": vectors * warps * WARP_SPAN, "warps": warps}
        configs.append(block | {"stages": 1, "early": 0})
        if num_rows == 1 and vectors == 1 and columns > 1:
            configs.append(block | {"stages": 3, "early": 0})
    return configs


def fits(config: Config, shape: Shape) -> bool:
    """Whether it leaves no warp without work, and not more than half of what it reads at once empty."""
    return config["block_k"] < 2 * max(shape.in_features, WARP_SPAN)


def attempt(num_rows: int, has_bias: bool, config: Config) -> None:
    """Compile a configuration, and run it."""
    shape = Shape(256, 1024, has_bias)
    launch(random(num_rows, shape.in_features), random(256, 1024), random(256) if has_bias else None, config)
    torch.cuda.synchronize()


def compiled(rows: list[int], shapes: list[Shape], patience_s: float) -> dict[tuple[int, bool], list[Config]]:
    """The candidates that work, for a number of rows with or without a bias."""
    kinds = [(num_rows, bias) for num_rows in rows for bias in sorted({shape.has_bias for shape in shapes})]
    cases = [
        (num_rows, bias, config)
        for num_rows, bias in kinds
        for config in candidates(num_rows)
        if any(fits(config, shape) for shape in shapes if shape.has_bias == bias)
    ]
    working: dict[tuple[int, bool], list[Config]] = {kind: [] for kind in kinds}
    for (num_rows, bias, config), fault in zip(cases, faults_of(attempt, cases, patience_s), strict=True):
        if fault is None:
            working[num_rows, bias].append(config)
        else:
            print(json.dumps({"rows": num_rows, "skipped": config, "because": fault}), flush=True)
    return working


def best_of(case: Case, configs: list[Config]) -> tuple[float, Config]:
    """The first three, once more and longer, for they are first by luck too; and so with an early start."""
    times = [case.seconds_with(config, 4) for config in configs]
    ranked = [configs[index] for index in sorted(range(len(configs)), key=times.__getitem__)[:3]]
    again = [(case.seconds_with(config, 15), config) for config in ranked]
    best_s, best = min(again, key=lambda pair: pair[0])
    early = best | {"early": 1}
    try:
        early_s = case.seconds_with(early, 15)
    except Exception as error:  # not every GPU or capture takes it
        print(json.dumps({"skipped": early, "because": f"{type(error).__name__}: {error}"[:200]}), flush=True)
        return best_s, best
    return (early_s, early) if early_s < best_s else (best_s, best)


def sweep(shapes: list[Shape], rows: list[int], bandwidth: float, budget_s: float) -> list[dict[str, object]]:
    """The rules that the best configurations make; cases are left out when time is up."""
    deadline = time.monotonic() + budget_s
    working = compiled(rows, shapes, 0.5 * budget_s)
    rules: list[dict[str, object]] = []
    for num_rows, shape in itertools.product(rows, shapes):
        configs = [config for config in working[num_rows, shape.has_bias] if fits(config, shape)]
        if not configs or time.monotonic() > deadline:
            print(json.dumps(labels(shape, num_rows) | {"left_out": len(configs)}), flush=True)
            continue
        case = make_case(shape, num_rows)
        ours_s, config = best_of(case, configs)
        library_s = case.seconds(F.linear, 15)
        del case
        print(json.dumps(line_of(shape, num_rows, library_s, ours_s, bandwidth) | config), flush=True)
        when = {"gpu": torch.cuda.get_device_name(), "num_rows": num_rows, "in_features": shape.in_features}
        when |= {"out_features": shape.out_features, "dtype": str(DTYPE).removeprefix("torch.")}
        rules.append({"when": when, "use": {"use": 1} | config if ours_s < GAIN * library_s else {"use": 0}})
    return rules


def table(shapes: list[Shape], rows: list[int], bandwidth: float) -> None:
    for shape, num_rows in itertools.product(shapes, rows):
        case = make_case(shape, num_rows)
        config = config_for(num_rows, shape.in_features, shape.out_features, DTYPE)
        library_s, ours_s = case.seconds(F.linear, 15), case.seconds_with(config, 15)
        print(json.dumps(line_of(shape, num_rows, library_s, ours_s, bandwidth) | config), flush=True)
        del case


def labels(shape: Shape, num_rows: int) -> dict[str, object]:
    return {"out_features": shape.out_features, "in_features": shape.in_features, "rows": num_rows}


def line_of(shape: Shape, num_rows: int, library_s: float, ours_s: float, bandwidth: float) -> dict[str, object]:
    line = labels(shape, num_rows)
    for name, seconds in (("library", library_s), ("ours", ours_s)):
        line[f"{name}_us"] = round(seconds * 1e6, 2)
        line[f"{name}_of_copy"] = round(shape.weight_bytes / seconds / bandwidth, 3)
    return line


def shapes_of(text: str) -> list[Shape]:
    return [Shape(*map(int, part.split("x"))) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=shapes_of, default=list(SHAPES), help="without bias; a model's if not given")
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 4])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--rules", help="where the rules of a sweep go")
    parser.add_argument("--budget-s", type=float, default=50.0, help="a sweep starts no case after it")
    args = parser.parse_args()
    torch.manual_seed(0)

    bandwidth = copy_bandwidth()
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "copy_gb_per_s": round(bandwidth / 1e9)}), flush=True)
    if not args.sweep:
        table(args.shapes, args.rows, bandwidth)
        return
    rules = sweep(args.shapes, args.rows, bandwidth, args.budget_s)
    if args.rules:
        with open(args.rules, "w", encoding="utf-8") as file:
            file.write("[\n  " + ",\n  ".join(map(json.dumps, rules)) + "\n]\n")


if __name__ == "__main__":
    main()
