"""Which tokens are looked at one by one, and which may pass in bulk."""

from pathlib import Path

import numpy as np
import pytest

from engine.entries import Arrived
from engine.output import OutputProcessor
from engine.request import FinishReason, Request, Sequence, TokenLogprob
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer
from tests.support.tiny_tokenizers import byte_level, save

EOS = 7
MAX_MODEL_LEN = 100


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    return Tokenizer(save(byte_level(), folder))


def begun(outputs: OutputProcessor, *, stream: bool = False, **params: object) -> Sequence:
    request = Request("r", np.array([5], dtype=np.int32), SamplingParams(**params), stream=stream)  # type: ignore[arg-type]
    sequence = Sequence(request, 0)
    outputs.begin(sequence)
    return sequence


def arrive(sequences: list[Sequence], token_ids: list[int]) -> Arrived:
    """Append tokens as the scheduler does."""
    last = []
    for sequence, token in zip(sequences, token_ids, strict=True):
        sequence.extend([token] if token >= 0 else [])
        last.append(sequence.num_known >= min(sequence.num_prompt_tokens + sequence.params.max_tokens, MAX_MODEL_LEN))
    failed = min(token_ids, default=0) < 0
    return Arrived(sequences, np.array(token_ids, dtype=np.int64), np.array(last, dtype=np.bool_), failed)


def test_only_tokens_that_may_end_an_answer_are_notable() -> None:
    """The model's ends, the ends that some request named, the last by length, and what was not finite."""
    outputs = OutputProcessor(None, {EOS}, MAX_MODEL_LEN)
    plain = [begun(outputs) for _ in range(6)]
    stops, full = begun(outputs, stop_token_ids=(50,)), begun(outputs, max_tokens=1)

    rows = outputs.notable(arrive([*plain, stops, full], [1, EOS, 50, -1, 51, 10**6, 1, 1]))

    assert [1, 2, 3, 7] == rows


def test_without_any_end_no_token_is_notable() -> None:
    """Whatever its id."""
    outputs = OutputProcessor(None, (), MAX_MODEL_LEN)
    sequences = [begun(outputs) for _ in range(3)]

    assert [] == outputs.notable(arrive(sequences, [0, 1, 10**6]))


def test_who_keeps_something_of_each_token_sees_each(tokenizer: Tokenizer) -> None:
    """Streams, stop strings and log-probabilities need all tokens, until the answer is taken."""
    outputs = OutputProcessor(tokenizer, {EOS}, MAX_MODEL_LEN)
    watched = [begun(outputs, stream=True), begun(outputs, stop=("x",)), begun(outputs, logprobs=1)]
    sequences = [begun(outputs), *watched]

    before = outputs.notable(arrive(sequences, [20, 20, 20, 20]))
    for sequence in watched:
        sequence.finish_reason = FinishReason.ABORT
        outputs.completion(sequence)
    after = outputs.notable(arrive(sequences, [20, 20, 20, 20]))

    assert ([1, 2, 3], []) == (before, after)


def test_the_others_would_have_gone_on(tokenizer: Tokenizer) -> None:
    """Over random sequences and tokens: a row that is passed over is one that `push` keeps nothing of."""
    rng = np.random.default_rng(0)
    outputs = OutputProcessor(tokenizer, {EOS, 9}, MAX_MODEL_LEN)
    kinds: list[dict[str, object]] = [
        {},
        {"ignore_eos": True},
        {"min_tokens": 9},
        {"stop_token_ids": (3, 40)},
        {"max_tokens": 12},
        {"logprobs": 0},
        {"stop": ("ab",)},
    ]
    sequences = [begun(outputs, **kinds[index % len(kinds)]) for index in range(70)]
    num_ended = 0
    for _ in range(150):
        arrived = arrive(sequences, rng.integers(0, 60, len(sequences)).tolist())
        notable = set(outputs.notable(arrived))
        alive = []
        for row, (sequence, token) in enumerate(arrived):
            logprob = TokenLogprob(token, 0.0) if sequence.params.logprobs is not None else None
            reason = outputs.push(sequence, token, logprob)
            assert row in notable or (reason is None and logprob is None and not sequence.params.stop)
            alive += [sequence] if reason is None else []
        num_ended += len(sequences) - len(alive)
        sequences = alive

    assert (70, 0) == (num_ended, len(sequences))
