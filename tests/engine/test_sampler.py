"""One call samples a mixed batch, and every row is what it would be alone."""

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.request import TokenLogprob
from engine.sampler import Sampled, Sampler
from engine.sampling_params import Feature, SamplingParams
from engine.state import SamplingState
from kernels.logprobs import LOGPROB_FLOOR

VOCAB = 400
EOS = (3, 4)

MIXED = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=1e-7, seed=2),
    SamplingParams(temperature=1e-4, seed=3, top_p=0.9),
    SamplingParams(temperature=100.0, seed=4),
    SamplingParams(temperature=0.8, seed=5, top_k=20, top_p=0.9, min_p=0.02),
    SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4),
    SamplingParams(temperature=1.2, seed=6, frequency_penalty=1.0, logprobs=3),
    SamplingParams(logit_bias={7: 100.0}, logprobs=0),
    SamplingParams(temperature=1.0, seed=7, min_tokens=5, logit_bias={3: 50.0, 9: 40.0}),
]


def _make(num_slots: int = 16) -> Sampler:
    return Sampler(SamplingState(max_num_seqs=num_slots, vocab_size=VOCAB, eos_token_ids=EOS), VOCAB)


def _join(sampler: Sampler, slot: int, params: SamplingParams, output: Sequence[int] = (), index: int = 0) -> None:
    sampler.state.join(slot, params, index, np.array([10, 11, slot + 12], dtype=np.int32), output)


def _sample(sampler: Sampler, logits: Tensor, slots: list[int]) -> Sampled:
    features = Feature.GREEDY
    for slot in slots:
        features |= sampler.state.features[slot]
    return sampler.sample(logits.clone(), slots, features)


def _logits(rows: int, dtype: torch.dtype = torch.float32, seed: int = 0, width: int = VOCAB) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_each_row_of_a_mixed_batch_is_what_it_is_alone(dtype: torch.dtype) -> None:
    """
    Over several steps a batch of all features gives each sequence the tokens and logprobs it gets alone.
    """
    together = _make()
    alone = [_make() for _ in MIXED]
    for slot, params in enumerate(MIXED):
        _join(together, slot, params)
        _join(alone[slot], slot, params)

    for step in range(6):
        logits = _logits(len(MIXED), torch.float32, seed=step).to(dtype)
        order = random.Random(step).sample(range(len(MIXED)), len(MIXED))
        batch = _sample(together, logits[order], order)
        for row, slot in enumerate(order):
            single = _sample(alone[slot], logits[slot : slot + 1], [slot])
            assert int(single.token_ids[0]) == int(batch.token_ids[row])
            assert (single.read_logprobs() or [None])[0] == batch.read_logprobs()[row]


def test_a_sequence_that_comes_back_goes_on_as_if_it_had_stayed() -> None:
    """
    Leaving after any step and joining another slot with the output so far changes no later token.
    """
    logits = [_logits(1, seed=step) for step in range(8)]
    for number, params in enumerate(MIXED):
        stayed = _make()
        _join(stayed, 0, params)
        tokens = [int(_sample(stayed, row, [0]).token_ids[0]) for row in logits]

        for left_after in (1, 5):
            moved = _make()
            moved.state.join(5, params, 0, np.array([10, 11, 12], dtype=np.int32), tokens[:left_after])
            again = [int(_sample(moved, row, [5]).token_ids[0]) for row in logits[left_after:]]
            assert tokens[left_after:] == again, f"case {number}"


@pytest.mark.parametrize("wide", [VOCAB, VOCAB + 112])
def test_greedy_takes_the_largest_real_logit(wide: int) -> None:
    """
    Columns past the vocabulary are padding: never sampled, greedy or hot.
    """
    sampler = _make()
    logits = _logits(4, width=wide)
    logits[:, VOCAB:] = 1000.0
    for slot in range(4):
        _join(sampler, slot, SamplingParams(temperature=(slot % 2) * 10.0, seed=slot))

    for _ in range(30):
        tokens = _sample(sampler, logits, [0, 1, 2, 3]).token_ids
        assert VOCAB > int(tokens.max())
        assert logits[::2, :VOCAB].argmax(dim=-1).tolist() == tokens[::2].tolist()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("column", [3, 50])
def test_broken_rows_give_minus_one_and_spoil_no_other(value: float, column: int) -> None:
    """
    NaN or inf anywhere in a row, even under a mask, fails that row under every feature, no other.
    """
    slots = list(range(len(MIXED)))
    expected, broken = _make(), _make()
    for slot, params in enumerate(MIXED):
        _join(expected, slot, params)
        _join(broken, slot, params)
    logits = _logits(len(MIXED))
    want = _sample(expected, logits, slots)

    for half in (0, 1):
        for slot, params in enumerate(MIXED):
            _join(broken, slot, params)
        spoilt = logits.clone()
        spoilt[half::2, column] = value
        got = _sample(broken, spoilt, slots)
        for slot in slots:
            failed = slot % 2 == half
            assert (-1 if failed else int(want.token_ids[slot])) == int(got.token_ids[slot])
            assert (None if failed else want.read_logprobs()[slot]) == got.read_logprobs()[slot]
    assert 0 <= int(broken.state.last_token.min())


def test_ends_cannot_be_sampled_before_min_tokens() -> None:
    """
    With min_tokens EOS and stop ids wait, however likely; with ignore_eos stop ids alone do.
    """
    logits = _logits(1).clamp(max=5.0)
    logits[0, 3], logits[0, 20], logits[0, 30] = 90.0, 80.0, 70.0
    cases = [
        (SamplingParams(min_tokens=2, stop_token_ids=(20,)), [30, 30, 3]),
        (SamplingParams(min_tokens=2, stop_token_ids=(20,), ignore_eos=True), [3, 3, 3]),
        (SamplingParams(min_tokens=2), [20, 20, 3]),
    ]
    for params, expected in cases:
        sampler = _make()
        _join(sampler, 0, params)
        assert expected == [int(_sample(sampler, logits, [0]).token_ids[0]) for _ in range(3)]


