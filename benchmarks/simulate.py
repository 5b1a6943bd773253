"""
A GPU run without a GPU: the real scheduler and block manager on a workload, each step priced by `step_cost`.

    python -m benchmarks.simulate
    python -m benchmarks.simulate --model qwen2.5-0.5b --workloads sharegpt,longtail --policies throughput

One JSON line per workload and policy, in seconds to tens of seconds on one core, so that a policy can be
chosen before a GPU is asked. `wall_s` goes to steps with a prompt (`prefill_s`), to decodes (`decode_s`), of
which `tail_s` are those with less than a quarter of the largest batch, and to a GPU that waits for the
processor (`idle_s`). Where results/h200-fcfs.jsonl has the very same requests, served first come, first
served, in steps of 8,192 tokens, `over_measured` is the simulated time over that; those runs are of an older
engine, which read shared prefixes again for each sequence and was slower at small batches.
"""

import argparse
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import shapes, workloads
from benchmarks.gpu import MAX_MODEL_LEN, MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, budget_of
from benchmarks.ours import engine_request
from benchmarks.roofline import Shape
from benchmarks.step_cost import Price, StepCost, Work
from engine.block_manager import BlockManager
from engine.config import POLICIES, PolicyName
from engine.pacing import is_worthwhile
from engine.queue_policy import queue_policy
from engine.request import FinishReason, Step
from engine.request import Sequence as EngineSequence
from engine.scheduler import Scheduler

_BLOCK_SIZE = 16
# tokens that are left of the GPU's memory
_KV_TOKENS = {"llama-3.1-8b": 876_816, "qwen2.5-0.5b": 10_641_200}
_TOKEN = 5
# steps in flight
_DEPTH = 2
_TAIL = 0.25
_MEASURED = Path(__file__).parent / "results" / "h200-fcfs.jsonl"


@dataclass(slots=True)
class Bill:
    """
    What each step cost, and how many sequences it decoded.

    Args:
        between_s: In which the GPU waits besides.
    """

    between_s: float = 0.0
    prices: list[Price] = field(default_factory=list)
    decodes: list[int] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)

    def add(self, work: Work, price: Price) -> None:
        self.prices.append(price)
        self.decodes.append(work.decodes)
        self.prompts.append(work.prompt_tokens)

    def summary(self) -> dict[str, Any]:
        """Seconds in all, and where they went."""
        decodes, with_prompt = np.array(self.decodes), np.array(self.prompts) > 0
        device = np.array([price.device_s for price in self.prices])
        wall = np.array([price.seconds for price in self.prices])
        tail = ~with_prompt & (decodes < _TAIL * decodes.max())
        parts = {
            "wall_s": wall.sum() + self.between_s,
            "prefill_s": device[with_prompt].sum(),
            "decode_s": device[~with_prompt].sum(),
            "tail_s": device[tail].sum(),
            "idle_s": (wall - device).sum() + self.between_s,
        }
        return {"steps": len(wall), **{name: round(float(seconds), 3) for name, seconds in parts.items()}}


