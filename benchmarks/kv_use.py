"""
How well the KV pool is used while jobs wait: the real scheduler on sharegpt lengths, no model.

    python -m benchmarks.kv_use

One JSON line per pool size. `use` is referenced blocks over usable ones and `waste` the share of
their slots that holds no token; both are means over the steps in which requests wait, from the
first one that the pool (not the token budget) limits. Time is counted in steps: what the model
would compute does not change what the scheduler decides.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks import workloads
from engine.block_manager import BlockManager
from engine.request import FinishReason, Request, Status, Step
from engine.request import Sequence as EngineSequence
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler

_TOKEN = 5
# seats and budget for the pool to be the limit
_MAX_NUM_SEQS = 1024
_TOKEN_BUDGET = 8192
_MAX_MODEL_LEN = 8192


class Moment(NamedTuple):
    """The pool in one step, in shares of 1."""

    use: float
    waste: float


def run(
    requests: Sequence[workloads.Request], *, pool_tokens: int, block_size: int, swap_tokens: int
) -> dict[str, Any]:
    """Serve all requests from a pool and return the line that is printed."""
    blocks = BlockManager(
        num_blocks=pool_tokens // block_size + 1, block_size=block_size, num_host_blocks=swap_tokens // block_size
    )
    scheduler = Scheduler(
        blocks, max_num_seqs=_MAX_NUM_SEQS, max_num_batched_tokens=_TOKEN_BUDGET, max_model_len=_MAX_MODEL_LEN
    )
    sequences = [_sequence(index, request) for index, request in enumerate(requests)]
    for sequence in sequences:
        scheduler.add(sequence)
    moments: list[Moment] = []
    num_steps = recomputed = 0
    while scheduler.has_work:
        step = scheduler.schedule()
        if step is None:
            raise RuntimeError(f"nothing can run: the longest request does not fit in {pool_tokens} tokens")
        num_steps += 1
        recomputed += sum(chunk.length for chunk in step.chunks)
        if scheduler.num_waiting + scheduler.num_swapped and (moments or step.num_tokens < _TOKEN_BUDGET):
            moments.append(_look(blocks, sequences))
        _complete(scheduler, step)
    asked = workloads.totals(list(requests))
    # the last token of an answer is never computed
    needed = asked["input_tokens"] + asked["output_tokens"] - len(requests)
    return {
        "pool_tokens": pool_tokens,
        "block_size": block_size,
        "digest": workloads.digest(list(requests)),
        "requests": len(requests),
        "steps": num_steps,
        "steps_while_jobs_wait": len(moments),
        "use": round(statistics.fmean(moment.use for moment in moments), 4),
        "waste": round(statistics.fmean(moment.waste for moment in moments), 4),
        "preemptions": {kind.value: count for kind, count in scheduler.num_preemptions.items()},
        "computed_over_needed": round(recomputed / needed, 4),
    }


def _sequence(index: int, request: workloads.Request) -> EngineSequence:
    params = SamplingParams(max_tokens=request.max_tokens, ignore_eos=True)
    return EngineSequence(Request(str(index), np.asarray(request.prompt, dtype=np.int32), params), 0)


def _look(blocks: BlockManager, sequences: Sequence[EngineSequence]) -> Moment:
    # between plan and result: a sequence's known tokens are in their slots, or about to be
    running = [sequence for sequence in sequences if sequence.status is Status.RUNNING]
    held = {block for sequence in running for block in sequence.block_table}
    assert len(held) == sum(len(sequence.block_table) for sequence in running), "random prompts share no block"
    slots = len(held) * blocks.block_size
    return Moment(len(held) / blocks.num_usable_blocks, 1 - sum(one.num_known for one in running) / slots)


def _complete(scheduler: Scheduler, step: Step) -> None:
    for sequence, _ in scheduler.complete(step, [_TOKEN] * len(step.sampling)):
        if sequence.num_output == sequence.params.max_tokens:
            scheduler.finish(sequence, FinishReason.LENGTH)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=1000)
    parser.add_argument("--pools", default="16384,65536", help="sizes in tokens")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--swap-tokens", type=int, default=0, help="size of the host pool; 0 preempts by recompute")
    args = parser.parse_args(argv)
    requests = workloads.build("sharegpt", n=args.n)
    for pool in map(int, args.pools.split(",")):
        line = run(requests, pool_tokens=pool, block_size=args.block_size, swap_tokens=args.swap_tokens)
        print(json.dumps({"kv_use": "sharegpt", **line}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