def test_an_answer_whose_every_token_is_forbidden_fails() -> None:
    """
    When bias takes every token away the row gives -1 instead of an arbitrary token.
    """
    sampler = _make()
    _join(sampler, 0, SamplingParams(temperature=1.0, logit_bias=dict.fromkeys(range(VOCAB), -math.inf)))

    assert [-1] == _sample(sampler, _logits(1), [0]).token_ids.tolist()


def test_penalties_follow_the_output_as_it_grows() -> None:
    """
    A greedy answer under a frequency penalty is that of a loop that counts by hand.
    """
    sampler = _make()
    params = SamplingParams(frequency_penalty=0.7, presence_penalty=0.3, repetition_penalty=1.1)
    _join(sampler, 2, params)
    logits = _logits(1, torch.float64)
    output: list[int] = []
    for _ in range(40):
        shaped = logits[0].clone()
        for token in {10, 11, 14, *output}:
            shaped[token] = shaped[token] / 1.1 if shaped[token] > 0 else shaped[token] * 1.1
        for token in set(output):
            shaped[token] -= 0.3 + 0.7 * output.count(token)
        output.append(int(shaped.argmax()))
        assert output[-1] == int(_sample(sampler, logits, [2]).token_ids[0])
    assert len(set(output)) < 40


def test_logprobs_are_the_models_own() -> None:
    """
    Whatever shapes the draw, logprobs are of the raw logits over real tokens, for rows that asked.
    """
    sampler = _make()
    _join(sampler, 0, SamplingParams())
    _join(
        sampler, 1, SamplingParams(temperature=0.1, seed=1, logit_bias={77: 500.0}, frequency_penalty=2.0, logprobs=2)
    )
    _join(sampler, 2, SamplingParams(logprobs=0))
    logits = _logits(3, torch.float64, width=VOCAB + 8)
    raw = logits[:, :VOCAB].log_softmax(dim=-1)

    sampled = _sample(sampler, logits, [0, 1, 2])

    best = raw[1].topk(2)
    assert sampled.read_logprobs()[0] is None
    assert 77 == sampled.read_logprobs()[1].token_id  # type: ignore[union-attr]
    assert float(raw[1, 77]) == pytest.approx(sampled.read_logprobs()[1].logprob)  # type: ignore[union-attr]
    assert best.indices.tolist() == [token for token, _ in sampled.read_logprobs()[1].top]  # type: ignore[union-attr]
    assert best.values.tolist() == pytest.approx([value for _, value in sampled.read_logprobs()[1].top])  # type: ignore[union-attr]
    assert TokenLogprob(int(raw[2].argmax()), pytest.approx(float(raw[2].max()))) == sampled.read_logprobs()[2]


def test_no_logprobs_where_nobody_asked() -> None:
    """
    A step in which no row asks gives an empty list.
    """
    sampler = _make()
    _join(sampler, 0, SamplingParams(temperature=1.0))

    assert [] == _sample(sampler, _logits(1), [0]).read_logprobs()


def test_prompt_logprobs_are_those_of_the_next_tokens() -> None:
    """
    Row i tells how likely the model found the prompt token after it, and what it would have liked.
    """
    sampler = _make()
    logits = _logits(50, width=VOCAB + 3)
    next_ids = torch.arange(50) * 5
    raw = logits[:, :VOCAB].log_softmax(dim=-1)

    given = sampler.prompt_logprobs(logits, next_ids, 2).read()

    assert next_ids.tolist() == [logprob.token_id for logprob in given]
    assert raw[torch.arange(50), next_ids].tolist() == pytest.approx([logprob.logprob for logprob in given])
    assert raw.topk(2).indices.tolist() == [[token for token, _ in logprob.top] for logprob in given]
    assert [] == sampler.prompt_logprobs(logits[:0], [], 2).read()


def test_a_prompt_token_that_is_never_sampled_has_the_least_log_probability() -> None:
    """
    A prompt may hold ids that the model has and the tokenizer lacks.
    """
    given = _make().prompt_logprobs(_logits(2, width=VOCAB + 3), [VOCAB + 2, 7], 1).read()

    assert [VOCAB + 2, 7] == [logprob.token_id for logprob in given if logprob]
    assert [True, False] == [logprob.logprob == LOGPROB_FLOOR for logprob in given if logprob]


def test_answers_of_one_request_differ_and_repeat() -> None:
    """
    The answers to one prompt with one seed are different draws, and the same ones next time.
    """
    params = SamplingParams(temperature=1.0, seed=9, n=4)
    logits = _logits(1).expand(4, -1)
    runs = []
    for _ in range(2):
        sampler = _make()
        for index in range(4):
            _join(sampler, index, params, index=index)
        runs.append([_sample(sampler, logits, [0, 1, 2, 3]).token_ids.tolist() for _ in range(6)])

    assert runs[0] == runs[1]
    assert 4 == len(set(zip(*runs[0], strict=True)))


def test_last_token_follows_the_samples() -> None:
    """
    Each slot's last token is what the next step of that sequence starts from.
    """
    sampler = _make()
    for slot in (2, 5):
        _join(sampler, slot, SamplingParams(temperature=1.0, seed=slot))
    tokens = _sample(sampler, _logits(2), [5, 2]).token_ids

    assert tokens.tolist() == sampler.state.last_token[[5, 2]].tolist()
    assert [1, 1] == sampler.state.positions[[5, 2]].tolist()
