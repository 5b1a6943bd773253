"""
How long a few rows, 64 at most, take through each weight of a model: the library's product and ours.

    python -m benchmarks.few_rows
    python -m benchmarks.few_rows --shapes 1152x896,9728x896:gated --rows 1
    python -m benchmarks.few_rows --sweep --rules /tmp/rules

One JSON line a case. A CUDA graph of eight calls or more, over weights of different layers so that
none is left in the L2 cache, is replayed; the median counts, and so a launch among others is in it.
Bytes are those of the weight, divided by what a large copy moves, reads and writes. Shapes are
output x input features; "gated" ones take the SiLU of one half times the other, for which the
library needs a second kernel. `--sweep` tries configurations and writes rules for kernels/tuned,
gemv.json and skinny_gemm.json, into a folder: the best of them, or that the library is to be used.
`early` of a rule is measured among products alone, where each starts behind another. bfloat16,
random data.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.bandwidth import copy_bandwidth
from benchmarks.compiling import faults_of
from benchmarks.device_time import replayed_s
from kernels.activation import silu_mul
from kernels.cuda import gemv, skinny_gemm
from kernels.cuda.gemv import WARP_SPAN, Config

# several times the 50 MB of L2 that an H200 has
COLD_BYTES = 192 << 20
MIN_WEIGHTS, MAX_WEIGHTS = 8, 128
DTYPE = torch.bfloat16
# programs that fill the multiprocessors of an H200 once, and a few times
MIN_PROGRAMS, MAX_PROGRAMS = 100, 1200
# of shared memory, the rows' tiles among them
MAX_SHARED_BYTES = 220 << 10
# of the library's time; at as much, ours lets its neighbours start early
GAIN = 1.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a weight."""

    out_features: int
    in_features: int
    has_bias: bool = False
    gated: bool = False

    @property
    def weight_bytes(self) -> int:
        return self.out_features * self.in_features * DTYPE.itemsize


# queries with keys and values, output, gate with up, down, head: Qwen2.5 0.5B, then Llama 3.1 8B
SHAPES = (
    Shape(1152, 896, has_bias=True),
    Shape(896, 896),
    Shape(9728, 896),
    Shape(9728, 896, gated=True),
    Shape(896, 4864),
    Shape(151936, 896),
    Shape(6144, 4096),
    Shape(4096, 4096),
    Shape(28672, 4096),
    Shape(28672, 4096, gated=True),
    Shape(4096, 14336),
    Shape(128256, 4096),
)


@dataclass(frozen=True, slots=True)
class Case:
    """Rows, and a weight a layer."""

    x: Tensor
    weights: list[Tensor]
    bias: Tensor | None
    gated: bool

    def seconds(self, multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor], repeats: int) -> float:
        """Of one call."""

        def calls() -> None:
            for weight in self.weights:
                multiply(self.x, weight, self.bias)

        return replayed_s(calls, repeats) / len(self.weights)

    def seconds_with(self, config: Config, repeats: int) -> float:
        launch = kernel_for(len(self.x)).launch
        return self.seconds(lambda x, weight, bias: launch(x, weight, bias, config, gated=self.gated), repeats)

    def library_seconds(self, repeats: int) -> float:
        if self.gated:
            return self.seconds(lambda x, weight, bias: silu_mul(F.linear(x, weight, bias)), repeats)
        return self.seconds(F.linear, repeats)


def kernel_for(num_rows: int) -> Any:
    """The module of the kernel for so many rows."""
    return gemv if num_rows <= gemv.MAX_ROWS else skinny_gemm


