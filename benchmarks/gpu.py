"""
The table of one GPU: our engine and vLLM on the same requests, dummy weights, one engine at a time.

    python -m benchmarks.gpu --model llama-3.1-8b --engines pagemill,vllm --peer-path /tmp/vllm --out runs.jsonl
    python -m benchmarks.gpu --model qwen2.5-0.5b --cells sharegpt,fixed512 --engines vllm --repeat 3

An engine takes nine tenths of the GPU, so each runs alone, in a process of its own that has
ended before the next begins. One start serves all its workloads (the cells) that have the same
setting. Both get bf16, the same longest length and share of the memory, prefix caching on and
emptied before every repeat; each gets what it is best at, vLLM its number of seats and ours the
tokens of a step. A warm-up on other seeds comes first. One JSON line a cell, as soon as it is
there: the median of its repeats, and its fraction of the limit of `benchmarks.roofline`; where
`--set kv_cache_dtype=fp8` or `--vllm-set 'kv_cache_dtype="fp8"'` keeps keys and values in eight
bits, of the limit for these, and the line says so. `benchmarks.gpu_table` makes a table of them.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import roofline, workloads
from benchmarks.contender import Answer, Case, Contender, ContenderError
from benchmarks.model import Model, find_model
from engine.errors import StartupError

ENGINES = ("pagemill", "vllm")

# what both engines are told
MAX_MODEL_LEN = 8192
MEMORY_SHARE = 0.9
MAX_NUM_SEQS = 1024
MAX_NUM_BATCHED_TOKENS = 8192

# where steps may be as large as vLLM's own choice and the cache still holds all that runs; of the 8b model it
# would not, and the last prompts of `summarize` would wait for room
_TOKEN_BUDGETS = {"qwen2.5-0.5b": 16_384}
# where vLLM is faster with fewer seats
_VLLM_SEATS = {("qwen2.5-0.5b", "fixed512"): 256}
# cells that are short, or differ from run to run
_REPEATS = {("llama-3.1-8b", cell): 3 for cell in ("prefix", "single", "batch32")} | {
    ("qwen2.5-0.5b", cell): 3 for cell in ("sharegpt", "fixed512", "summarize", "prefix", "single", "batch32")
}

_WARM_UPS = (("sharegpt", 128, 901), ("summarize", 8, 902))
# vLLM's engine process gives the memory back before it ends
_GRACE_S = 30.0

Emit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Start:
    """One process of an engine, and the workloads that it runs."""

    engine: str
    max_num_seqs: int
    cells: tuple[str, ...]


def plan(model: str, cells: Sequence[str], engines: Sequence[str], vllm_seats: int | None = None) -> list[Start]:
    """
    The fewest starts that give every cell its engine's best setting.

    Args:
        vllm_seats: max_num_seqs of vLLM for all cells, to save starts; None takes the best of each.
    """
    starts = []
    for engine in engines:
        by_seats: dict[int, list[str]] = {}
        for cell in cells:
            seats = MAX_NUM_SEQS
            if engine == "vllm":
                seats = vllm_seats or _VLLM_SEATS.get((model, cell), MAX_NUM_SEQS)
            by_seats.setdefault(seats, []).append(cell)
        starts += [Start(engine, seats, tuple(found)) for seats, found in by_seats.items()]
    return starts


def budget_of(model: str) -> int:
    """Tokens of a step that our engine is told, by the model's name."""
    return _TOKEN_BUDGETS.get(model, MAX_NUM_BATCHED_TOKENS)


def our_options(max_num_seqs: int = MAX_NUM_SEQS, token_budget: int = MAX_NUM_BATCHED_TOKENS) -> list[str]:
    """Settings of our engine on a GPU, as `benchmarks.ours.configure` takes them."""
    return [
        "device=cuda",
        "dtype=bfloat16",
        f"gpu_memory_utilization={MEMORY_SHARE}",
        f"max_num_seqs={max_num_seqs}",
        f"max_num_batched_tokens={token_budget}",
    ]


def environment(path: str | None = None) -> dict[str, str]:
    """No look-ups outside; `path` comes first where a child looks for modules."""
    found = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if path is not None:
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")]))
    return found


def contender(start: Start, model: Model, args: argparse.Namespace) -> Contender:
    """The process of a start."""
    common = ["--model", str(model.folder), *["--dummy"] * model.dummy, "--max-model-len", str(args.max_model_len)]
    if start.engine == "pagemill":
        settings = [*our_options(start.max_num_seqs, budget_of(model.name)), *args.set]
        options = [word for setting in settings for word in ("--set", setting)]
        return Contender("pagemill", "benchmarks.ours", [*common, *options], environment=environment())
    seats = ["--max-num-seqs", str(start.max_num_seqs), "--gpu-memory-utilization", str(MEMORY_SHARE)]
    options = [word for option in args.vllm_set for word in ("--set", option)]
    return Contender(
        "vllm",
        "benchmarks.peers.vllm_gpu",
        [*common, *seats, *options],
        python=args.peer_python or sys.executable,
        environment=environment(args.peer_path),
        grace_s=_GRACE_S,
    )


