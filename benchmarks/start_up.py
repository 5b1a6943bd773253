"""
From the start of a process to its first token, with a cold and with a warm cache of kernels.

    python -m benchmarks.start_up --model llama-3.1-8b

One JSON line a run, in seconds since the process was started: `imported`, `loaded` (the engine is
ready) and `first_token` of a short prompt; `capture_s` is what the CUDA graphs took of it. The
cold run has an empty Triton cache, which the warm one then finds filled. Weights are dummies, so
that no disk is measured.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import gpu, workloads
from benchmarks.contender import ROOT
from benchmarks.model import Model, find_model
from engine.errors import StartupError

RUNS = ("cold", "warm")


def start(model: Model, args: argparse.Namespace, cache: Path) -> dict[str, Any]:
    """
    Start an engine in a fresh process and return when it came how far.

    Raises:
        StartupError: it ended before its first token; with its last lines.
    """
    command = [sys.executable, "-m", "benchmarks.start_up", "--child", str(model.folder), "--vocab", str(model.vocab)]
    command += ["--device", args.device, "--max-model-len", str(args.max_model_len)]
    command += [word for option in args.set for word in ("--set", option)] + ["--dummy"] * model.dummy
    env = gpu.environment() | {"TRITON_CACHE_DIR": str(cache)}
    # one clock for all processes of a machine
    begin = time.monotonic()
    done = subprocess.run(
        [*command, "--begin", str(begin)], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise StartupError(f"the engine ended with {done.returncode}:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def child(args: argparse.Namespace) -> dict[str, Any]:
    """Be the process that is measured."""

    begin: float = args.begin

    def since() -> float:
        return round(time.monotonic() - begin, 3)

    # what is imported is part of the start
    import torch

    from benchmarks.ours import configure, engine_request
    from engine.load import load_engine

    capture_s: list[float] = []
    if args.device == "cuda":
        _time_captures(capture_s)
    line: dict[str, Any] = {"imported": since()}
    options = [*(gpu.our_options() if args.device == "cuda" else []), *args.set]
    config = configure(
        Path(args.child), dummy=args.dummy, threads=None, max_model_len=args.max_model_len, options=options
    )
    engine = load_engine(config)
    line["loaded"] = since()
    [request] = workloads.build("single", n=1, vocab=args.vocab)
    engine.add(engine_request("first", request))
    while not engine.stats().generated_tokens:
        engine.step()
    line["first_token"] = since()
    if args.device == "cuda":
        line["capture_s"] = round(sum(capture_s), 3)
        line["gpu"] = torch.cuda.get_device_name()
    return line


def _time_captures(seconds: list[float]) -> None:
    """Note how long each capture of graphs takes."""
    from engine.cuda.graphs import DecodeGraphs
    from engine.cuda.prefill_graphs import PrefillGraphs

    def timed(capture: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return capture(*args, **options)
            finally:
                seconds.append(time.perf_counter() - begin)

        return call

    for graphs in (DecodeGraphs, PrefillGraphs):
        setattr(graphs, "capture", timed(graphs.capture))  # noqa: B010 (a method, to the type checker)


def run(args: argparse.Namespace, emit: gpu.Emit) -> None:
    """Make the runs in order, with one cache."""
    with tempfile.TemporaryDirectory() as scratch:
        model = find_model(args.model, Path(scratch))
        cache = Path(os.environ.get("TRITON_CACHE_DIR", "~/.triton/cache")).expanduser()
        if "cold" in args.runs.split(","):
            cache = Path(scratch) / "triton"
        for name in args.runs.split(","):
            emit({"start_up": model.name, "triton_cache": name} | start(model, args, cache))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", help="a shape of benchmarks.shapes, or a folder")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--runs", default=",".join(RUNS), help="warm alone takes the cache that is there")
    parser.add_argument("--max-model-len", type=int, default=gpu.MAX_MODEL_LEN)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the engine")
    parser.add_argument("--out", type=Path, help="append the lines to this file too")
    for hidden, kind in (("--child", str), ("--vocab", int), ("--begin", float)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--dummy", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        print(json.dumps(child(args)), flush=True)
        return 0
    try:
        run(args, gpu.emitter(args.out))
    except StartupError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
