"""A device that is out of memory, or lost: what the engine gives up, what it keeps, and when it ends."""

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.block_manager import BlockManager
from engine.errors import DeviceFull, DeviceLost
from engine.faults import is_lost, is_out_of_memory
from engine.llm_engine import LLMEngine
from engine.model.decoder import Decoder
from engine.output import OutputProcessor
from engine.policy import Headroom, PreemptionPolicy
from engine.request import Request, Step, StepResult
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.shedding import MAX_SHEDS, QUIET_STEPS
from tests.support.answers import assert_same_answers, make_requests, run_all
from tests.support.cuda_engine import make_engine as make_real_engine
from tests.support.fake_runner import FakeRunner, FakeTicket, answer_token
from tests.support.tiny_models import save_tiny_model

BLOCK_SIZE = 4
MAX_MODEL_LEN = 64

# tokens, by the name of their request and the index of the answer
Answers = dict[tuple[str, int], tuple[int, ...]]

# where a step fails: before anything is computed, when all is done and before it is known, or when its result is read
PLACES = ("before", "after", "result")


class FailingTicket(FakeTicket):
    """A step whose result cannot be read."""

    def __init__(self, runner: "FailingRunner", error: RuntimeError) -> None:
        self._failing = runner
        self._error = error

    def result(self) -> StepResult:
        self._failing.in_flight.clear()
        raise self._error


class FailingRunner(FakeRunner):
    """Fails where `fails` says so, with the error that it gives; nothing is in flight any more then."""

    def __init__(self, fails: Callable[[Step], tuple[str, RuntimeError] | None], *, num_blocks: int) -> None:
        super().__init__(num_blocks=num_blocks, block_size=BLOCK_SIZE, num_host_blocks=num_blocks)
        self._fails = fails

    def launch(self, step: Step) -> FakeTicket:
        failure = self._fails(step)
        if failure is None:
            return super().launch(step)
        place, error = failure
        if place == "before":
            for slot in step.left:
                self._slots.pop(slot, None)
            self.in_flight.clear()
            raise error
        super().launch(step)
        if place == "after":
            self.in_flight.clear()
            raise error
        return FailingTicket(self, error)


def make_engine(
    fails: Callable[[Step], tuple[str, RuntimeError] | None],
    *,
    depth: int = 1,
    num_blocks: int = 33,
    seqs: int = 8,
    mode: str = "swap",
) -> tuple[LLMEngine, Scheduler]:
    scheduler = Scheduler(
        BlockManager(num_blocks=num_blocks, block_size=BLOCK_SIZE, num_host_blocks=num_blocks),
        max_num_seqs=seqs,
        max_num_batched_tokens=32,
        max_model_len=MAX_MODEL_LEN,
        # copies cost nothing: whatever is preempted is swapped
        preemption=PreemptionPolicy(mode, bytes_per_token=1),
        headroom=Headroom(least=0),
    )
    engine = LLMEngine(
        scheduler=scheduler,
        runner=FailingRunner(fails, num_blocks=num_blocks),
        outputs=OutputProcessor(None, set(), MAX_MODEL_LEN),
        tokenizer=None,
        vocab_size=1000,
        model_name="fake",
        fingerprint="fake",
        depth=depth,
    )
    return engine, scheduler


def add(engine: LLMEngine, name: str, num_prompt: int, max_tokens: int, n: int = 1, priority: int = 0) -> None:
    prompt = np.arange(num_prompt, dtype=np.int32)
    params = SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True)
    engine.add(Request(name, prompt, params, priority=priority))


def step(engine: LLMEngine, scheduler: Scheduler) -> Answers:
    """The answers that end in one step."""
    finished = engine.step().finished
    scheduler.check()
    return {(output.request_id, one.index): one.token_ids for output in finished for one in output.completions}


def run(engine: LLMEngine, scheduler: Scheduler) -> Answers:
    answers: Answers = {}
    while engine.has_work:
        answers |= step(engine, scheduler)
    return answers