def make_case(shape: Shape, num_rows: int) -> Case:
    torch.cuda.empty_cache()
    count = min(MAX_WEIGHTS, max(MIN_WEIGHTS, -(-COLD_BYTES // shape.weight_bytes)))
    weights = [random(shape.out_features, shape.in_features) for _ in range(count)]
    bias = random(shape.out_features) if shape.has_bias else None
    return Case(random(num_rows, shape.in_features), weights, bias, shape.gated)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=DTYPE)


def candidates(num_rows: int) -> list[Config]:
    return gemv_candidates(num_rows) if num_rows <= gemv.MAX_ROWS else skinny_candidates(num_rows)


def skinny_candidates(num_rows: int) -> list[Config]:
    """As many stages as keep the memory busy, where shared memory has room for them."""
    configs = []
    for block_n, block_k, stages in itertools.product((16, 32, 64, 128), (64, 128, 256), (3, 4, 6)):
        tile_bytes = 2 * block_k * (block_n + skinny_gemm.padded(num_rows))
        # less in flight than this leaves the memory waiting; twice as many stages as that gain nothing
        in_flight = stages * tile_bytes
        if not 24 << 10 <= in_flight <= MAX_SHARED_BYTES or (stages > 3 and in_flight > 128 << 10):
            continue
        warps = 8 if block_n * block_k >= 128 * 128 else 4
        ahead = skinny_gemm.DEFAULT["ahead"]
        block = {"block_n": block_n, "block_k": block_k, "warps": warps, "stages": stages, "ahead": ahead}
        configs += [block | {"splits": splits} for splits in (1, 2, 4, 8)]
    return configs


def gemv_candidates(num_rows: int) -> list[Config]:
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
    """Whether it leaves no warp without work, nor half of what it reads at once empty, and has programs enough."""
    if "splits" not in config:
        columns = config["block_n"]
        return config["block_k"] < 2 * max(shape.in_features, WARP_SPAN) and columns >= 1 + shape.gated
    programs = -(-shape.out_features // config["block_n"]) * config["splits"]
    steps = -(-shape.in_features // config["block_k"])
    return MIN_PROGRAMS <= programs <= max(MAX_PROGRAMS, shape.out_features // 64) and steps >= 2 * config["splits"]


# rows, whether there is a bias, whether there is a gate: what a kernel is compiled for beside its configuration
Kind = tuple[int, bool, bool]


def attempt(kind: Kind, config: Config) -> None:
    """Compile a configuration, and run it."""
    num_rows, has_bias, gated = kind
    bias = random(256) if has_bias else None
    kernel_for(num_rows).launch(random(num_rows, 1024), random(256, 1024), bias, config, gated=gated)
    torch.cuda.synchronize()


def compiled(rows: list[int], shapes: list[Shape], patience_s: float) -> dict[Kind, list[Config]]:
    """The candidates that work; a number of splits changes nothing of what is compiled, but whether there are any."""
    kinds = [(num_rows, *kind) for num_rows in rows for kind in sorted({(one.has_bias, one.gated) for one in shapes})]
    wanted = {
        kind: [
            config
            for config in candidates(kind[0])
            if any(fits(config, one) for one in shapes if (one.has_bias, one.gated) == kind[1:])
        ]
        for kind in kinds
    }
    cases = {key_of(kind, config): (kind, config) for kind, configs in wanted.items() for config in configs}
    faults = dict(zip(cases, faults_of(attempt, list(cases.values()), patience_s), strict=True))
    for key, fault in faults.items():
        if fault is not None:
            print(json.dumps({"rows": cases[key][0][0], "skipped": cases[key][1], "because": fault}), flush=True)
    return {
        kind: [config for config in configs if faults[key_of(kind, config)] is None] for kind, configs in wanted.items()
    }


def key_of(kind: Kind, config: Config) -> str:
    """Equal for what is compiled to the same."""
    return json.dumps([kind, config | ({"splits": min(2, config["splits"])} if "splits" in config else {})])


def best_of(case: Case, configs: list[Config]) -> tuple[float, Config]:
    """The first three, once more and longer, for they are first by luck too; and so with an early start."""
    times = [case.seconds_with(config, 4) for config in configs]
    ranked = [configs[index] for index in sorted(range(len(configs)), key=times.__getitem__)[:3]]
    again = [(case.seconds_with(config, 15), config) for config in ranked]
    best_s, best = min(again, key=lambda pair: pair[0])
    if "early" not in best:
        return best_s, best
    early = best | {"early": 1}
    try:
        early_s = case.seconds_with(early, 15)
    except Exception as error:  # not every GPU or capture takes it
        print(json.dumps({"skipped": early, "because": f"{type(error).__name__}: {error}"[:200]}), flush=True)
        return best_s, best
    return (early_s, early) if early_s < best_s else (best_s, best)


def sweep(shapes: list[Shape], rows: list[int], bandwidth: float, budget_s: float) -> list[dict[str, Any]]:
    """The rules that the best configurations make; cases are left out when time is up."""
    deadline = time.monotonic() + budget_s
    working = compiled(rows, shapes, 0.5 * budget_s)
    rules: list[dict[str, Any]] = []
    for num_rows, shape in itertools.product(rows, shapes):
        configs = [config for config in working[num_rows, shape.has_bias, shape.gated] if fits(config, shape)]
        if not configs or time.monotonic() > deadline:
            print(json.dumps(labels(shape, num_rows) | {"left_out": len(configs)}), flush=True)
            continue
        case = make_case(shape, num_rows)
        ours_s, config = best_of(case, configs)
        library_s = case.library_seconds(15)
        del case
        print(json.dumps(line_of(shape, num_rows, library_s, ours_s, bandwidth) | config), flush=True)
        when = {"gpu": torch.cuda.get_device_name(), "num_rows": num_rows, "in_features": shape.in_features}
        when |= {"out_features": shape.out_features, "gated": int(shape.gated)}
        when |= {"dtype": str(DTYPE).removeprefix("torch.")}
        rules.append({"when": when, "use": {"use": 1} | config if ours_s <= GAIN * library_s else {"use": 0}})
    return rules


def table(shapes: list[Shape], rows: list[int], bandwidth: float) -> None:
    for shape, num_rows in itertools.product(shapes, rows):
        case = make_case(shape, num_rows)
        sizes = num_rows, shape.in_features, shape.out_features
        config = kernel_for(num_rows).config_for(*sizes, DTYPE, shape.gated)
        library_s, ours_s = case.library_seconds(15), case.seconds_with(config, 15)
        print(json.dumps(line_of(shape, num_rows, library_s, ours_s, bandwidth) | config), flush=True)
        del case


def labels(shape: Shape, num_rows: int) -> dict[str, object]:
    sizes = {"out_features": shape.out_features, "in_features": shape.in_features, "rows": num_rows}
    return sizes | {"gated": int(shape.gated)}


def line_of(shape: Shape, num_rows: int, library_s: float, ours_s: float, bandwidth: float) -> dict[str, object]:
    line = labels(shape, num_rows)
    for name, seconds in (("library", library_s), ("ours", ours_s)):
        line[f"{name}_us"] = round(seconds * 1e6, 2)
        line[f"{name}_of_copy"] = round(shape.weight_bytes / seconds / bandwidth, 3)
    return line


def shapes_of(text: str) -> list[Shape]:
    parts = [part.removesuffix(":gated") for part in text.split(",")]
    gated = [part.endswith(":gated") for part in text.split(",")]
    return [Shape(*map(int, part.split("x")), gated=gate) for part, gate in zip(parts, gated, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=shapes_of, default=list(SHAPES), help="like 896x896,9728x896:gated")
    parser.add_argument(
        "--rows", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 4, 16, 32, 64]
    )
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--rules", type=Path, help="the folder where the rules of a sweep go")
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
        write(args.rules, rules)


def write(folder: Path, rules: list[dict[str, Any]]) -> None:
    """A file for each kernel that has rules."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, few in (("gemv", True), ("skinny_gemm", False)):
        lines = [json.dumps(rule) for rule in rules if (rule["when"]["num_rows"] <= gemv.MAX_ROWS) == few]
        if lines:
            (folder / f"{name}.json").write_text("[\n  " + ",\n  ".join(lines) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
