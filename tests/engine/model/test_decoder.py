"""Every architecture's logits are those of transformers, however a prompt is cut into steps."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.batch import build_batch
from engine.kv_cache import CacheShape, KVCache
from engine.model.decoder import Decoder
from engine.model.loader import load_model
from engine.request import Chunk, Request, Sequence, Step
from engine.sampling_params import SamplingParams
from tests.support.tiny_models import TINY_CONFIGS, save_tiny_model

Pair = tuple[PreTrainedModel, Decoder]


@pytest.fixture(scope="module", params=TINY_CONFIGS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A model of transformers and ours, with the same weights."""
    path = tmp_path_factory.mktemp("model")
    reference = save_tiny_model(request.param, path)
    model, _ = load_model(path, dtype=torch.float64)
    return reference, model


class Driver:
    """Runs chunks of prompts and keeps the logits of every position."""

    def __init__(self, model: Decoder, prompts: list[np.ndarray], block_size: int = 16) -> None:
        self.model = model
        shape = CacheShape.fit(
            model.config,
            block_size=block_size,
            dtype=model.dtype,
            cache_bytes=8 << 20,
            host_bytes=0,
            max_model_len=256,
        )
        self.cache = KVCache(shape)
        for layer in self.cache.layers:
            layer[:, 1:] = torch.nan
        free = iter((torch.randperm(shape.num_blocks - 1) + 1).tolist())
        self.sequences = [Sequence(Request(str(i), prompt, SamplingParams()), 0) for i, prompt in enumerate(prompts)]
        for sequence in self.sequences:
            sequence.block_table = [next(free) for _ in range(-(-sequence.num_prompt_tokens // block_size))]
        self.logits: list[list[Tensor]] = [[] for _ in prompts]

    @torch.inference_mode()
    def step(self, lengths: dict[int, int]) -> None:
        """Compute so many more tokens of each sequence."""
        chunks = []
        for index, length in lengths.items():
            sequence = self.sequences[index]
            chunks.append(Chunk(sequence, sequence.num_computed, length, samples=False))
            sequence.num_computed += length
        batch = build_batch(
            Step(0, tuple(chunks)),
            kv_cache=self.cache.layers[0],
            windows=set(self.model.config.windows),
            last_token=torch.zeros(1, dtype=torch.int64),
        )
        logits = self.model.logits(self.model.forward(batch.forward, self.cache.layers))
        for (index, length), first in zip(lengths.items(), batch.first_rows, strict=True):
            self.logits[index].append(logits[first : first + length])


def make_prompts(lengths: list[int]) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, 199, length).astype(np.int32) for length in lengths]


def check(reference: PreTrainedModel, driver: Driver) -> None:
    for sequence, logits in zip(driver.sequences, driver.logits, strict=True):
        with torch.inference_mode():
            expected = reference(torch.from_numpy(sequence.prompt).long()[None]).logits[0]
        torch.testing.assert_close(torch.cat(logits), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 17, 70])
def test_a_whole_prompt(pair: Pair, length: int) -> None:
    """
    One prefill gives transformers' logits at every position.
    """
    driver = Driver(pair[1], make_prompts([length]))
    driver.step({0: length})
    check(pair[0], driver)


@pytest.mark.parametrize("block_size", [16, 32])
def test_a_prompt_in_chunks(pair: Pair, block_size: int) -> None:
    """
    Chunks that end within blocks and on their borders give the logits of the whole.
    """
    driver = Driver(pair[1], make_prompts([70]), block_size)
    for length in (5, 11, 16, 1, 30, 7):
        driver.step({0: length})
    check(pair[0], driver)


def test_token_by_token(pair: Pair) -> None:
    """
    Decoding one token at a time gives the logits of the whole.
    """
    driver = Driver(pair[1], make_prompts([35]))
    for _ in range(35):
        driver.step({0: 1})
    check(pair[0], driver)


def test_prefills_and_decodes_in_one_step(pair: Pair) -> None:
    """
    Sequences at different points of their lives do not touch each other.
    """
    driver = Driver(pair[1], make_prompts([40, 3, 66, 20]))
    driver.step({0: 30, 1: 2})
    driver.step({2: 50, 0: 1, 3: 20, 1: 1})
    driver.step({0: 1, 2: 1})
    driver.step({2: 15, 0: 8})
    check(pair[0], driver)


def test_a_decode_has_the_same_bits_in_any_batch(tmp_path: Path) -> None:
    """
    In float32 a decoded token's logits do not depend on what else is in the step.
    """
    save_tiny_model("llama", tmp_path)
    model, _ = load_model(tmp_path, dtype=torch.float32)
    prompts = make_prompts([20, 33, 34, 7, 61, 18, 90])
    together, alone = Driver(model, prompts), Driver(model, prompts)
    for driver in (together, alone):
        for index, prompt in enumerate(prompts):
            driver.step({index: len(prompt) - 1})

    together.step(dict.fromkeys(range(7), 1))
    for index in range(7):
        alone.step({index: 1})

    for beside_others, by_itself in zip(together.logits, alone.logits, strict=True):
        assert torch.equal(beside_others[-1], by_itself[-1])
