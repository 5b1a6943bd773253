"""Requests of every kind on a tiny model, and whether two engines answer them alike."""

import numpy as np
import pytest

from engine.llm_engine import LLMEngine
from engine.request import Request, RequestOutput
from engine.sampling_params import SamplingParams
from tests.support.tiny_models import VOCAB


def make_requests(seed: int, longest: int = 47) -> list[Request]:
    """Prompts with common heads, of every kind of sampling, long enough to be chunked."""
    random = np.random.default_rng(seed)
    head = random.integers(4, VOCAB, 21)
    kinds = [
        {},
        {"temperature": 0.8, "seed": 5},
        {"temperature": 1.2, "seed": 6, "top_k": 20, "top_p": 0.9},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"logprobs": 3},
        {"prompt_logprobs": 2, "logprobs": 1},
        {"min_tokens": 7, "logit_bias": {3: 4.0}},
        {"temperature": 1.0, "seed": 7, "n": 2},
    ]
    requests = []
    for index in range(16):
        tail = random.integers(4, VOCAB, int(random.integers(1, 60)))
        prompt = (np.concatenate([head, tail]) if index % 3 else tail).astype(np.int32)
        params = SamplingParams(max_tokens=int(random.integers(7, longest + 1)), **kinds[index % len(kinds)])  # type: ignore[arg-type]
        requests.append(Request(str(index), prompt, params))
    return requests


def run_all(engine: LLMEngine, requests: list[Request]) -> dict[str, RequestOutput]:
    for request in requests:
        engine.add(request)
    outputs: dict[str, RequestOutput] = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step().finished}
    return outputs


def assert_same_answers(expected: dict[str, RequestOutput], actual: dict[str, RequestOutput]) -> None:
    assert expected.keys() == actual.keys()
    for name, output in expected.items():
        for want, got in zip(output.completions, actual[name].completions, strict=True):
            assert want.token_ids == got.token_ids, f"request {name}"
            assert want.finish_reason == got.finish_reason
            assert (want.logprobs is None) == (got.logprobs is None)
            for one, other in zip(want.logprobs or (), got.logprobs or (), strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        for one, other in zip(output.prompt_logprobs or (), actual[name].prompt_logprobs or (), strict=True):
            assert (one and one.token_id) == (other and other.token_id)
            assert one is None or other is None or one.logprob == pytest.approx(other.logprob, abs=1e-4)


def make_greedy_requests(seed: int, *, num_tokens: int = 30) -> list[Request]:
    """Prompts of 5 to 90 tokens, some with a common head, with the log-probabilities that a comparison needs."""
    random = np.random.default_rng(seed)
    head = random.integers(4, VOCAB, 21)
    params = SamplingParams(max_tokens=num_tokens, logprobs=8, prompt_logprobs=1, ignore_eos=True)
    requests = []
    for index in range(12):
        tail = random.integers(4, VOCAB, int(random.integers(5, 69)))
        prompt = (np.concatenate([head, tail]) if index % 3 else tail).astype(np.int32)
        requests.append(Request(str(index), prompt, params))
    return requests


def answer_differences(expected: dict[str, RequestOutput], actual: dict[str, RequestOutput]) -> tuple[float, float]:
    """
    Mean differences of the log-probabilities of prompts, and of greedy answers as far as these are equal.

    An answer may take another way from a token on that was nearly a tie.
    """
    prompts, answers = [], []
    for name, output in expected.items():
        for one, other in zip(output.prompt_logprobs or (), actual[name].prompt_logprobs or (), strict=True):
            if one is not None and other is not None:
                prompts.append(abs(one.logprob - other.logprob))
        ours, theirs = (out.completions[0].logprobs or () for out in (output, actual[name]))
        for one, other in zip(ours, theirs, strict=True):
            if one.token_id != other.token_id:
                assert one.logprob - dict(one.top)[other.token_id] < 0.1, f"request {name}"
                break
            answers.append(abs(one.logprob - other.logprob))
    return float(np.mean(prompts)), float(np.mean(answers))
