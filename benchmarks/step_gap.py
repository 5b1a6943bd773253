"""
What lies between two decode steps on a GPU, and what a step costs the processor.

    python -m benchmarks.step_gap --model llama-3.1-8b --batch 1024 --steps 100

One JSON line. All sequences decode, none ends. In a first run of --steps nothing is attached but
a pair of CUDA events around each step's work: `gap` is from the end of one step on the GPU to
the start of the next, `gap_share` the median of gap over step, and `cpu_ms` the processor time
of the engine's thread per step. A second run wraps the engine's parts to tell what the time of
the thread goes to; `wait` is for the tokens of the oldest step, and `cpu_without_wait_ms` leaves
its processor time out.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks import gpu, workloads
from benchmarks.model import find_model
from benchmarks.ours import configure, engine_request
from benchmarks.workloads import Request
from engine.llm_engine import LLMEngine
from engine.load import load_engine
from engine.request import Runner, Step, StepResult, Ticket

_PROMPT = 128
# steps until all prompts are computed and the engine's own buffers are warm
_SETTLE = 16


class TimedEvent(Protocol):
    """What is used of a CUDA event that keeps the time."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this event to `end`."""
        ...


class Meter:
    """Seconds by the clock and of the processor, of calls that are wrapped."""

    def __init__(self) -> None:
        self.wall = 0.0
        self.cpu = 0.0

    def timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return work(*args)
            finally:
                self.wall += time.perf_counter() - wall
                self.cpu += time.thread_time() - cpu

        return call


class MeteredRunner:
    """A runner whose launches are counted in one meter, and waits for their results in another."""

    def __init__(self, runner: Runner, launch: Meter, wait: Meter) -> None:
        self._launch = launch.timed(runner.launch)
        self._wait = wait

    def launch(self, step: Step) -> Ticket:
        return MeteredTicket(self._launch(step), self._wait)


class MeteredTicket:
    """A ticket whose wait is counted."""

    def __init__(self, ticket: Ticket, wait: Meter) -> None:
        self._result = wait.timed(ticket.result)

    def result(self) -> StepResult:
        found: StepResult = self._result()
        return found


def gaps(events: Sequence[tuple[TimedEvent, TimedEvent]]) -> dict[str, float]:
    """Medians over consecutive steps, from the events of their begins and ends; milliseconds."""
    steps = [begin.elapsed_time(end) for begin, end in events]
    between = [ended[1].elapsed_time(begun[0]) for ended, begun in pairwise(events)]
    shares = [gap / step for gap, step in zip(between, steps[1:], strict=True)]
    return {
        "step_ms": round(statistics.median(steps), 4),
        "gap_ms": round(statistics.median(between), 4),
        "gap_share": round(statistics.median(shares), 5),
        "gap_share_p90": round(statistics.quantiles(shares, n=10)[-1], 5),
        "gap_share_of_all": round(sum(between) / sum(steps[1:]), 5),
    }


def fill(engine: LLMEngine, batch: int, prompt: int, answer: int, vocab: int) -> None:
    """Bring `batch` requests to decode together."""
    source = workloads.build("batch32", n=batch, seed=903, vocab=vocab, scale=prompt / _PROMPT)
    for index, request in enumerate(source):
        engine.add(engine_request(str(index), Request(request.prompt, answer)))
    while engine.stats().num_waiting:
        engine.step()
    for _ in range(_SETTLE):
        engine.step()


def measure(engine: LLMEngine, steps: int) -> dict[str, Any]:
    """The run with nothing attached but the events."""
    runner: Any = engine._runner
    on_gpu = hasattr(runner, "step_events")
    if on_gpu:
        runner.step_events = []
    wall, cpu, process = time.perf_counter(), time.thread_time(), time.process_time()
    for _ in range(steps):
        engine.step()
    wall, cpu, process = time.perf_counter() - wall, time.thread_time() - cpu, time.process_time() - process
    found = {"wall_ms": wall, "cpu_ms": cpu, "process_cpu_ms": process}
    line: dict[str, Any] = {name: round(1e3 * seconds / steps, 4) for name, seconds in found.items()}
    if on_gpu:
        torch.cuda.synchronize()
        events, runner.step_events = runner.step_events, None
        line |= gaps(events)
    return line