def full() -> RuntimeError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("place", PLACES)
def test_what_ran_when_memory_was_out_is_answered_all_the_same(depth: int, place: str) -> None:
    """
    Wherever the step failed, and however many were in flight: every answer is that of an undisturbed run.
    """
    engine, scheduler = make_engine(lambda step: (place, full()) if step.step_id in (3, 9) else None, depth=depth)
    for number in range(6):
        add(engine, f"r{number}", 3 + 5 * number, 12)

    answers = run(engine, scheduler)

    expected = {
        (f"r{number}", 0): tuple(answer_token(f"r{number}", 0, 3 + 5 * number + place) for place in range(12))
        for number in range(6)
    }
    assert expected == answers
    assert 2 == engine.stats().num_sheds
    assert (2, 8) == (scheduler.max_num_seqs, scheduler.max_num_batched_tokens)


def test_less_is_asked_for_afterwards() -> None:
    """
    Each time half as many sequences may run, which the puller sees.
    """
    engine, _ = make_engine(lambda step: ("before", full()) if step.step_id == 1 else None)
    before = engine.capacity().free_seqs
    add(engine, "r", 3, 2)
    engine.step()

    assert (8, 4) == (before, engine.capacity().free_seqs)


@pytest.mark.parametrize("seed", range(30))
def test_any_failures_leave_every_answer_as_it_is(seed: int) -> None:
    """
    Failures at random, amid preemption by swap and by lanes, n answers, shared prefixes and aborts.
    """
    rng = random.Random(seed)
    failing = {rng.randrange(1, 80): rng.choice(PLACES) for _ in range(MAX_SHEDS)}
    engine, scheduler = make_engine(
        lambda step: (failing[step.step_id], full()) if step.step_id in failing else None,
        depth=rng.choice([1, 2, 3]),
        num_blocks=rng.choice([17, 20, 33]),
        mode=rng.choice(["swap", "recompute"]),
    )
    wanted, answers = Answers(), Answers()
    for number in range(12):
        num_prompt, max_tokens, n = rng.randint(1, 30), rng.randint(1, 30), rng.choice([1, 1, 3])
        add(engine, f"r{number}", num_prompt, max_tokens, n, priority=rng.choice([0, 1, 2]))
        if number % 3 == 2:
            answers |= step(engine, scheduler)
        for index in range(n):
            tokens = (answer_token(f"r{number}", index, num_prompt + place) for place in range(max_tokens))
            wanted[f"r{number}", index] = tuple(tokens)[: MAX_MODEL_LEN - num_prompt]
    aborted = f"r{rng.randrange(12)}"
    for _ in range(rng.randrange(20)):
        answers |= step(engine, scheduler)
    engine.abort(aborted)

    answers |= run(engine, scheduler)

    assert 0 < engine.stats().num_sheds
    # what had ended before it was aborted is an answer too
    missing = wanted.keys() - answers.keys()
    assert {aborted}.issuperset(name for name, _ in missing)
    assert {one: wanted[one] for one in answers} == answers


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_who_was_preempted_while_the_step_was_in_flight_is_answered_too(mode: str, depth: int, place: str) -> None:
    """
    Their token in it is lost, and so is what it had computed of them, and the copies that were to be made of that.
    """
    failing: set[int] = set()
    engine, scheduler = make_engine(
        lambda step: (place, full()) if step.step_id in failing else None, depth=depth, seqs=2, mode=mode
    )
    add(engine, "b1", 5, 20, priority=2)
    add(engine, "b2", 7, 20, priority=2)
    for _ in range(3 * depth):
        engine.step()
    assert 2 == scheduler.num_running
    failing.add(engine.stats().num_steps + 1)
    add(engine, "u", 4, 3)

    answers = run(engine, scheduler)

    lengths = {"b1": (5, 20), "b2": (7, 20), "u": (4, 3)}
    assert {
        (name, 0): tuple(answer_token(name, 0, start + place) for place in range(count))
        for name, (start, count) in lengths.items()
    } == answers


