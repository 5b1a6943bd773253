"""Whole answers on the card: those of the CPU, with graphs and without, alone and in company."""

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.cuda import prefill_graphs
from engine.cuda.model_runner import CudaModelRunner
from engine.cuda.plan import PackedPrefill
from engine.cuda.prefill_graphs import PrefillGraphs, PrefillShape
from engine.grammar import Grammar
from engine.llm_engine import LLMEngine
from engine.request import Request
from engine.sampling_params import SamplingParams
from tests.support.answers import (
    answer_differences,
    assert_same_answers,
    make_greedy_requests,
    make_requests,
    run_all,
)
from tests.support.card_engine import MODELS, Load, loader, small_cache
from tests.support.tiny_models import VOCAB, make_tiny_model, save_tiny_model


@pytest.fixture(scope="module", params=MODELS)
def load(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Load:
    return loader(save_tiny_model, request.param, tmp_path_factory.mktemp("model"))


def test_answers_are_those_of_the_cpu(load: Load) -> None:
    """
    Greedy and drawn, with penalties, biases, log-probabilities, chunks and cached prefixes.
    """
    requests = make_requests(seed=4)

    assert_same_answers(run_all(load("cpu"), requests), run_all(load(), requests))


def test_graphs_change_nothing(load: Load) -> None:
    """
    The same kernels, launched one by one.
    """
    requests = make_requests(seed=5)

    assert_same_answers(run_all(load(cuda_graphs=False), requests), run_all(load(), requests))


def test_alone_is_as_in_company(load: Load) -> None:
    """
    A seed's draws do not depend on who else runs.
    """
    requests = make_requests(seed=6)
    engine = load()
    together = run_all(engine, requests)

    alone = {}
    for request in requests:
        engine.reset_prefix_cache()
        alone |= run_all(engine, [request])

    assert_same_answers(alone, together)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preemption_changes_nothing(load: Load, mode: str) -> None:
    """
    Blocks that went to pinned memory and came back, or were computed again, with steps in flight.
    """
    requests = make_requests(seed=7, longest=100)
    engine = small_cache(load, preemption=mode)

    actual = run_all(engine, requests)

    assert engine.stats().num_preemptions
    assert_same_answers(run_all(load("cpu"), requests), actual)


def test_every_batch_size_has_its_graph(load: Load) -> None:
    """
    Padding rows disturb nobody: batches of 1 to 12, each as the eager engine answers it.
    """
    random = np.random.default_rng(1)
    prompts = [random.integers(4, VOCAB, 5 + index).astype(np.int32) for index in range(12)]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    graphs, eager = load(), load(cuda_graphs=False)
    for count in range(1, 13):
        requests = [Request(str(index), prompt, params) for index, prompt in enumerate(prompts[:count])]

        assert_same_answers(run_all(eager, requests), run_all(graphs, requests))


def note_replays(monkeypatch: pytest.MonkeyPatch) -> list[PrefillShape]:
    """The list that grows by a shape whenever prompts run in a graph."""
    replayed: list[PrefillShape] = []
    replay = PrefillGraphs.replay

    def noted(graphs: PrefillGraphs, shape: PrefillShape, prefill: PackedPrefill, sent: torch.Tensor) -> torch.Tensor:
        replayed.append(shape)
        return replay(graphs, shape, prefill, sent)

    monkeypatch.setattr(PrefillGraphs, "replay", noted)
    return replayed


def graphs_of(engine: LLMEngine) -> PrefillGraphs | None:
    assert isinstance(engine._runner, CudaModelRunner)
    return engine._runner.prefill_graphs


def test_prompts_in_a_graph_are_answered_as_without(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A short one, a few, one of any length, many that are short: each a replay, whatever the one before left there.
    """
    # so that prompts of a tiny model are long ones
    monkeypatch.setattr(prefill_graphs, "_SHORT_PROMPT", 100)
    replayed = note_replays(monkeypatch)
    engine, eager = (load(max_num_batched_tokens=1024, cuda_graphs=cuda_graphs) for cuda_graphs in (True, False))
    assert graphs_of(engine) is not None
    assert graphs_of(eager) is None
    cases = (
        ((5,), PrefillShape(32, 32, 8)),
        ((250,), PrefillShape(256, 256, 8)),
        ((97, 98, 99), PrefillShape(384, 100, 8)),
        ((1, 2, 3, 200, 4, 5, 6, 7), PrefillShape(256, 256, 8)),
        ((60,) * 12, PrefillShape(1024, 100, 16)),
        ((150,) * 4, PrefillShape(1024, 1024, 8)),
        ((1,), PrefillShape(32, 32, 8)),
    )
    random = np.random.default_rng(11)
    kinds = ({}, {"prompt_logprobs": 1}, {"temperature": 0.9, "seed": 2}, {"logprobs": 2})
    for lengths, shape in cases:
        requests = [
            Request(
                str(index),
                random.integers(4, VOCAB, length).astype(np.int32),
                SamplingParams(max_tokens=6, ignore_eos=True, **kinds[index % 4]),  # type: ignore[arg-type]
            )
            for index, length in enumerate(lengths)
        ]
        expected = run_all(eager, requests)
        assert [] == replayed

        actual = run_all(engine, requests)

        assert_same_answers(expected, actual)
        assert [shape] == replayed
        replayed.clear()


def test_graphs_of_prompts_in_16_bits_are_as_near_as_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    There other kernels attend and multiply, which padding may choose anew; its rows are what nobody wrote.
    """

    def save(name: str, folder: Path) -> None:
        shape = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "initializer_range": 0.1}
        make_tiny_model(name, **shape).save_pretrained(folder)

    replayed = note_replays(monkeypatch)
    load = loader(save, "qwen3", tmp_path, max_num_batched_tokens=1024)
    requests = make_greedy_requests(seed=12)
    expected = run_all(load("cpu"), requests)
    distances = []
    for cuda_graphs in (False, True):
        engine = load(dtype="bfloat16", cuda_graphs=cuda_graphs, prefix_caching=False)
        # alone, so that each prompt is a step of its own, and all at once
        outputs = {}
        for request in requests:
            outputs |= run_all(engine, [request])
        distances.append([answer_differences(expected, found)[0] for found in (outputs, run_all(engine, requests))])

    assert len(requests) + 1 == len(replayed)
    assert all(with_graphs < 2 * without for without, with_graphs in zip(*distances, strict=True))


def test_answers_in_a_grammar_are_those_of_the_cpu(load: Load) -> None:
    """
    Beside others, greedy and drawn, in graphs and without, with blocks for all and for a few.
    """
    pytest.importorskip("xgrammar")
    grammars = (
        Grammar("regex", "[a-z0-9 ]{5,20}"),
        Grammar("choice", '["yes", "no", "never in my life"]'),
        Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}}'),
        None,
    )
    kinds = (
        {},
        {"temperature": 1.0, "top_p": 0.9},
        {"repetition_penalty": 1.3},
        {"min_tokens": 8, "n": 2},
        {"logprobs": 2},
    )
    random = np.random.default_rng(3)
    requests = []
    for index in range(24):
        params = SamplingParams(max_tokens=40, seed=index, grammar=grammars[index % 4], **kinds[index % 5])  # type: ignore[arg-type]
        prompt = random.integers(4, VOCAB, int(random.integers(1, 60))).astype(np.int32)
        requests.append(Request(str(index), prompt, params))
    expected = run_all(load("cpu"), requests)

    for engine in (load(), load(cuda_graphs=False), small_cache(load)):
        assert_same_answers(expected, run_all(engine, requests))