def measure_parts(engine: LLMEngine, steps: int) -> dict[str, Any]:
    """The run with the engine's parts wrapped; the engine stays so."""
    meters = {name: Meter() for name in ("schedule", "launch", "handle", "wait")}
    private: Any = engine
    if hasattr(private._runner, "graphs"):
        meters |= _meter_launch(private._runner)
    private._runner = MeteredRunner(private._runner, meters["launch"], meters["wait"])
    private._scheduler.schedule = meters["schedule"].timed(private._scheduler.schedule)
    private._handle = meters["handle"].timed(private._handle)
    # tickets from before are handled first
    for _ in range(_SETTLE // 2):
        engine.step()
    for meter in meters.values():
        meter.wall = meter.cpu = 0.0
    cpu = time.thread_time()
    for _ in range(steps):
        engine.step()
    cpu = time.thread_time() - cpu
    meters["handle"].wall -= meters["wait"].wall
    meters["handle"].cpu -= meters["wait"].cpu
    return {
        "parts_ms": {name: round(1e3 * meter.wall / steps, 4) for name, meter in meters.items()},
        "parts_cpu_ms": {name: round(1e3 * meter.cpu / steps, 4) for name, meter in meters.items()},
        "cpu_without_wait_ms": round(1e3 * (cpu - meters["wait"].cpu) / steps, 4),
    }


def _meter_launch(runner: Any) -> dict[str, Meter]:
    """Wrap the parts of a launch on a GPU; their time is in that of the launch too."""
    parts = {
        "launch_begin": (runner._transfers, "begin"),
        "launch_pack": (runner._packer, "pack"),
        "launch_send": (runner._transfers, "send"),
        "launch_place": (runner._transfers, "show_place"),
        "launch_replay": (runner.graphs, "replay"),
        "launch_decode": (runner, "_decode"),
        "launch_fetch": (runner._transfers, "fetch"),
    }
    meters = {}
    for name, (owner, method) in parts.items():
        meters[name] = Meter()
        setattr(owner, method, meters[name].timed(getattr(owner, method)))
    return meters


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Load the model, measure both ways and return the line."""
    with tempfile.TemporaryDirectory() as scratch:
        model = find_model(args.model, Path(scratch))
        options = [f"max_num_seqs={args.batch}", *args.set]
        if args.device == "cuda":
            options = [*gpu.our_options(args.batch), *args.set]
        config = configure(
            model.folder, dummy=model.dummy, threads=None, max_model_len=args.max_model_len, options=options
        )
        engine = load_engine(config)
        gc.collect()
        gc.freeze()
        budget = config.max_num_batched_tokens or gpu.MAX_NUM_BATCHED_TOKENS
        # an answer may begin while other prompts are still computed
        answer = 2 * args.steps + 3 * _SETTLE + 2 * args.batch * args.prompt // budget
        fill(engine, args.batch, args.prompt, answer, model.vocab)
        line = measure(engine, args.steps) | measure_parts(engine, args.steps)
        running = engine.stats().num_running
        if running != args.batch:
            raise RuntimeError(f"{running} of {args.batch} sequences still run at the end: give a larger KV cache")
        # 0 where CUDA was never started, which asking does not do
        if torch.cuda.memory_allocated():
            line["gpu"] = torch.cuda.get_device_name()
    return {"step_gap": model.name, "batch": args.batch, "prompt": args.prompt, "steps": args.steps} | line


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", help="a shape of benchmarks.shapes, or a folder")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu has no gaps to measure")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=_PROMPT, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--max-model-len", type=int, default=gpu.MAX_MODEL_LEN)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the engine")
    print(json.dumps(run(parser.parse_args(argv))), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