def run(args: argparse.Namespace, emit: Emit) -> dict[str, dict[str, float]]:
    """Measure every cell; returns output tokens/s by engine and cell."""
    rates: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = find_model(args.model, Path(scratch))
        for start in plan(model.name, args.cells.split(","), args.engines.split(","), args.vllm_seats):
            progress(f"starting {start.engine} with {start.max_num_seqs} seats for {', '.join(start.cells)}")
            engine = contender(start, model, args)
            try:
                with engine:
                    _run_start(engine, start, model, args, emit, rates.setdefault(start.engine, {}))
            except ContenderError as error:
                emit({"engine": start.engine, "model": model.name, "error": str(error)})
                progress(engine.log_tail)
    return rates


def _run_start(
    engine: Contender, start: Start, model: Model, args: argparse.Namespace, emit: Emit, rates: dict[str, float]
) -> None:
    progress(f"{engine.name} started in {engine.start_up_s:.1f} s")
    begin = time.perf_counter()
    for name, n, seed in _WARM_UPS:
        engine.run(Case(name, min(n, args.n or n), seed, model.vocab, args.scale, 0))
    more = {"max_num_seqs": start.max_num_seqs, "start_up_s": engine.start_up_s}
    more["warm_up_s"] = round(time.perf_counter() - begin, 2)
    fp8_kv = _has_fp8_kv(args.set if start.engine == "pagemill" else args.vllm_set)
    for cell in start.cells:
        case = Case(cell, args.n, None, model.vocab, args.scale, 0)
        try:
            runs = _repeat(engine, case, args.repeat or _REPEATS.get((model.name, cell), 1))
        except ContenderError as error:
            emit({"engine": engine.name, "model": model.name, "workload": cell, "error": str(error)})
            progress(engine.log_tail)
            continue
        found = line(engine.name, model, case, runs, fp8_kv=fp8_kv) | more
        rates[cell] = found["output_tok_s"]
        emit(found)


def _repeat(engine: Contender, case: Case, repeat: int) -> list[Answer]:
    runs = []
    for number in range(repeat):
        runs.append(engine.run(replace(case, run=number + 1)))
        progress(f"{engine.name}: {case.workload} in {runs[-1].wall_s:.2f} s")
    return runs


def _has_fp8_kv(options: Sequence[str]) -> bool:
    # ours are words, vLLM's are JSON
    return any(option.replace('"', "") == "kv_cache_dtype=fp8" for option in options)


def line(engine: str, model: Model, case: Case, runs: Sequence[Answer], *, fp8_kv: bool = False) -> dict[str, Any]:
    """The line of one engine on one workload."""
    requests = case.requests()
    shape = roofline.Shape.of(json.loads((model.folder / "config.json").read_text()))
    precision = roofline.FP8_KV if fp8_kv else roofline.BF16
    limit = roofline.limit_of(case.workload, requests, shape, precision, scale=case.scale)
    wall_s, produced = statistics.median(run.wall_s for run in runs), sum(runs[-1].lengths)
    found = workloads.result_line(
        engine,
        model.name,
        case.workload,
        requests,
        wall_s,
        produced,
        dtype="bfloat16",
        limit_tok_s=round(limit["output_tok_s"], 1),
        of_limit=round(produced / wall_s / limit["output_tok_s"], 4),
        repeats=len(runs),
        all_wall_s=[round(run.wall_s, 3) for run in runs],
        scale=case.scale,
        **runs[-1].stats,
    )
    if fp8_kv:
        found["kv_cache_dtype"] = "fp8"
    if case.workload in workloads.SEQUENTIAL:
        found["ms_per_output_token"] = round(1e3 * wall_s / produced, 3)
    return found


def progress(text: str) -> None:
    """For whoever waits at a terminal; the figures go to standard output."""
    print(text, file=sys.stderr, flush=True)


def emitter(out: Path | None) -> Emit:
    """Prints lines, and appends them to a file at once: a run that is cut short keeps what it had."""

    def emit(message: dict[str, Any]) -> None:
        text = json.dumps(message)
        print(text, flush=True)
        if out is not None:
            with out.open("a") as file:
                file.write(text + "\n")

    return emit


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", help="a shape of benchmarks.shapes, or a folder")
    parser.add_argument("--cells", default=",".join(workloads.SPECS), help="workloads")
    parser.add_argument("--engines", default=",".join(ENGINES), help="in this order")
    parser.add_argument("--repeat", type=int, help="for all cells; otherwise 3 where a claim stands on it, and 1")
    parser.add_argument("--n", type=int, help="requests of each workload")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies every length")
    parser.add_argument("--max-model-len", type=int, default=MAX_MODEL_LEN)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of our engine")
    parser.add_argument("--vllm-seats", type=int, help="max_num_seqs of vLLM for all cells, to start it once")
    parser.add_argument("--vllm-set", action="append", default=[], metavar="NAME=JSON", help="an argument of vllm.LLM")
    parser.add_argument("--peer-path", help="a folder with vLLM, put on the path of its process alone")
    parser.add_argument("--peer-python", help="the interpreter that has vLLM")
    parser.add_argument("--out", type=Path, help="append the lines to this file too")
    args = parser.parse_args(argv)
    for name, known in (("cells", tuple(workloads.SPECS)), ("engines", ENGINES)):
        if unknown := set(getattr(args, name).split(",")) - set(known):
            parser.error(f"unknown {name} {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        run(args, emitter(args.out))
    except StartupError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
