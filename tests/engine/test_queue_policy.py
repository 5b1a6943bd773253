"""Who stands before whom in the queue, under each policy."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.shapes import SHAPES
from engine.config import POLICIES, EngineConfig
from engine.load import _paced, load_engine
from engine.model.config import ModelConfig
from engine.pacing import Pacing
from engine.queue_policy import MAX_AHEAD, QueuePolicy, Throughput, queue_policy
from engine.request import BULK, FinishReason, Request, Sequence, Status
from engine.sampling_params import SamplingParams
from tests.support.planning import make_scheduler, make_turns
from tests.support.tiny_models import save_tiny_model

INTERACTIVE, STANDARD = 0, 1


class Line:
    """Requests in the order in which a policy would serve them."""

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy
        self.entries: list[tuple[tuple[int, ...], str]] = []

    def add(
        self,
        name: str,
        max_tokens: int,
        *,
        step: int = 0,
        priority: int = BULK,
        head: int | None = None,
        known: bool = True,
    ) -> int:
        """Add one of 40 tokens, which begin as others of the same head do; return the tokens expected of it."""
        start = 1000 * len(self.entries) if head is None else head
        prompt = np.arange(start, start + 40, dtype=np.int32)
        prompt[20:] += len(self.entries)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=known)
        sequence = Sequence(Request(name, prompt, params, priority=priority), 0)
        entry = self.policy.enter(sequence, 40 + max_tokens, step)
        self.entries.append((entry.order, name))
        return entry.expected

    def __repr__(self) -> str:
        return " ".join(name for _, name in sorted(self.entries))


def test_the_longest_answer_is_first() -> None:
    """
    Bulk work of known length starts with what takes longest, and the first come of equals.
    """
    line = Line(Throughput())
    for name, max_tokens in (("short", 10), ("long", 500), ("middle", 50), ("middle2", 50)):
        line.add(name, max_tokens)

    assert "long middle middle2 short" == repr(line)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_somebody_waits_for_is_served_as_it_comes(policy: str) -> None:
    """
    Priority is first under every policy, and arrival within a priority that is not bulk.
    """
    line = Line(queue_policy(policy))  # type: ignore[arg-type]
    for name, max_tokens, priority in (
        ("bulk", 900, BULK),
        ("standard", 10, STANDARD),
        ("standard2", 500, STANDARD),
        ("now", 10, INTERACTIVE),
        ("now2", 500, INTERACTIVE),
    ):
        line.add(name, max_tokens, priority=priority)

    assert "now now2 standard standard2 bulk" == repr(line)


def test_first_come_is_first_served() -> None:
    """
    The other policy looks at nothing but arrival.
    """
    line = Line(QueuePolicy())
    for name, max_tokens in (("short", 10), ("long", 500), ("middle", 50)):
        line.add(name, max_tokens)

    assert "short long middle" == repr(line)


def test_who_waits_is_aged_by_a_token_a_step() -> None:
    """
    One that comes n steps later goes ahead if its answer is more than n tokens longer.
    """
    line = Line(Throughput())
    line.add("short", 10, step=0)
    line.add("longer", 110, step=99)
    line.add("later", 110, step=101)

    assert "longer short later" == repr(line)


def test_nobody_is_passed_by_what_comes_much_later() -> None:
    """
    However long an answer is, it does not go ahead of one that came that many steps before.
    """
    line = Line(Throughput())
    line.add("short", 1, step=0)
    line.add("huge", 100_000, step=MAX_AHEAD + 1)

    assert "short huge" == repr(line)


def test_prompts_that_begin_alike_stand_together() -> None:
    """
    A group has the place of its first member, and within it the longest is first.
    """
    line = Line(Throughput(group_tokens=16))
    line.add("a1", 100, head=0)
    line.add("x", 90)
    line.add("b1", 80, head=500)
    line.add("a2", 10, head=0)
    line.add("b2", 85, head=500)
    line.add("a3", 50, head=0)

    assert "a1 a3 a2 x b2 b1" == repr(line)


def test_a_group_is_closed_after_a_while() -> None:
    """
    A popular beginning does not let its prompts pass the others for ever.
    """
    line = Line(Throughput(group_tokens=16))
    line.add("a1", 10, step=0, head=0)
    line.add("x", 10, step=5)
    line.add("a2", 10, step=1000, head=0)
    line.add("a3", 10, step=3000, head=0)

    assert "a1 a2 x a3" == repr(line)


def test_prompts_of_parties_that_share_nothing_are_no_group() -> None:
    """
    Their blocks are found by nobody else.
    """
    policy = Throughput(group_tokens=16)
    prompt = np.arange(40, dtype=np.int32)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    orders = [
        policy.enter(Sequence(Request("r", prompt, params, cache_salt=salt, priority=BULK), 0), 45, 0).order
        for salt in ("a", "b", "a")
    ]

    assert orders[0][:3] == orders[2][:3] != orders[1][:3]


def test_lengths_are_learned_where_the_model_ends_its_answers() -> None:
    """
    An answer is expected to be as long as others of its template were, and no longer than it may be.
    """
    policy = Throughput()
    line = Line(policy)
    assert 0 == line.add("new", 500, known=False, head=0)
    for _ in range(4):
        policy.ended(answered(30), FinishReason.STOP)
        policy.ended(answered(30), FinishReason.ABORT)

    assert 40 + 30 == line.add("like those", 500, known=False, head=0)
    assert 40 + 20 == line.add("allowed less", 20, known=False, head=0)
    assert 40 + 500 == line.add("without an end", 500, head=0)


def test_what_says_nothing_of_an_answers_length_teaches_nothing() -> None:
    """
    An answer that was cut off would have been longer; other lanes' answers are of another kind; none is no answer.
    """
    policy = Throughput()
    line = Line(policy)
    for _ in range(8):
        policy.ended(answered(16), FinishReason.LENGTH)
        policy.ended(answered(20, priority=INTERACTIVE), FinishReason.STOP)
        policy.ended(answered(0), FinishReason.LENGTH)
    assert 0 == line.add("nothing known", 500, known=False, head=0)

    for _ in range(4):
        policy.ended(answered(30), FinishReason.STOP)
    policy.ended(answered(16), FinishReason.LENGTH)
    assert 40 + 30 == line.add("ends at 30", 500, known=False, head=0)
    for _ in range(60):
        policy.ended(answered(100), FinishReason.LENGTH)
    assert 40 + 100 == line.add("longer ones exist", 500, known=False, head=0)


@pytest.mark.parametrize(("paced", "started"), [(True, 1), (False, 3)])
def test_who_finds_room_waits_only_where_work_is_paced(paced: bool, started: int) -> None:
    """
    Beside a long answer short ones wait for even steps; elsewhere they start at once.
    """
    policy = queue_policy("throughput", paced=paced)
    assert isinstance(policy, Throughput)
    assert paced == (policy.pacing is not None)
    if policy.pacing is not None:
        policy.pacing.least, policy.pacing.spread = 1, 1.0
    scheduler = make_scheduler(num_blocks=400, max_num_seqs=8, policy=policy)
    turns = make_turns(scheduler)
    for place, max_tokens in enumerate([180, 10, 10]):
        prompt = np.arange(8, dtype=np.int32) + 100 * place
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        scheduler.add(Sequence(Request(str(place), prompt, params, priority=BULK), 0))
        turns.take()

    assert started == scheduler.num_running


@pytest.mark.parametrize(
    ("shape", "dtype", "on_gpu", "paced"),
    [
        ("llama-3.2-3b", torch.bfloat16, True, False),
        ("llama-3.2-3b", torch.float32, True, True),
        ("qwen2.5-0.5b", torch.float32, True, False),
        ("qwen2.5-0.5b", torch.float32, False, True),
    ],
)
def test_weights_count_by_their_bytes_and_the_memory_they_are_in(
    shape: str, dtype: torch.dtype, on_gpu: bool, paced: bool
) -> None:
    """
    What is twice as wide takes twice as long to read, and a CPU reads slowly.
    """
    parts: Any = SimpleNamespace(model=ModelConfig.parse(SHAPES[shape]), dtype=dtype)

    assert paced == _paced(parts, on_gpu=on_gpu)


@pytest.mark.parametrize("least_read_s", [0.0, 2e-3])
def test_an_engine_is_paced_by_the_size_of_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least_read_s: float
) -> None:
    """
    A tiny model's weights are read in no time, on a CPU too.
    """
    monkeypatch.setattr("engine.pacing.LEAST_READ_S", least_read_s)
    save_tiny_model("llama", tmp_path)
    config = EngineConfig(
        model=tmp_path, device="cpu", dtype="float32", load_format="dummy", max_model_len=64, kv_cache_bytes=1 << 20
    )
    policy = load_engine(config)._scheduler._policy

    assert isinstance(policy, Throughput)
    assert (policy.pacing is not None) == (least_read_s == 0)


def test_what_has_a_deadline_is_never_held_back() -> None:
    """
    It would end unanswered while it waits for even steps.
    """
    policy = Throughput(Pacing(least=1))
    scheduler = make_scheduler(num_blocks=400, max_num_seqs=8, policy=policy)
    long, plain, due = (
        Sequence(
            Request(
                name,
                np.arange(8, dtype=np.int32) + 100 * place,
                SamplingParams(max_tokens=max_tokens, ignore_eos=True),
                priority=BULK,
                has_deadline=name == "due",
            ),
            0,
        )
        for place, (name, max_tokens) in enumerate([("long", 200), ("plain", 20), ("due", 20)])
    )
    scheduler.add(long)
    turns = make_turns(scheduler)
    turns.take()
    scheduler.add(due)
    scheduler.add(plain)
    turns.take()

    assert Status.RUNNING is due.status
    assert Status.WAITING is plain.status


def answered(num_tokens: int, *, priority: int = BULK) -> Sequence:
    sequence = Sequence(Request("r", np.arange(40, dtype=np.int32), SamplingParams(), priority=priority), 0)
    sequence.extend([7] * num_tokens)
    return sequence


def test_a_prefix_that_leaves_the_cache_is_computed_once_a_group() -> None:
    """
    In a pool for two sequences, of twelve prompts with four beginnings that came by turns, eight find theirs cached.
    """
    hits = {}
    for name, policy in (("fcfs", QueuePolicy()), ("throughput", Throughput(group_tokens=16))):
        scheduler = make_scheduler(num_blocks=25, max_num_seqs=2, policy=policy)
        for number in range(12):
            prompt = np.concatenate([np.arange(24) + 100 * (number % 4), [5000 + number] * 8]).astype(np.int32)
            params = SamplingParams(max_tokens=6, ignore_eos=True)
            scheduler.add(Sequence(Request(str(number), prompt, params, priority=BULK), 0))
        make_turns(scheduler).run()
        hits[name] = scheduler.blocks.hit_tokens

    assert 7 * 24 < hits["throughput"] <= 8 * 24
    assert hits["fcfs"] < 4 * 24
