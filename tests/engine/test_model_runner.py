"""Steps on a tiny model: greedy answers, swaps, tokens in flight, and log-probabilities of prompts."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from engine.kv_cache import CacheShape, KVCache
from engine.model.loader import load_model
from engine.model_runner import ModelRunner
from engine.request import BlockCopy, Chunk, Request, Sequence, Step, StepResult
from engine.sampler import Sampler
from engine.sampling_params import SamplingParams
from engine.state import SamplingState
from tests.support.tiny_models import save_tiny_model

PROMPT = np.random.default_rng(0).integers(0, 199, 21).astype(np.int32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    path = tmp_path_factory.mktemp("model")
    return path, save_tiny_model("mistral", path)


@pytest.fixture
def runner(folder: tuple[Path, PreTrainedModel]) -> ModelRunner:
    model, config = load_model(folder[0], dtype=torch.float64)
    shape = CacheShape.fit(
        config, block_size=16, dtype=torch.float64, cache_bytes=1 << 20, host_bytes=1 << 18, max_model_len=64
    )
    state = SamplingState(max_num_seqs=4, vocab_size=199, eos_token_ids=[])
    return ModelRunner(model, KVCache(shape), Sampler(state, 199), state)


def make_sequence(**params: int) -> Sequence:
    sequence = Sequence(Request("r", PROMPT, SamplingParams(**params)), 0)
    sequence.slot, sequence.block_table = 2, [5, 3, 9]
    return sequence


def run(runner: ModelRunner, *chunks: Chunk, **step: tuple[BlockCopy, ...]) -> StepResult:
    return runner.launch(Step(0, chunks, **step)).result()


def greedy(reference: PreTrainedModel, count: int) -> list[int]:
    prompt = torch.from_numpy(PROMPT).long()[None]
    tokens = reference.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=count)
    return tokens[0, len(PROMPT) :].tolist()


def test_greedy_answer(runner: ModelRunner, folder: tuple[Path, PreTrainedModel]) -> None:
    """
    A prompt in two chunks, then decodes: the tokens of transformers.
    """
    sequence = make_sequence()
    assert 0 == len(run(runner, Chunk(sequence, 0, 10, samples=False, join=True)).token_ids)
    sequence.extend(run(runner, Chunk(sequence, 10, 11, samples=True)).token_ids.tolist())
    while len(sequence.output) < 12:
        result = run(runner, Chunk(sequence, sequence.num_known - 1, 1, samples=True))
        sequence.extend(result.token_ids.tolist())

    assert greedy(folder[1], 12) == sequence.output


def test_a_token_in_flight_is_read_from_the_device(runner: ModelRunner, folder: tuple[Path, PreTrainedModel]) -> None:
    """
    A decode may be launched before the token it continues is known here.
    """
    sequence = make_sequence()
    first = runner.launch(Step(0, (Chunk(sequence, 0, 21, samples=True, join=True),)))
    second = runner.launch(Step(1, (Chunk(sequence, 21, 1, samples=True),)))

    answer = [int(ticket.result().token_ids[0]) for ticket in (first, second)]

    assert greedy(folder[1], 2) == answer


def test_swapped_blocks_come_back_elsewhere(runner: ModelRunner, folder: tuple[Path, PreTrainedModel]) -> None:
    """
    A sequence goes on from the host's copies, in other blocks, as if it had stayed.
    """
    sequence = make_sequence()
    sequence.extend(run(runner, Chunk(sequence, 0, 21, samples=True, join=True)).token_ids.tolist())
    assert 0 == len(run(runner, swap_out=(BlockCopy(5, 0), BlockCopy(3, 1))).token_ids)
    for layer in runner.kv_cache.layers:
        layer[:, 1:] = torch.nan

    sequence.block_table = [7, 1]
    back = (BlockCopy(7, 0), BlockCopy(1, 1))
    sequence.extend(run(runner, Chunk(sequence, 21, 1, samples=True), swap_in=back).token_ids.tolist())

    assert greedy(folder[1], 2) == sequence.output


@pytest.mark.parametrize("cuts", [(21,), (7, 8, 6), (20, 1)])
def test_prompt_logprobs(runner: ModelRunner, folder: tuple[Path, PreTrainedModel], cuts: tuple[int, ...]) -> None:
    """
    Every prompt token but the first has its log-probability, however the prompt is cut.
    """
    sequence = make_sequence(prompt_logprobs=2)
    found = []
    start = 0
    for length in cuts:
        chunk = Chunk(sequence, start, length, samples=start + length == 21, join=start == 0)
        found += run(runner, chunk).prompt_logprobs.get(0, [])
        start += length

    with torch.inference_mode():
        logits = folder[1](torch.from_numpy(PROMPT).long()[None]).logits[0, :-1]
    expected = logits.log_softmax(-1)
    assert PROMPT[1:].tolist() == [entry.token_id for entry in found]
    torch.testing.assert_close(
        expected[torch.arange(20), torch.from_numpy(PROMPT[1:]).long()],
        torch.tensor([entry.logprob for entry in found], dtype=torch.float64),
        rtol=0,
        atol=1e-6,
    )
    assert expected.argmax(-1).tolist() == [entry.top[0][0] for entry in found]
