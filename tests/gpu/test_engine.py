"""Whole answers on the card: those of the CPU, with graphs and without, alone and in company."""

import numpy as np
import pytest

from engine.cuda.model_runner import CudaModelRunner
from engine.grammar import Grammar
from engine.request import Request
from engine.sampling_params import SamplingParams
from tests.support.answers import assert_same_answers, make_requests, run_all
from tests.support.card_engine import MODELS, Load, loader, small_cache
from tests.support.tiny_models import VOCAB, save_tiny_model


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
