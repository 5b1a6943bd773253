"""Log-probabilities are those of the softmax, from a list of the best and without one."""

import math

import pytest
import torch

from kernels.cuda import logprobs
from kernels.cuda.logprobs import token_logprobs_triton
from kernels.logprobs import LOGPROB_FLOOR, token_logprobs_reference


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "BLOCK", 64)
    monkeypatch.setattr(logprobs, "CAPACITY", 32)


@pytest.mark.parametrize(
    ("dtype", "vocab", "num_top"),
    [(torch.float32, 300, 7), (torch.float16, 130, 20), (torch.bfloat16, 37, 1), (torch.float32, 90, 70)],
)
def test_logprobs_are_the_log_softmax(dtype: torch.dtype, vocab: int, num_top: int) -> None:
    """
    Values of log_softmax in float64, ids by value and then by id, padding not read.
    """
    wide = torch.full((4, vocab + 20), math.nan, dtype=dtype)
    wide[:, :vocab] = torch.randn(4, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    logits = wide[:, :vocab]
    # ties among the best, and more than a list holds
    logits[1] = logits[1].round()
    logits[2, ::2] = 15.0
    tokens = torch.tensor([0, vocab - 1, 5, 6])
    full = logits.double().log_softmax(dim=-1)
    order = full.sort(dim=-1, descending=True, stable=True)

    chosen, best, values = token_logprobs_triton(logits, tokens, num_top)

    assert torch.equal(order.indices[:, :num_top], best)
    torch.testing.assert_close(order.values[:, :num_top].float(), values, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(full.gather(-1, tokens[:, None])[:, 0].float(), chosen, rtol=2e-6, atol=2e-6)


def test_impossible_tokens_have_a_finite_floor() -> None:
    """
    A token with no probability gives the floor, listed by id among the best as well as chosen.
    """
    logits = torch.full((1, 100), -math.inf)
    logits[0, 70] = 0.0

    chosen, best, values = token_logprobs_triton(logits, torch.tensor([4]), 3)

    assert LOGPROB_FLOOR == float(chosen)
    assert [70, 0, 1] == best[0].tolist()
    assert [0.0, LOGPROB_FLOOR, LOGPROB_FLOOR] == values[0].tolist()


def test_rows_that_are_not_finite_give_nan_and_real_ids() -> None:
    """
    As in the reference, such a row has no probabilities; its ids are still ids.
    """
    logits = torch.zeros(2, 50)
    logits[0, 3], logits[1, 4] = math.nan, math.inf

    chosen, best, values = token_logprobs_triton(logits, torch.tensor([0, 1]), 2)

    assert bool(chosen.isnan().all())
    assert bool(values.isnan().all())
    assert bool(((best >= 0) & (best < 50)).all())


def test_no_best_and_no_rows_are_fine() -> None:
    """
    Shapes and dtypes are those of the reference.
    """
    for rows in (0, 2):
        logits, tokens = torch.zeros(rows, 8), torch.zeros(rows, dtype=torch.int64)
        for expected, actual in zip(
            token_logprobs_reference(logits, tokens, 0), token_logprobs_triton(logits, tokens, 0), strict=True
        ):
            assert (expected.shape, expected.dtype) == (actual.shape, actual.dtype)
