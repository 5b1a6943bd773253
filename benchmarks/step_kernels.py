"""
What each kernel of a step takes on a GPU.

    python -m benchmarks.step_kernels --model qwen2.5-0.5b --batch 1
    python -m benchmarks.step_kernels --model llama-3.1-8b --batch 32 --late
    python -m benchmarks.step_kernels --model qwen2.5-0.5b --workload summarize --skip 20 --steps 40

Two JSON lines, of the same decode steps in a CUDA graph, or of the steps that a workload has one
after the other: without a profiler, the milliseconds from step to step; and as CUPTI saw the kernels,
microseconds and launches a step by name, and for how long none ran. A kernel may start
before the one ahead of it has ended, so what counts is from the end of the one ahead to its own end,
and the sum is the step. `--late` has every kernel wait until the one ahead has ended.
"""

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import gpu, workloads
from benchmarks.model import find_model
from benchmarks.ours import configure, engine_request
from benchmarks.step_gap import fill
from engine.llm_engine import LLMEngine
from engine.load import load_engine
from kernels.cuda import early

# of a kernel's name, what tells it from others
_NAME_CHARS = 60


def exclusive_us(spans: Iterable[tuple[str, float, float]]) -> dict[str, tuple[int, float]]:
    """
    Launches of each name, and the time that they added to what was there before them.

    Args:
        spans: Name, start and end of each kernel, in microseconds.
    """
    found: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    last: float | None = None
    for name, start, end in sorted(spans, key=lambda span: span[2]):
        count, total = found[name]
        found[name] = count + 1, total + max(0.0, end - (start if last is None else last))
        last = end
    return dict(found)


def idle_us(spans: Iterable[tuple[str, float, float]]) -> float:
    """Microseconds between the first start and the last end in which nothing ran."""
    idle = 0.0
    last: float | None = None
    for _, start, end in sorted(spans, key=lambda span: span[1]):
        if last is not None:
            idle += max(0.0, start - last)
        last = end if last is None else max(last, end)
    return idle


def start_late() -> None:
    """Have kernels start one after the other."""
    early.MAX_ROWS = 0


def plain_step_ms(engine: LLMEngine, steps: int) -> float:
    """Median from the end of a step to the end of the next, with nothing attached but events."""
    runner: Any = engine._runner
    runner.step_events = []
    for _ in range(steps):
        engine.step()
    torch.cuda.synchronize()
    events, runner.step_events = runner.step_events, None
    ends = [end for _, end in events]
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(ends))


def profiled(engine: LLMEngine, steps: int) -> list[tuple[str, float, float]]:
    """Kernels and copies of the steps."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    return [
        (event.name[:_NAME_CHARS], event.time_range.start, event.time_range.end)
        for event in found.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def begin(engine: LLMEngine, workload: str, skip: int, vocab: int) -> None:
    """Hand over a workload's requests, and do its first steps; one that has no prompts left is not the same again."""
    for index, request in enumerate(workloads.build(workload, vocab=vocab)):
        engine.add(engine_request(str(index), request))
    for _ in range(skip):
        engine.step()


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as scratch:
        model = find_model(args.model, Path(scratch))
        options = [*(gpu.our_options() if args.workload else gpu.our_options(args.batch)), *args.set]
        config = configure(
            model.folder, dummy=model.dummy, threads=None, max_model_len=gpu.MAX_MODEL_LEN, options=options
        )
        if args.late:
            start_late()
        engine = load_engine(config)
        label: dict[str, Any] = {"step_kernels": model.name, "late": args.late}
        if args.workload:
            begin(engine, args.workload, args.skip, model.vocab)
            label |= {"workload": args.workload, "skipped": args.skip, "steps": args.steps}
        else:
            fill(engine, args.batch, args.prompt, 3 * args.steps + 200, model.vocab)
            label |= {"batch": args.batch}
        plain = label | {"step_ms": round(plain_step_ms(engine, args.steps), 4)}
        spans = profiled(engine, args.steps)
        found = exclusive_us(spans)
        by_time = sorted(found.items(), key=lambda item: -item[1][1])
        table = {name: [round(count / args.steps, 2), round(total / args.steps, 2)] for name, (count, total) in by_time}
    return [plain, label | {"idle_us": round(idle_us(spans) / args.steps, 2), "kernels": table}]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", help="a shape of benchmarks.shapes, or a folder")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--workload", help="steps of one of benchmarks.workloads, instead of a batch of decodes")
    parser.add_argument("--skip", type=int, default=20, help="steps of the workload before those that are measured")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--late", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the engine")
    for line in run(parser.parse_args(argv)):
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
