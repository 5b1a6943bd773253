"""Steps of short prompts over the buffers of a graph, on a CPU: run again in place of a replay."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.cuda.model_runner import CudaModelRunner
from engine.cuda.plan import MOST_TOGETHER
from engine.cuda.prefill_graphs import PrefillShape, prefill_shapes
from engine.llm_engine import LLMEngine
from engine.model.config import ModelConfig
from engine.request import Request, Step, Ticket
from engine.sampling_params import SamplingParams
from tests.support.answers import assert_same_answers, make_requests, run_all
from tests.support.cuda_engine import RunAnew, make_engine
from tests.support.tiny_models import VOCAB, save_tiny_model

ONE = PrefillShape(16, longest=16, prompts=3)
SHORT = PrefillShape(60, longest=20, prompts=9)
LONG = PrefillShape(60, longest=60, prompts=4)


@pytest.fixture(scope="module", params=["mistral", "qwen3", "qwen2 with windows"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_model(request.param, path)
    return path


def graphs_of(engine: LLMEngine) -> RunAnew:
    assert isinstance(engine._runner, CudaModelRunner)
    assert isinstance(engine._runner.prefill_graphs, RunAnew)
    return engine._runner.prefill_graphs


def prompts(*lengths: int, max_tokens: int = 4, prompt_logprobs: int | None = 1) -> list[Request]:
    rng = np.random.default_rng(sum(lengths))
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=prompt_logprobs, logprobs=1)
    return [
        Request(str(index), rng.integers(4, VOCAB, length).astype(np.int32), params)
        for index, length in enumerate(lengths)
    ]


@pytest.mark.parametrize(
    ("shapes", "fp8"), [((PrefillShape(8, 8, 2), PrefillShape(32, 32, 8)), False), ((SHORT, LONG), True)]
)
def test_answers_are_those_of_the_cpu(folder: Path, shapes: tuple[PrefillShape, ...], fp8: bool) -> None:
    """
    With chunks, cached prefixes and decodes between them, whatever stands in the buffers from the step before.
    """
    # in float64, as a sum's last bit may decide how a number is rounded to eight bits
    options = {"fp8": fp8, "dtype": torch.float64}
    requests = make_requests(seed=8)
    expected = run_all(make_engine(folder, cuda=False, **options), requests)
    engine = make_engine(folder, cuda=True, prefill_shapes=shapes, budget=60, **options)

    assert_same_answers(expected, run_all(engine, requests))

    # one after the other, so that each prompt is a step of its own
    for request in requests:
        found = run_all(engine, [request])
        assert_same_answers({request.request_id: expected[request.request_id]}, found)
    assert graphs_of(engine).replayed


@pytest.mark.parametrize(
    ("lengths", "shape"),
    [
        ((16,), ONE),
        ((1, 2, 3), ONE),
        ((17,), SHORT),
        ((20, 20, 20), SHORT),
        ((1,) * 4, SHORT),
        ((1,) * 9, SHORT),
        ((21,), LONG),
        ((60,), LONG),
        ((21, 3, 3, 3), LONG),
    ],
)
def test_prompts_run_in_the_smallest_graph_that_has_room(
    folder: Path, lengths: tuple[int, ...], shape: PrefillShape
) -> None:
    """
    For all their tokens, for the longest and for each; log-probabilities of prompts are of their own rows.
    """
    requests = prompts(*lengths)
    expected = run_all(make_engine(folder, cuda=False), requests)
    engine = make_engine(folder, cuda=True, prefill_shapes=(ONE, SHORT, LONG), budget=60, max_num_seqs=9)

    actual = run_all(engine, requests)

    assert_same_answers(expected, actual)
    assert [shape] == graphs_of(engine).replayed


@pytest.mark.parametrize("lengths", [(61,), (31, 30), (1,) * 10, (21, 1, 1, 1, 1)])
def test_prompts_that_have_no_room_are_launched_one_by_one(folder: Path, lengths: tuple[int, ...]) -> None:
    """
    Too many tokens, too many prompts, or one too long beside so many others.
    """
    requests = prompts(*lengths)
    expected = run_all(make_engine(folder, cuda=False), requests)
    engine = make_engine(folder, cuda=True, prefill_shapes=(ONE, SHORT, LONG), budget=80, max_num_seqs=10)

    actual = run_all(engine, requests)

    assert_same_answers(expected, actual)
    assert [] == graphs_of(engine).replayed


def test_the_first_piece_of_a_long_prompt_may_run_in_a_graph(folder: Path) -> None:
    """
    Those behind it may not, nor prompts beside decodes.
    """
    requests = prompts(70, 30)
    expected = run_all(make_engine(folder, cuda=False), requests)
    engine = make_engine(folder, cuda=True, prefill_shapes=(ONE, SHORT, LONG), budget=60, policy="fcfs")

    actual = run_all(engine, requests)

    assert_same_answers(expected, actual)
    assert [LONG] == graphs_of(engine).replayed


def test_prompts_beside_some_with_a_cached_prefix_are_launched_one_by_one(folder: Path) -> None:
    """
    So many that those which begin their sequences are attended by a launch of their own.
    """
    first, *others = prompts(13, *[2] * (MOST_TOGETHER + 1), prompt_logprobs=None)
    requests = [
        replace(request, prompt=np.concatenate([first.prompt, request.prompt])) if index < 3 else request
        for index, request in enumerate(others)
    ]
    expected = run_all(make_engine(folder, cuda=False, max_num_seqs=9), [first, *requests])
    engine = make_engine(folder, cuda=True, prefill_shapes=(SHORT,), budget=60, max_num_seqs=9)
    run_all(engine, [first])
    graphs_of(engine).replayed.clear()

    actual = run_all(engine, requests)

    assert_same_answers({name: expected[name] for name in actual}, actual)
    assert [] == graphs_of(engine).replayed


def test_a_replay_leaves_nothing_of_the_one_before(folder: Path) -> None:
    """
    Steps in flight behind each other, all in one buffer: each is read before the next one writes.
    """
    requests = prompts(*[16] * 12, max_tokens=1)
    expected = run_all(make_engine(folder, cuda=False), requests)
    engine = make_engine(folder, cuda=True, prefill_shapes=(ONE,), budget=16, max_num_seqs=4, depth=3)
    launch, in_flight = engine._runner.launch, []

    def noted(step: Step) -> Ticket:
        in_flight.append(len(engine._in_flight))
        return launch(step)

    engine._runner.launch = noted  # type: ignore[method-assign]

    actual = run_all(engine, requests)

    assert_same_answers(expected, actual)
    assert [ONE] * 12 == graphs_of(engine).replayed
    assert 2 == max(in_flight)


def config_of(num_layers: int, hidden: int, intermediate: int, num_heads: int, num_kv_heads: int) -> ModelConfig:
    return ModelConfig.parse(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 128_000,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "max_position_embeddings": 8192,
        }
    )


# about 0.5, 1, 3, 8 and 70 billion weights
MODELS = {
    "0.5b": config_of(24, 896, 4864, 14, 2),
    "1b": config_of(16, 2048, 8192, 32, 8),
    "3b": config_of(36, 2048, 11008, 16, 2),
    "8b": config_of(32, 4096, 14336, 32, 8),
    "70b": config_of(80, 8192, 28672, 64, 8),
}


@pytest.mark.parametrize(("name", "most"), [("0.5b", 4096), ("1b", 1024), ("3b", 1024), ("8b", 512), ("70b", 128)])
def test_graphs_end_where_computing_takes_longer_than_launching(name: str, most: int) -> None:
    """
    The smaller a layer, the more tokens its kernels are done with while they are launched.
    """
    shapes = prefill_shapes(MODELS[name], torch.bfloat16, max_num_batched_tokens=8192, max_num_seqs=256)

    assert most == shapes[-1].tokens
    assert shapes == sorted(set(shapes))
    assert len(shapes) <= 12


def test_deeper_models_of_the_same_layers_have_the_same_graphs() -> None:
    """
    Each layer is launched and computed once.
    """
    limits = {"max_num_batched_tokens": 8192, "max_num_seqs": 256}
    shallow = replace(MODELS["8b"], num_layers=8)

    assert prefill_shapes(MODELS["8b"], torch.bfloat16, **limits) == prefill_shapes(shallow, torch.bfloat16, **limits)


def test_large_graphs_are_of_many_short_prompts_or_of_a_few_long_ones() -> None:
    """
    Never of both: attention is launched for the longest length of every prompt.
    """
    shapes = prefill_shapes(MODELS["0.5b"], torch.bfloat16, max_num_batched_tokens=8192, max_num_seqs=256)

    assert [PrefillShape(32, 32, 8), PrefillShape(64, 64, 8)] == shapes[:2]
    assert [PrefillShape(4096, 512, 64), PrefillShape(4096, 4096, 8)] == shapes[-2:]
    assert all(shape.longest * shape.prompts <= 8 * shape.tokens for shape in shapes)


@pytest.mark.parametrize("budget", [8, 20, 48, 2000])
def test_the_largest_graph_is_of_the_largest_step(budget: int) -> None:
    """
    A larger one would not fit the buffers.
    """
    shapes = prefill_shapes(MODELS["0.5b"], torch.bfloat16, max_num_batched_tokens=budget, max_num_seqs=256)

    assert PrefillShape(budget, budget, 8) == shapes[-1]


def test_steps_of_next_to_no_tokens_have_no_graphs() -> None:
    """
    Their graphs would have room for more prompts than tokens.
    """
    assert [] == prefill_shapes(MODELS["0.5b"], torch.bfloat16, max_num_batched_tokens=7, max_num_seqs=256)


def test_float32_is_computed_for_longer() -> None:
    """
    So graphs end at fewer tokens.
    """
    shapes = prefill_shapes(MODELS["0.5b"], torch.float32, max_num_batched_tokens=8192, max_num_seqs=256)

    assert 512 == shapes[-1].tokens


def test_a_few_sequences_need_no_graph_of_many() -> None:
    """
    Each graph costs time and memory at the start.
    """
    shapes = prefill_shapes(MODELS["0.5b"], torch.bfloat16, max_num_batched_tokens=8192, max_num_seqs=8)

    assert {8} == {shape.prompts for shape in shapes}
    assert 4096 == shapes[-1].longest
