"""
Configurations of a decode step's products and attention, tried where they stand: in the step's CUDA graph.

    python -m benchmarks.step_sweep --model qwen2.5-0.5b --batch 32 --rules /tmp/rules

What is fastest among products of its kind (benchmarks.few_rows) need not be so in a step, where a kernel starts
while another still has the multiprocessors and the caches. From the configurations in kernels/tuned on, each round
tries those that differ in one number, every product by itself, and keeps what makes the step faster by `GAIN`;
from what is hardly slower the next round starts too. One JSON line a try: microseconds of the step with it and
without. The graph is replayed from the same state each time, so that a microsecond can be told. `--rules` writes
what was found for kernels/tuned; attention has one rule for all batches up to 64, so theirs are to be compared.
"""

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import few_rows, gpu
from benchmarks.compiling import faults_of
from benchmarks.device_time import elapsed_s
from benchmarks.few_rows import DTYPE, Shape, kernel_for
from benchmarks.model import find_model
from benchmarks.ours import configure
from benchmarks.step_gap import fill
from engine.cuda.graphs import Sampling
from engine.load import load_engine
from engine.model.config import ModelConfig
from kernels.configs import SMALL_STEP_ROWS
from kernels.cuda import decode_attention
from kernels.decode_config import attention_key, decode_config

Config = dict[str, int]

# of a step's time: less is not told from chance
GAIN = 0.0015
# what costs so little more that its own neighbours are tried, and how many of each product a round
NEAR, MOST_NEAR = 1.01, 2
# of a measurement, and for how many seconds the graph is replayed each time
REPEATS, REPLAYS_S = 3, 0.02
# for the products of a round that begins when time is nearly up
PATIENCE_S = 30.0
# what a number of a configuration may become
CHOICES: dict[str, Sequence[int]] = {
    "block_n": (1, 2, 4, 8, 16, 32, 64, 128, 256),
    "block_k": (64, 128, 256, 512, 1024, 2048, 4096),
    "warps": (1, 2, 4, 8),
    "stages": (1, 3, 4, 5, 6, 7, 8),
    "splits": (1, 2, 4, 8, 16),
    "ahead": (0, 1, 2, 4),
    "early": (0, 1),
    "tile": (16, 32, 64, 128),
    "slices": (1, 2, 4),
}
# where the library is left from
STARTS: Sequence[Config] = (
    {"block_n": 32, "block_k": 64, "warps": 4, "stages": 4, "splits": 4},
    {"block_n": 32, "block_k": 128, "warps": 4, "stages": 6, "splits": 1},
    {"block_n": 64, "block_k": 128, "warps": 4, "stages": 4, "splits": 2},
)


def neighbours(config: Config) -> Iterator[Config]:
    """Those that differ in one number, by one step; and the library in place of ours, or ours in place of it."""
    if config.get("use") == 0:
        yield from (config | start | {"use": 1} for start in STARTS if start.keys() <= config.keys())
        return
    for name, choices in CHOICES.items():
        if name not in config:
            continue
        below = [choice for choice in choices if choice < config[name]][-1:]
        above = [choice for choice in choices if choice > config[name]][:1]
        for choice in below + above:
            yield config | {name: choice}
    if "use" in config:
        yield config | {"use": 0}


def shapes_of(config: ModelConfig) -> list[Shape]:
    """The products of a layer."""
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return [
        Shape(query + 2 * kv, config.hidden_size, has_bias=config.qkv_bias),
        Shape(config.hidden_size, query, has_bias=config.output_bias),
        Shape(2 * config.intermediate_size, config.hidden_size, gated=True),
        Shape(config.hidden_size, config.intermediate_size),
    ]


@dataclass(slots=True)
class Choice:
    """
    Something of a step that has a configuration.

    Args:
        name: For the lines.
        table: Of kernels/tuned.
        when: What a rule for it asks for, beside the GPU.
        kind: What a product is compiled for beside it; None is attention.
    """

    name: str
    table: str
    when: Mapping[str, int | str]
    config: Config
    kind: few_rows.Kind | None


