"""Which layers of which steps rotate inside attention, on a CPU: references stand in for kernels."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.cuda.cascade import CascadeGate
from engine.cuda.model_runner import CudaModelRunner
from engine.llm_engine import LLMEngine
from engine.model import attention
from engine.request import Request
from engine.sampling_params import SamplingParams
from kernels import cascade_attention
from tests.support.answers import assert_same_answers, make_requests, run_all
from tests.support.cuda_engine import make_engine
from tests.support.tiny_models import save_tiny_model

# a head of 16 without norms
PLAIN = "llama with biases"
INSIDE, BEFORE = "rotate_and_attend", "rope_and_store"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, bool]]:
    """How often the layers called each, with rows of decodes alone and with others."""
    found: Counter[tuple[str, bool]] = Counter()
    decodes_alone = False
    forward = attention.Attention.forward

    def watched(self: Any, hidden: Any, batch: Any, *args: Any) -> Any:
        nonlocal decodes_alone
        decodes_alone = not batch.prefill
        return forward(self, hidden, batch, *args)

    def counting(name: str) -> Any:
        function = getattr(attention, name)

        def counted(*args: Any) -> Any:
            found[name, decodes_alone] += 1
            return function(*args)

        return counted

    monkeypatch.setattr(attention.Attention, "forward", watched)
    for name in (INSIDE, BEFORE):
        monkeypatch.setattr(attention, name, counting(name))
    return found


def engine_of(folder: Path, model: str, *, cuda: bool = True, **options: Any) -> LLMEngine:
    save_tiny_model(model, folder)
    return make_engine(folder, cuda=cuda, **options)


def test_answers_of_both_ways_are_those_of_the_cpu(tmp_path: Path, calls: Counter[tuple[str, bool]]) -> None:
    """
    Steps of decodes alone take the one, and steps with prompts the other: what one stores the other reads.
    """
    requests = make_requests(seed=5)
    expected = run_all(engine_of(tmp_path, PLAIN, cuda=False), requests)
    calls.clear()

    actual = run_all(make_engine(tmp_path, cuda=True), requests)

    assert_same_answers(expected, actual)
    assert {(INSIDE, True), (BEFORE, False)} == set(calls)


@pytest.mark.parametrize(
    ("model", "options"),
    [("qwen3", {}), (PLAIN, {"fp8": True}), ("llama", {}), (PLAIN, {"cuda": False})],
    ids=["norms", "float8", "small heads", "cpu"],
)
def test_other_models_are_rotated_before(
    tmp_path: Path, calls: Counter[tuple[str, bool]], model: str, options: dict[str, Any]
) -> None:
    """
    Whatever a step is made of.
    """
    run_all(engine_of(tmp_path, model, **options), make_requests(seed=5)[:4])

    assert {(BEFORE, True), (BEFORE, False)} == set(calls)


def test_a_shared_prefix_is_attended_by_rotated_queries(
    tmp_path: Path, calls: Counter[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    While two share one every layer without a window rotates before; when one has left, all rotate inside again.
    """
    monkeypatch.setattr(cascade_attention, "MIN_CHUNK", 16)
    prompt = np.arange(4, 44, dtype=np.int32)
    requests = [Request(str(count), prompt, SamplingParams(max_tokens=count, ignore_eos=True)) for count in (30, 9)]
    expected = run_all(engine_of(tmp_path, PLAIN, cuda=False), requests)
    calls.clear()
    engine = make_engine(tmp_path, cuda=True, cascade=CascadeGate(min_seqs=2, min_tokens=16))
    runner = engine._runner
    assert isinstance(runner, CudaModelRunner)
    engine.add(requests[0])
    # the second finds the blocks that the first has filled
    for _ in range(3):
        engine.step()

    actual = run_all(engine, requests[1:])

    assert_same_answers(expected, actual)
    assert calls[INSIDE, True] > 0
    assert 0 < 3 * runner.cascade.num_steps == calls[BEFORE, True]


def test_both_ways_are_tried_before_the_first_request(tmp_path: Path, calls: Counter[tuple[str, bool]]) -> None:
    """
    No kernel is left to be compiled when the first prompt comes while others decode.
    """
    runner = engine_of(tmp_path, PLAIN)._runner
    assert isinstance(runner, CudaModelRunner)

    runner.try_decode(2)

    assert {(INSIDE, True), (BEFORE, False)} == set(calls)
