"""What eight bits cost in accuracy is counted right."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.kv_perplexity import Reader, compare, main, make_prompts
from engine.config import EngineConfig
from engine.tokenizer import Tokenizer
from tests.support.tiny_models import save_tiny_writer

TEXTS = ["The ferry returns at noon.", "A lentil soup, and a clock.", "Tides follow the moon; " * 8]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("model")
    save_tiny_writer(path, max_model_len=256)
    return {"model": path, "device": "cpu", "dtype": "float32", "max_num_batched_tokens": 16}


def test_logits_are_those_of_the_log_probabilities(config: dict[str, Any]) -> None:
    """
    Every row is kept, in order, however the prompt is cut.
    """
    reader = Reader(EngineConfig(**config))
    prompt = Tokenizer(config["model"]).encode(TEXTS[2])
    reader.read(prompt[:9])

    reading = reader.read(prompt)

    following = torch.from_numpy(prompt[1:]).long()
    expected = reading.logits.double().log_softmax(-1)[torch.arange(len(following)), following]
    assert len(prompt) - 1 == len(reading.logprobs)
    assert reading.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_each_dtype_and_way_has_a_line(config: dict[str, Any]) -> None:
    """
    The joined texts are one prompt, cut off at the longest; perplexity is that of the log-probabilities.
    """
    prompts = make_prompts(Tokenizer(config["model"]), TEXTS, 40)
    assert [3, 1] == [len(found) for found in prompts.values()]
    assert 39 == len(prompts["all in one"][0])

    lines = list(compare(config, prompts))

    assert [("float32", "each text"), ("fp8", "each text"), ("float32", "all in one"), ("fp8", "all in one")] == [
        (line["kv_cache"], line["prompts"]) for line in lines
    ]
    reader = Reader(EngineConfig(**config))
    logprobs = [entry for prompt in prompts["each text"] for entry in reader.read(prompt).logprobs]
    assert len(logprobs) == lines[0]["tokens"]
    assert lines[0]["perplexity"] == pytest.approx(math.exp(-np.mean(logprobs)), rel=1e-4)
    for wide, fp8 in (lines[:2], lines[2:]):
        assert fp8["ratio"] == pytest.approx(fp8["perplexity"] / wide["perplexity"], rel=1e-4)
        assert 0.0 < fp8["mean_logit_difference"] < fp8["largest_logit_difference"] < 2 * fp8["largest_logit"]


def test_a_model_that_is_not_here_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """
    The message is the engine's, and there is no line.
    """
    assert 1 == main(["--model", str(tmp_path / "none"), "--texts", str(tmp_path)])

    said = capsys.readouterr()
    assert ("", True) == (said.out, "none" in said.err)