def test_a_prefix_that_is_read_once_changes_nothing(load: Load) -> None:
    """
    Greedy, drawn and sampled by the host, in graphs and without, while sequences come, end and share with others.
    """
    random = np.random.default_rng(8)
    head = random.integers(4, VOCAB, 75)
    kinds = ({}, {"temperature": 0.8, "seed": 5}, {}, {"logprobs": 2})
    requests = []
    for index in range(20):
        tail = random.integers(4, VOCAB, int(random.integers(1, 30)))
        prompt = (np.concatenate([head, tail]) if index % 5 else tail).astype(np.int32)
        params = SamplingParams(max_tokens=int(random.integers(5, 40)), ignore_eos=True, **kinds[index // 5])  # type: ignore[arg-type]
        requests.append(Request(str(index), prompt, params))
    expected = run_all(load(cascade=False), requests)
    for cuda_graphs in (True, False):
        engine = load(cascade_min_seqs=2, cascade_min_tokens=32, cuda_graphs=cuda_graphs)
        runner = engine._runner
        assert isinstance(runner, CudaModelRunner)

        actual = run_all(engine, requests)

        assert_same_answers(expected, actual)
        # where all layers have windows there is no such pass
        assert bool(runner.cascade) == (None in runner.windows)
        assert bool(runner.cascade) == bool(runner.cascade.num_steps)