def product_choice(batch: int, shape: Shape) -> Choice:
    name = f"{shape.out_features}x{shape.in_features}" + (":gated" if shape.gated else "")
    module = kernel_for(batch)
    config = dict(module.config_for(batch, shape.in_features, shape.out_features, DTYPE, shape.gated))
    when: dict[str, int | str] = {
        "num_rows": batch,
        "in_features": shape.in_features,
        "out_features": shape.out_features,
        "gated": int(shape.gated),
        "dtype": str(DTYPE).removeprefix("torch."),
    }
    table = module.__name__.rpartition(".")[2]
    return Choice(name, table, when, config, (batch, shape.has_bias, shape.gated))


class StepGraph:
    """
    A decode step of an engine whose sequences all decode, captured anew and timed from the same state.

    Args:
        runner: The engine's.
        batch: Its sequences.
    """

    def __init__(self, runner: Any, batch: int) -> None:
        self._runner, self._batch = runner, batch
        rows = runner.state.rows
        changing = (
            rows.num_computed,
            rows.last_token,
            rows.positions,
            rows.block_tables,
            runner._transfers.ring.places,
        )
        self._kept = [(tensor, tensor.clone()) for tensor in changing]

    def capture(self) -> torch.cuda.CUDAGraph:
        """The step as it is configured now."""
        with torch.inference_mode():
            self._runner._decode_rows(self._batch, Sampling.GREEDY, False)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._runner._decode_rows(self._batch, Sampling.GREEDY, False)
        return graph

    def step_us(self, graph: torch.cuda.CUDAGraph) -> float:
        """Microseconds of a replay behind others."""
        count = max(4, round(REPLAYS_S / elapsed_s(graph.replay, 1)))

        def replays() -> None:
            for tensor, kept in self._kept:
                tensor.copy_(kept)
            for _ in range(count):
                graph.replay()

        return elapsed_s(replays, REPEATS) * 1e6 / count


Try = tuple[Choice, Config]


class Overlay:
    """
    Configurations in place of those of the tables, while it is entered.

    Args:
        batch: Above the rows of our own products the library's are left alone.
    """

    def __init__(self, batch: int, model: ModelConfig) -> None:
        self._module = kernel_for(batch)
        few = batch <= SMALL_STEP_ROWS
        self.products = {
            (shape.in_features, shape.out_features, shape.gated): product_choice(batch, shape)
            for shape in shapes_of(model)
            if few
        }
        asked = model.head_dim, model.num_heads // model.num_kv_heads, DTYPE, batch
        when, config = attention_key(*asked), dict(decode_config(*asked))
        self.attention = Choice("attention", "decode_attention", when, config, None)
        self.choices = [*self.products.values(), self.attention]

    @contextmanager
    def entered(self) -> Iterator[None]:
        attention: Any = decode_attention
        config_for, table = self._module.config_for, attention.decode_config

        def product(num_rows: int, in_features: int, out_features: int, dtype: torch.dtype, gated: bool) -> Config:
            choice = self.products.get((in_features, out_features, gated))
            found: Config = config_for(num_rows, in_features, out_features, dtype, gated)
            return found if choice is None else choice.config

        self._module.config_for = product
        attention.decode_config = lambda *_args, **_key: self.attention.config
        try:
            yield
        finally:
            self._module.config_for, attention.decode_config = config_for, table


