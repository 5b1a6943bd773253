"""Masks take away what they forbid, and nothing else."""

import math
from collections.abc import Callable

import pytest
import torch

from kernels.token_masks import apply_token_masks, apply_token_masks_reference


@pytest.mark.parametrize("apply", [apply_token_masks, apply_token_masks_reference])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100])
def test_masks_match_a_plain_loop(apply: Callable[..., None], dtype: torch.dtype, vocab: int) -> None:
    """
    Each bit decides about its token, the lowest bit of the first word about token 0.
    """
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(4, vocab + 3, generator=generator, dtype=dtype)
    masks = torch.randint(-(2**31), 2**31, (2, -(-vocab // 32)), generator=generator).to(torch.int32)
    expected = logits.clone()
    for row, words in ((2, masks[0].tolist()), (0, masks[1].tolist())):
        for token in range(vocab):
            if not words[token // 32] >> token % 32 & 1:
                expected[row, token] = -math.inf

    apply(logits[:, :vocab], torch.tensor([2, 0]), masks)

    assert torch.equal(expected, logits)


@pytest.mark.parametrize("apply", [apply_token_masks, apply_token_masks_reference])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_what_is_no_number_stays_none(apply: Callable[..., None], broken: float) -> None:
    """
    A mask does not hide that the model failed: such a row is an error and no answer.
    """
    logits = torch.tensor([[1.0, broken, 2.0]])

    apply(logits, torch.tensor([0]), torch.tensor([[0b101]], dtype=torch.int32))

    assert logits[0, 1].isnan()
    assert [1.0, 2.0] == logits[0, [0, 2]].tolist()
