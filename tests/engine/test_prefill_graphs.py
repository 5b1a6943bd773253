"""Steps of a few prompts over the buffers of a graph, on a CPU: run again in place of a replay."""

from pathlib import Path

import numpy as np
import pytest

from engine.cuda.model_runner import CudaModelRunner
from engine.cuda.prefill_graphs import GRAPH_CHUNKS
from engine.llm_engine import LLMEngine
from engine.request import Request
from engine.sampling_params import SamplingParams
from tests.support.answers import assert_same_answers, make_requests, run_all
from tests.support.cuda_engine import RunAnew, make_engine
from tests.support.tiny_models import VOCAB, save_tiny_model


@pytest.fixture(scope="module", params=["mistral", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_model(request.param, path)
    return path


def graphs_of(engine: LLMEngine) -> RunAnew:
    assert isinstance(engine._runner, CudaModelRunner)
    assert isinstance(engine._runner.prefill_graphs, RunAnew)
    return engine._runner.prefill_graphs


def prompts(*lengths: int) -> list[Request]:
    rng = np.random.default_rng(sum(lengths))
    params = SamplingParams(max_tokens=4, ignore_eos=True, prompt_logprobs=1)
    return [
        Request(str(index), rng.integers(4, VOCAB, length).astype(np.int32), params)
        for index, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("sizes", [(8, 32), (40,)])
def test_answers_are_those_of_the_cpu(folder: Path, sizes: tuple[int, ...]) -> None:
    """
    With chunks, cached prefixes and decodes between them, whatever stands in the buffers from the step before.
    """
    requests = make_requests(seed=8)
    expected = run_all(make_engine(folder, cuda=False), requests)
    engine = make_engine(folder, cuda=True, prefill_sizes=sizes)

    assert_same_answers(expected, run_all(engine, requests))

    # one after the other, so that each prompt is a step of its own
    for request in requests:
        assert_same_answers(run_all(make_engine(folder, cuda=False), [request]), run_all(engine, [request]))
    assert graphs_of(engine).num_replays > 0


@pytest.mark.parametrize(
    ("lengths", "replays"), [((16,), 1), ((1, 2, 3), 1), ((32,), 1), ((33,), 0), ((1,) * GRAPH_CHUNKS, 1)]
)
def test_prompts_that_fit_a_size_are_one_replay(folder: Path, lengths: tuple[int, ...], replays: int) -> None:
    """
    The largest is 32 tokens here; log-probabilities of prompts are of their own rows.
    """
    requests = prompts(*lengths)
    expected = run_all(make_engine(folder, cuda=False), requests)
    engine = make_engine(folder, cuda=True, prefill_sizes=(16, 32), max_num_seqs=GRAPH_CHUNKS)

    actual = run_all(engine, requests)

    assert_same_answers(expected, actual)
    assert replays == graphs_of(engine).num_replays


def test_more_prompts_than_a_graph_knows_are_launched_one_by_one(folder: Path) -> None:
    """
    And so are those that begin while others decode.
    """
    engine = make_engine(folder, cuda=True, prefill_sizes=(32,), max_num_seqs=GRAPH_CHUNKS + 1)

    outputs = run_all(engine, prompts(*[1] * (GRAPH_CHUNKS + 1)))

    assert GRAPH_CHUNKS + 1 == len(outputs)
    assert 0 == graphs_of(engine).num_replays