def make_scheduler(
    policy: PolicyName, *, paced: bool, kv_tokens: int, max_num_seqs: int, token_budget: int
) -> Scheduler:
    """The scheduler that the engine would have."""
    return Scheduler(
        BlockManager(num_blocks=kv_tokens // _BLOCK_SIZE + 1, block_size=_BLOCK_SIZE),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=token_budget,
        max_model_len=MAX_MODEL_LEN,
        policy=queue_policy(policy, paced=paced),
    )


def serve(scheduler: Scheduler, requests: Sequence[workloads.Request], cost: StepCost, bill: Bill) -> None:
    """Bring all requests, given at once, to their end."""
    for index, request in enumerate(requests):
        scheduler.add(EngineSequence(engine_request(str(index), request), 0))
    in_flight: deque[Step] = deque()
    while scheduler.has_work:
        step = scheduler.schedule()
        if step is not None:
            work = work_of(step, scheduler.blocks)
            bill.add(work, cost.price(work))
            in_flight.append(step)
        elif not in_flight:
            raise RuntimeError("nothing can run: the longest request does not fit in the pool")
        if step is None or len(in_flight) >= _DEPTH:
            _complete(scheduler, in_flight.popleft())
    while in_flight:
        _complete(scheduler, in_flight.popleft())


def work_of(step: Step, blocks: BlockManager) -> Work:
    """What a step has to do, as the cost of it is counted."""
    decodes = step.decodes
    context = held = 0
    if decodes:
        context = int(decodes.starts.sum()) + len(decodes)
        held = int((decodes.starts // blocks.block_size + 1).sum())
    # a block in several tables is read for each of them
    repeated = max(0, held - blocks.num_used_blocks) * blocks.block_size
    return Work(
        decodes=len(decodes),
        context=context,
        repeated=min(repeated, context),
        prompts=tuple((chunk.length, chunk.start) for chunk in step.prefill_chunks),
        sampled=sum(chunk.samples for chunk in step.prefill_chunks),
    )


def _complete(scheduler: Scheduler, step: Step) -> None:
    arrived = scheduler.complete(step, np.full(step.num_sampling, _TOKEN))
    for row in np.flatnonzero(arrived.last).tolist():
        scheduler.finish(arrived.sequences[row], FinishReason.LENGTH)


def run(name: str, requests: Sequence[workloads.Request], scheduler: Scheduler, cost: StepCost) -> dict[str, Any]:
    """Simulate a workload the way its requests are sent, and return what its line says of it."""
    bill = Bill(cost.rates.request_s * len(requests))
    for together in [[request] for request in requests] if name in workloads.SEQUENTIAL else [requests]:
        serve(scheduler, together, cost, bill)
    summary = bill.summary()
    output = sum(request.max_tokens for request in requests)
    return {
        **summary,
        "output_tok_s": round(output / summary["wall_s"], 1),
        "preemptions": sum(scheduler.num_preemptions.values()),
        "prefix_hit_tokens": scheduler.blocks.hit_tokens,
    }


def measured() -> dict[tuple[str, str], float]:
    """Seconds that the engine took on a GPU, by model and digest."""
    lines = [json.loads(text) for text in _MEASURED.read_text().splitlines()]
    return {(line["model"], line["digest"]): line["wall_s"] for line in lines if line["engine"] == "pagemill"}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", choices=sorted(_KV_TOKENS))
    parser.add_argument("--workloads", default=",".join(workloads.SPECS))
    parser.add_argument("--policies", default=",".join(reversed(POLICIES)))
    parser.add_argument("--n", type=int, help="requests of each workload")
    parser.add_argument("--kv-tokens", type=int, help="size of the KV pool; otherwise the model's on an H200")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--token-budget", type=int)
    args = parser.parse_args(argv)
    config, known = shapes.SHAPES[args.model], measured()
    usual = {
        "kv_tokens": _KV_TOKENS[args.model],
        "max_num_seqs": MAX_NUM_SEQS,
        "token_budget": budget_of(args.model),
    }
    as_measured = usual | {"token_budget": MAX_NUM_BATCHED_TOKENS}
    limits = {name: getattr(args, name) or value for name, value in usual.items()}
    cost = StepCost(Shape.of(config), max_num_seqs=limits["max_num_seqs"], token_budget=limits["token_budget"])
    for name in args.workloads.split(","):
        requests = workloads.build(name, n=args.n, vocab=config["vocab_size"])
        digest = workloads.digest(requests)
        for policy in args.policies.split(","):
            scheduler = make_scheduler(policy, paced=is_worthwhile(cost.read_s), **limits)
            line = {"simulate": "H200", "model": args.model, "workload": name, "digest": digest, "policy": policy}
            line |= limits | run(name, requests, scheduler, cost)
            if policy == "fcfs" and limits == as_measured and (args.model, digest) in known:
                line["over_measured"] = round(line["wall_s"] / known[args.model, digest], 3)
            print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
