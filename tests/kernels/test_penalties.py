"""Penalties change exactly the tokens that were seen, by the published formulas."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from kernels.penalties import apply_penalties, apply_penalties_reference

VOCAB = 60


def _seen(prompts: list[list[int]], outputs: list[list[int]]) -> tuple[Tensor, Tensor]:
    in_prompt = torch.zeros(len(prompts), VOCAB, dtype=torch.bool)
    counts = torch.zeros(len(outputs), VOCAB, dtype=torch.int32)
    for slot, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        in_prompt[slot, prompt] = True
        for token in output:
            counts[slot, token] += 1
    return in_prompt, counts


def _naive(logit: float, token: int, prompt: list[int], output: list[int], strengths: list[float]) -> float:
    repetition, presence, frequency = strengths
    if token in prompt or token in output:
        logit = logit / repetition if logit > 0 else logit * repetition
    if token in output:
        logit -= presence
    return logit - frequency * output.count(token)


@pytest.mark.parametrize("apply", [apply_penalties, apply_penalties_reference])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_penalties_match_a_plain_loop(apply: Callable[..., None], dtype: torch.dtype) -> None:
    """
    Every logit of every row is what a loop over its tokens computes from the formulas.
    """
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))] for _ in range(6)]
    outputs = [[rng.randrange(VOCAB) for _ in range(rng.randrange(0, 40))] for _ in range(6)]
    strengths = [
        [1.25, 0.5, -0.25],
        [0.5, 0.0, 0.0],
        [1.0, 2.0, 0.0],
        [1.0, 0.0, 1.5],
        [2.0, -1.0, 0.5],
        [1.0, 0.0, 0.0],
    ]
    slots = [3, 0, 5, 1, 4, 2]
    logits = torch.randn(6, VOCAB, dtype=dtype)
    expected = [
        [_naive(logit, token, prompts[slot], outputs[slot], given) for token, logit in enumerate(row)]
        for row, slot, given in zip(logits.tolist(), slots, strengths, strict=True)
    ]

    apply(logits, torch.arange(6), torch.tensor(slots), *_seen(prompts, outputs), torch.tensor(strengths))

    torch.testing.assert_close(torch.tensor(expected, dtype=dtype), logits)


def test_repetition_matches_transformers() -> None:
    """
    Over prompt and output together, repetition gives what transformers' processor gives.
    """
    prompt, output = [1, 2, 3, 3], [9, 2, 9]
    logits = torch.randn(1, VOCAB)
    expected = RepetitionPenaltyLogitsProcessor(1.75)(torch.tensor([prompt + output]), logits.clone())

    apply_penalties(
        logits, torch.tensor([0]), torch.tensor([0]), *_seen([prompt], [output]), torch.tensor([[1.75, 0.0, 0.0]])
    )

    torch.testing.assert_close(expected, logits)


@pytest.mark.parametrize("apply", [apply_penalties, apply_penalties_reference])
def test_rows_not_named_are_left_alone(apply: Callable[..., None]) -> None:
    """
    Only the named rows change, and in them only tokens that were seen; NaN stays where it was.
    """
    before = torch.randn(4, VOCAB)
    before[2, 7] = torch.nan
    logits = before.clone()

    apply(logits, torch.tensor([2]), torch.tensor([0]), *_seen([[7]], [[8, 8]]), torch.tensor([[2.0, 1.0, 1.0]]))

    assert [[2, 7], [2, 8]] == (logits != before).nonzero().tolist()
    assert bool(logits[2, 7].isnan())
