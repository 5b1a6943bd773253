"""
What a decode step costs the host beside the model: the real engine on a runner that answers at once.

    python -m benchmarks.host_step

One JSON line per number of running sequences, all of them decoding, with a step in flight behind the
one that is planned. Figures are microseconds of processor time per step: `schedule` plans it; `handle`
takes in the tokens of the oldest step and says who ends; `total` is the whole turn less the runner.
`capacity` is what a worker asks after each step, beside that. Prompts have uneven lengths, so that block
borders are crossed evenly, and three priorities; no answer ends.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from time import thread_time
from typing import Any

import numpy as np

from engine.block_manager import BlockManager
from engine.config import POLICIES, PolicyName
from engine.llm_engine import LLMEngine
from engine.output import OutputProcessor
from engine.queue_policy import queue_policy
from engine.request import Request, Step, StepResult
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler

_BLOCK_SIZE = 16
_VOCAB = 128_256
# no token that the runner draws
_EOS = _VOCAB - 1
_MAX_MODEL_LEN = 8192
_TOKEN_BUDGET = 8192
_PROMPT_LENGTHS = (64, 512)
_WARM_UP = 50


class InstantRunner:
    """Gives random tokens, and counts the time that it takes for that."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._rng = np.random.default_rng(1)

    def launch(self, step: Step) -> "InstantTicket":
        before = thread_time()
        tokens = self._rng.integers(0, _EOS, step.num_sampling)
        self.seconds += thread_time() - before
        return InstantTicket(tokens)


class InstantTicket:
    """A step that is done."""

    def __init__(self, tokens: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        self._tokens = tokens

    def result(self) -> StepResult:
        return StepResult(self._tokens)


class TimedScheduler(Scheduler):
    """Counts the time that plans take."""

    seconds = 0.0

    def schedule(self) -> Step | None:
        before = thread_time()
        step = super().schedule()
        self.seconds += thread_time() - before
        return step


def run(num_seqs: int, num_steps: int, policy: PolicyName) -> dict[str, Any]:
    """Bring sequences to decode together, time that many steps, and return the line that is printed."""
    max_tokens = num_steps + _WARM_UP + num_seqs * _PROMPT_LENGTHS[1] // _TOKEN_BUDGET + 16
    blocks_each = (_PROMPT_LENGTHS[1] + max_tokens) // _BLOCK_SIZE + 1
    scheduler = TimedScheduler(
        BlockManager(num_blocks=num_seqs * blocks_each + 1, block_size=_BLOCK_SIZE),
        max_num_seqs=num_seqs,
        max_num_batched_tokens=_TOKEN_BUDGET,
        max_model_len=_MAX_MODEL_LEN,
        policy=queue_policy(policy),
    )
    runner = InstantRunner()
    engine = LLMEngine(
        scheduler=scheduler,
        runner=runner,
        outputs=OutputProcessor(None, {_EOS}, _MAX_MODEL_LEN),
        tokenizer=None,
        vocab_size=_VOCAB,
        model_name="none",
        fingerprint="none",
        depth=2,
    )
    rng = np.random.default_rng(0)
    for index, length in enumerate(rng.integers(*_PROMPT_LENGTHS, num_seqs)):
        prompt = rng.integers(0, _EOS, length).astype(np.int32)
        engine.add(Request(str(index), prompt, SamplingParams(max_tokens=max_tokens), priority=index % 3))
    while scheduler.num_running < num_seqs:
        engine.step()
    for _ in range(_WARM_UP):
        engine.step()
    times = [_time_step(engine, scheduler, runner) for _ in range(num_steps)]
    assert scheduler.num_running == num_seqs, f"{scheduler.num_running} of {num_seqs} still run"
    columns = zip(("schedule", "handle", "total", "capacity"), zip(*times, strict=True), strict=True)
    return {"num_seqs": num_seqs, "steps": num_steps, **{name: _summary(column) for name, column in columns}}


def _time_step(engine: LLMEngine, scheduler: TimedScheduler, runner: InstantRunner) -> tuple[float, ...]:
    scheduler.seconds = runner.seconds = 0.0
    before = thread_time()
    engine.step()
    after = thread_time()
    total = after - before - runner.seconds
    engine.capacity()
    return scheduler.seconds, total - scheduler.seconds, total, thread_time() - after


def _summary(seconds: Sequence[float]) -> dict[str, int]:
    p90 = statistics.quantiles(seconds, n=10)[-1]
    return {"p50_us": round(1e6 * statistics.median(seconds)), "p90_us": round(1e6 * p90)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-seqs", default="64,256,1024", help="running sequences, a case each")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--policy", default=POLICIES[0], choices=POLICIES)
    args = parser.parse_args(argv)
    for num_seqs in map(int, args.num_seqs.split(",")):
        line = run(num_seqs, args.steps, args.policy)
        print(json.dumps({"host_step": "decode", "policy": args.policy, **line}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
