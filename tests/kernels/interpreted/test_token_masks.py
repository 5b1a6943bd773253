"""The kernel takes the forbidden tokens away, as the reference does, and writes no other."""

import math

import pytest
import torch

from kernels.cuda import token_masks
from kernels.cuda.sampling import sample_triton
from kernels.cuda.token_masks import apply_token_masks_triton
from kernels.random_draws import draw_keys
from kernels.sampling import sample_reference
from kernels.token_masks import apply_token_masks_reference

VOCAB = 200


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_masks_are_those_of_the_reference(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Named rows of a wider matrix lose what is forbidden; other rows, padding and allowed tokens stay.
    """
    monkeypatch.setattr(token_masks, "BLOCK", 64)
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(5, VOCAB + 20, generator=generator).to(dtype)
    wide[3, 7] = math.nan
    rows = torch.tensor([3, 0, 4])
    masks = torch.randint(-(2**31), 2**31, (3, 9), generator=generator).to(torch.int32)
    masks[1], masks[2] = 0, -1
    expected = wide.clone()
    apply_token_masks_reference(expected[:, :VOCAB], rows, masks)

    apply_token_masks_triton(wide[:, :VOCAB], rows, masks)

    assert torch.equal(expected.nan_to_num(nan=9.0), wide.nan_to_num(nan=9.0))


def test_no_rows_are_fine() -> None:
    """
    With nothing to mask nothing happens.
    """
    logits = torch.ones(2, 8)

    apply_token_masks_triton(logits, torch.zeros(0, dtype=torch.int64), torch.zeros(0, 1, dtype=torch.int32))

    assert torch.equal(torch.ones(2, 8), logits)


@pytest.mark.parametrize("num_allowed", [0, 1, 2, 30])
def test_few_allowed_tokens_are_drawn_as_by_the_reference(num_allowed: int) -> None:
    """
    A row that is nearly all -inf has one of its few tokens drawn, by any filter; one without any has failed.
    """
    generator = torch.Generator().manual_seed(num_allowed)
    logits = torch.randn(6, VOCAB, generator=generator)
    allowed = torch.randperm(VOCAB, generator=generator)[:num_allowed]
    forbidden = torch.ones(VOCAB, dtype=torch.bool)
    forbidden[allowed] = False
    logits[:, forbidden] = -math.inf
    temperature = torch.tensor([0.0, 0.7, 1.0, 1.0, 1.0, 1.5])
    top_k = torch.tensor([0, 0, 5, 0, 0, 100], dtype=torch.int32)
    top_p = torch.tensor([1.0, 1.0, 1.0, 0.8, 1.0, 0.9])
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.1, 0.05])
    streams = torch.arange(12, dtype=torch.int32).view(6, 2)
    keys = draw_keys(streams, torch.arange(6, dtype=torch.int32))
    expected = sample_reference(logits.clone(), temperature, top_k, top_p, min_p, keys)

    actual = sample_triton(logits, temperature, top_k, top_p, min_p, keys)

    assert expected.tolist() == actual.tolist()
    assert set(actual.tolist()) <= set(allowed.tolist() or [-1])
