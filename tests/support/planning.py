"""Schedulers of small worlds, driven by the fake runner."""

from collections.abc import Callable

import numpy as np

from engine.block_manager import BlockManager
from engine.policy import Headroom, PreemptionPolicy
from engine.queue_policy import QueuePolicy
from engine.request import Request, Sequence, Step
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from tests.support.fake_runner import FakeRunner, Turns


def make_scheduler(
    *,
    num_blocks: int = 65,
    num_host_blocks: int = 0,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 200,
    preemption: str = "auto",
    headroom: int = 16,
    policy: QueuePolicy | None = None,
) -> Scheduler:
    return Scheduler(
        BlockManager(num_blocks=num_blocks, block_size=4, num_host_blocks=num_host_blocks),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        preemption=PreemptionPolicy(preemption),
        headroom=Headroom(least=headroom),
        policy=policy,
    )


def make_turns(scheduler: Scheduler, *, depth: int = 1, bad: frozenset[tuple[str, int, int]] = frozenset()) -> Turns:
    blocks = scheduler.blocks
    runner = FakeRunner(
        num_blocks=blocks.num_blocks,
        block_size=blocks.block_size,
        num_host_blocks=blocks.num_host_blocks,
        bad_positions=bad,
    )
    return Turns(scheduler, runner, depth=depth)


def add(
    scheduler: Scheduler, name: str, length: int, *, max_tokens: int = 8, first: int | None = None, priority: int = 0
) -> Sequence:
    """Queue a prompt; prompts share tokens only where `first` is given."""
    start = 1000 * len(name) + 100 * ord(name[0]) if first is None else first
    prompt = np.arange(start, start + length, dtype=np.int32)
    sequence = Sequence(Request(name, prompt, SamplingParams(max_tokens=max_tokens), priority=priority), 0)
    scheduler.add(sequence)
    return sequence


def plan_of(step: Step | None) -> list[tuple[str, int, int]]:
    return [(c.sequence.request.request_id, c.start, c.length) for c in step.chunks] if step is not None else []


def add_bulk(scheduler: Scheduler, count: int, length: int, *, max_tokens: int = 150) -> list[Sequence]:
    """Queue prompts of the least urgent lane that share nothing."""
    return [
        add(scheduler, f"bulk{number}", length, max_tokens=max_tokens, first=10_000 + 1000 * number, priority=2)
        for number in range(count)
    ]


def took_turns(turns: Turns, until: Callable[[], bool]) -> list[Step]:
    """The steps that were launched until something holds."""
    steps: list[Step] = []
    for _ in range(1000):
        if until():
            return steps
        step = turns.take()
        turns.scheduler.check()
        steps += [step] if step is not None else []
    raise AssertionError("it never holds")


def has_sampled(sequence: Sequence) -> bool:
    return sequence.num_tokens > sequence.num_prompt_tokens


def states(sequences: list[Sequence]) -> str:
    """One letter a sequence: r, w, s or f."""
    return "".join(sequence.status.value[0] for sequence in sequences)
