"""Log-probabilities are those of the softmax, ordered, and always finite."""

import math

import pytest
import torch

from kernels.logprobs import LOGPROB_FLOOR, token_logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_logprobs_are_the_log_softmax(dtype: torch.dtype) -> None:
    """
    The chosen token and the best n have the values of log_softmax, over more rows than one pass holds.
    """
    logits = (torch.randn(70, 500, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    tokens = torch.randint(500, (70,), generator=torch.Generator().manual_seed(1))
    full = logits.double().log_softmax(dim=-1)

    chosen, best, values = token_logprobs(logits, tokens, 7)

    torch.testing.assert_close(full.gather(-1, tokens[:, None])[:, 0], chosen.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(full.topk(7).values, values.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(full.gather(-1, best), values.double(), rtol=1e-5, atol=1e-5)


def test_equal_tokens_are_listed_by_id() -> None:
    """
    Of tokens with the same probability the lower id is listed first.
    """
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 2.0]])

    assert [[1, 3, 5, 2, 4]] == token_logprobs(logits, torch.tensor([0]), 5)[1].tolist()


def test_impossible_tokens_have_a_finite_floor() -> None:
    """
    A token with no probability gives the floor, among the best as well as chosen.
    """
    logits = torch.full((1, 5), -math.inf)
    logits[0, 2] = 0.0

    chosen, best, values = token_logprobs(logits, torch.tensor([4]), 3)

    assert LOGPROB_FLOOR == float(chosen)
    assert 2 == int(best[0, 0])
    assert [0.0, LOGPROB_FLOOR, LOGPROB_FLOOR] == values[0].tolist()


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_no_best_and_no_rows_are_fine(rows: int) -> None:
    """
    With num_top 0, and with no rows, shapes stay as documented.
    """
    chosen, best, values = token_logprobs(torch.zeros(rows, 8), torch.zeros(rows, dtype=torch.int64), 0)

    assert (rows,) == chosen.shape
    assert (rows, 0) == best.shape == values.shape
    assert torch.int64 == best.dtype


def test_a_row_is_the_same_whatever_rows_are_beside_it() -> None:
    """
    Alone or among others, a row's log-probabilities are equal bit for bit.
    """
    logits = torch.randn(40, 5000, generator=torch.Generator().manual_seed(2))
    tokens = torch.arange(40)
    together = token_logprobs(logits, tokens, 3)

    for row in range(40):
        alone = token_logprobs(logits[row : row + 1], tokens[row : row + 1], 3)
        assert all(torch.equal(all_rows[row : row + 1], one) for all_rows, one in zip(together, alone, strict=True))