def sweep(
    overlay: Overlay, measure: Callable[[], float], emit: Callable[[dict[str, Any]], None], budget_s: float
) -> float:
    """Climb until no try is better, or time is up; the step's microseconds at the end."""
    base, deadline = measure(), time.monotonic() + budget_s
    tried: set[str] = set()
    # where the next round starts from, beside what is chosen
    near: list[Try] = []
    while True:
        found: list[tuple[float, Try]] = []
        for choice, config, fault in _compiled(_round(overlay.choices, near, tried), deadline - time.monotonic()):
            us = None if fault else _with(choice, config, measure)
            line = {"step_us": us and round(us, 1), "base_us": round(base, 1)}
            emit({"of": choice.name} | config | line | ({"fault": fault} if fault else {}))
            if us and us < NEAR * base:
                found.append((us, (choice, config)))
        improved, near = False, []
        for _, (choice, config) in sorted(found, key=lambda item: item[0]):
            us = _with(choice, config, measure)
            if us and us < (1 - GAIN) * base:
                choice.config, base, improved = config, us, True
            elif us and us < NEAR * base and sum(of is choice for of, _ in near) < MOST_NEAR:
                near.append((choice, config))
        if not (improved or near) or time.monotonic() > deadline:
            return base


def _compiled(tries: Sequence[Try], left_s: float) -> list[tuple[Choice, Config, str | None]]:
    """Each with why it does not compile; attention compiles where it is captured."""
    products = [(choice.kind, config) for choice, config in tries if choice.kind]
    faults = iter(faults_of(few_rows.attempt, products, max(PATIENCE_S, left_s)))
    return [(choice, config, next(faults) if choice.kind else None) for choice, config in tries]


def _round(choices: Sequence[Choice], near: Sequence[Try], tried: set[str]) -> list[Try]:
    """What is tried next, and has not been; notes it in `tried`."""
    tries = []
    for choice, start in [(choice, choice.config) for choice in choices] + list(near):
        for config in neighbours(start):
            if (name := f"{choice.name} {sorted(config.items())}") not in tried:
                tried.add(name)
                tries.append((choice, config))
    return tries


def _with(choice: Choice, config: Config, measure: Callable[[], float]) -> float | None:
    """The step's microseconds with another configuration; None where it does not run."""
    before, choice.config = choice.config, config
    try:
        return measure()
    except Exception:  # a compiler fails in many ways, and each costs its candidate alone
        return None
    finally:
        choice.config = before


def rules_of(choices: Sequence[Choice]) -> dict[str, list[dict[str, Any]]]:
    """By table, in the form of kernels/tuned."""
    rules: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for choice in choices:
        use = {"use": 0} if choice.config.get("use") == 0 else choice.config
        rules[choice.table].append({"when": {"gpu": torch.cuda.get_device_name(), **choice.when}, "use": use})
    return dict(rules)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-0.5b", help="a shape of benchmarks.shapes, or a folder")
    parser.add_argument("--batch", type=int, default=32, help="sequences: a number of rows that a table has")
    parser.add_argument("--prompt", type=int, default=200, help="tokens of each prompt")
    parser.add_argument("--budget-s", type=float, default=120.0, help="no round starts after it")
    parser.add_argument("--rules", type=Path, help="the folder where the rules go")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        model = find_model(args.model, Path(scratch))
        options = gpu.our_options(args.batch)
        engine = load_engine(
            configure(model.folder, dummy=model.dummy, threads=None, max_model_len=gpu.MAX_MODEL_LEN, options=options)
        )
        fill(engine, args.batch, args.prompt, 2000, model.vocab)
        torch.cuda.synchronize()
        runner: Any = engine._runner
        step = StepGraph(runner, args.batch)
        overlay = Overlay(args.batch, runner.model.config)
        label = {"step_sweep": model.name, "batch": args.batch, "prompt": args.prompt}

        def emit(line: dict[str, Any]) -> None:
            print(json.dumps(label | line), flush=True)

        with overlay.entered():
            first = step.step_us(step.capture())
            last = sweep(overlay, lambda: step.step_us(step.capture()), emit, args.budget_s)
            chosen = {choice.name: choice.config for choice in overlay.choices}
        emit({"first_us": round(first, 1), "last_us": round(last, 1), "chosen": chosen})
        if args.rules:
            args.rules.mkdir(parents=True, exist_ok=True)
            for table, rules in rules_of(overlay.choices).items():
                lines = ",\n  ".join(json.dumps(rule) for rule in rules)
                (args.rules / f"{table}-{model.name}-{args.batch}.json").write_text(f"[\n  {lines}\n]\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