def test_a_device_that_stays_full_ends_the_engine() -> None:
    """
    When less and less does not help, the engine says so, with what it came down to.
    """
    engine, _ = make_engine(lambda _step: ("before", full()), seqs=64)
    add(engine, "r", 3, 2)

    for _ in range(MAX_SHEDS):
        engine.step()
    with pytest.raises(DeviceFull, match="4 sequences"):
        engine.step()
    assert MAX_SHEDS == engine.stats().num_sheds


def test_a_device_that_is_full_now_and_then_does_not() -> None:
    """
    Only what comes soon after one another counts as a failure to step back.
    """
    period = QUIET_STEPS + 10
    engine, scheduler = make_engine(lambda step: ("before", full()) if step.step_id % period == 0 else None, seqs=1)
    for number in range(8 * period // 30):
        add(engine, f"r{number}", 1, 30)

    assert len(run(engine, scheduler)) == 8 * period // 30
    assert engine.stats().num_sheds > MAX_SHEDS


@pytest.mark.parametrize("place", PLACES)
def test_a_lost_device_ends_the_engine(place: str) -> None:
    """
    After an error that sticks to the context nothing is tried any more.
    """
    error = RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with `TORCH_USE_CUDA_DSA`")
    engine, _ = make_engine(lambda step: (place, error) if step.step_id == 2 else None)
    add(engine, "r", 3, 5)
    engine.step()

    with pytest.raises(DeviceLost, match="illegal memory access"):
        engine.step()


def test_other_errors_are_themselves() -> None:
    """
    A fault of ours is neither: it ends the engine under its own name.
    """
    engine, _ = make_engine(lambda _step: ("before", RuntimeError("shape [3] is not [4]")))
    add(engine, "r", 3, 5)

    with pytest.raises(RuntimeError, match="shape") as raised:
        engine.step()
    assert RuntimeError is type(raised.value)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 139.80 GiB", "full"),
        ("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported", "full"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "full"),
        ("[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory", "full"),
        ("CUDA error: device-side assert triggered", "lost"),
        ("CUDA error: misaligned address", "lost"),
        ("CUDA error: unspecified launch failure", "lost"),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`", "lost"),
        ("Triton Error [CUDA]: an illegal memory access was encountered", "lost"),
        ("CUDA error: invalid configuration argument", "other"),
        ("CUDA error: invalid argument", "other"),
        ("an illegal instruction of ours", "other"),
        ("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)", "other"),
    ],
)
def test_errors_are_told_apart_by_their_words(text: str, kind: str) -> None:
    """
    Out of memory may pass; what breaks the context does not; a wrong argument is a fault of ours.
    """
    error = RuntimeError(text)

    assert (kind == "full", kind == "lost") == (is_out_of_memory(error), is_lost(error))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_model("qwen3", path)
    return path


@pytest.mark.parametrize("part", ["forward", "logits"])
@pytest.mark.parametrize(("cuda", "mode", "num_blocks"), [(False, "swap", 60), (True, "swap", 60), (True, "auto", 200)])
def test_both_runners_go_on_where_a_step_broke_off(
    folder: Path, monkeypatch: pytest.MonkeyPatch, cuda: bool, mode: str, num_blocks: int, part: str
) -> None:
    """
    What they keep by slot is set anew: penalties, random draws, biases and log-probabilities are as ever.

    The step breaks off before its network, or behind it, with keys and values written and nothing sampled.
    """
    requests = make_requests(seed=8, longest=12)
    expected = run_all(make_real_engine(folder, cuda=False), requests)
    engine = make_real_engine(folder, cuda=cuda, mode=mode, num_blocks=num_blocks)
    whole, calls = getattr(Decoder, part), itertools.count(1)

    def breaking(*arguments: Any) -> Any:
        if next(calls) in (5, 20, 21):
            raise full()
        return whole(*arguments)

    monkeypatch.setattr(Decoder, part, breaking)

    actual = run_all(engine, requests)

    assert 3 == engine.stats().num_sheds
    assert_same_answers(expected, actual)
