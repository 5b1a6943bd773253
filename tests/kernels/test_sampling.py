"""Draws follow the filtered distribution exactly, row by row, at any temperature."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from kernels.random_draws import draw_keys, stream_words
from kernels.sampling import argmax, argmax_cpu, argmax_reference, filter_threshold, sample, sample_reference

DTYPES = [torch.float32, torch.float64]
Options = tuple[float, int, float, float]

# temperature, top-k, top-p, min-p
CASES: list[Options] = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (1.3, 0, 0.8, 0.0),
    (1.0, 0, 1.0, 0.1),
    (0.9, 12, 0.9, 0.0),
    (1.5, 20, 0.7, 0.05),
    (100.0, 0, 0.5, 0.0),
]


def _keys(rows: int, seed: int = 0) -> Tensor:
    streams = torch.tensor([stream_words(seed + row, 0) for row in range(rows)], dtype=torch.int32)
    return draw_keys(streams, torch.zeros(rows, dtype=torch.int32))


def _columns(options: list[Options]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    heat, k, p, floor = zip(*options, strict=True)
    return torch.tensor(heat), torch.tensor(k, dtype=torch.int32), torch.tensor(p), torch.tensor(floor)


def _oracle(logits: Tensor, options: Options) -> Tensor:
    """The filtered distribution of one row by transformers' own processors."""
    heat, k, p, floor = options
    scores = logits[None] / heat
    ids = torch.zeros(1, 1, dtype=torch.long)
    if floor > 0:
        scores = MinPLogitsWarper(floor)(ids, scores)
    if k:
        scores = TopKLogitsWarper(k)(ids, scores)
    if p < 1:
        scores = TopPLogitsWarper(p)(ids, scores)
    return scores[0].softmax(dim=-1)


@pytest.mark.parametrize("pick", [argmax, argmax_cpu, argmax_reference])
@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax_takes_the_lowest_id_of_equals(pick: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """
    Of equal largest logits the first wins, wherever in the row they are.
    """
    logits = torch.randn(4, 50_000, dtype=dtype).clamp(max=3)
    for row, places in enumerate([(0, 1), (7, 49_999), (32_768, 32_769, 40_000), (49_999,)]):
        logits[row, list(places)] = 5.0

    assert [0, 7, 32_768, 49_999] == pick(logits).tolist()


@pytest.mark.parametrize("pick", [argmax_cpu, argmax_reference])
def test_argmax_refuses_rows_that_are_not_finite(pick: Callable[[Tensor], Tensor]) -> None:
    """
    A NaN, +inf or nothing finite makes -1 of its row alone; a -inf is a token never taken.
    """
    logits = torch.zeros(5, 300)
    logits[:, 11] = 1.0
    logits[0, 299] = math.nan
    logits[1, 5] = math.inf
    logits[2, :] = -math.inf
    logits[3, :11] = -math.inf

    assert [-1, -1, -1, 11, 11] == pick(logits).tolist()


@pytest.mark.parametrize("options", CASES)
def test_draws_follow_the_filtered_distribution(options: Options) -> None:
    """
    Over many seeds, tokens come as often as the exact filtered probabilities say (chi-squared).
    """
    logits = torch.randn(40, generator=torch.Generator().manual_seed(3)) * 2
    expected = _oracle(logits.double(), options) * 20_000

    tokens = sample_reference(logits.expand(20_000, -1), *_columns([options] * 20_000), _keys(20_000))

    counts = torch.bincount(tokens, minlength=40).double()
    kept = expected > 0
    assert 0 == int(counts[~kept].sum())
    chi2 = float(((counts - expected)[kept] ** 2 / expected[kept]).sum())
    freedom = max(int(kept.sum()) - 1, 1)
    assert (chi2 - freedom) / math.sqrt(2 * freedom) < 5


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cpu_path_draws_what_the_reference_draws(dtype: torch.dtype) -> None:
    """
    Without a sort, and with noise for the kept tokens alone, the same tokens come out.
    """
    generator = torch.Generator().manual_seed(11)
    options = [case for case in CASES for _ in range(12)]
    options += [(0.0, 3, 0.9, 0.1), (1.0, 1, 1.0, 0.0), (1.0, 0, 1e-6, 0.0), (1.0, 0, 0.9999, 0.0), (1.0, 0, 1.0, 1.0)]
    logits = torch.randn(len(options), 5000, generator=generator, dtype=dtype) * 3
    logits[::7, ::2] = -math.inf

    args = (logits, *_columns(options), _keys(len(options)))
    assert sample_reference(*args).tolist() == sample(*args).tolist()


@pytest.mark.parametrize("options", [case for case in CASES if case[1:] != (0, 1.0, 0.0)])
def test_filters_keep_what_transformers_keeps(options: Options) -> None:
    """
    The threshold keeps the same set as transformers' min-p, top-k and top-p, one after the other.
    """
    logits = torch.randn(30, 200, generator=torch.Generator().manual_seed(5), dtype=torch.float64) * 3
    expected = torch.stack([_oracle(row, options) > 0 for row in logits])

    _, k, p, floor = (column.double() for column in _columns([options] * 30))
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / options[0]
    # float32 parameters differ from Python's floats by 1e-8: no cumulated mass lies that close here
    kept = scaled >= filter_threshold(scaled, k.int(), p, floor)[:, None]

    assert torch.equal(expected, kept)


@pytest.mark.parametrize("pick", [sample, sample_reference])
def test_ties_with_the_last_kept_token_are_kept(pick: Callable[..., Tensor]) -> None:
    """
    Top-k and top-p never choose among equals: all that tie with the last one can be drawn.
    """
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0, -1.0]).expand(4000, -1)
    for options in [(1.0, 2, 1.0, 0.0), (1.0, 0, 0.5, 0.0), (1.0, 2, 0.6, 0.0)]:
        drawn = set(pick(logits[:600], *_columns([options] * 600), _keys(600)).tolist())
        assert {0, 1, 2, 3} == drawn


@pytest.mark.parametrize("pick", [sample, sample_reference])
@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_temperatures_share_a_batch(pick: Callable[..., Tensor], dtype: torch.dtype) -> None:
    """
    0 and 1e-7 are greedy, 1e-4 all but, 100 nearly uniform; none disturbs another or overflows.
    """
    logits = (torch.randn(1, 1000, generator=torch.Generator().manual_seed(1), dtype=dtype) * 50).expand(5 * 60, -1)
    heats = [0.0, 1e-7, 1e-4, 1.0, 100.0] * 60
    tokens = pick(logits, *_columns([(heat, 0, 1.0, 0.0) for heat in heats]), _keys(len(heats))).view(60, 5)

    best = int(logits[0].argmax())
    assert {best} == set(tokens[:, :3].flatten().tolist())
    assert len(set(tokens[:, 3].tolist())) <= 20
    assert len(set(tokens[:, 4].tolist())) > 40


@pytest.mark.parametrize("pick", [sample, sample_reference])
def test_a_broken_row_fails_alone(pick: Callable[..., Tensor]) -> None:
    """
    Rows with NaN or inf give -1 under every option, and the others draw what they always draw.
    """
    options = CASES[:6]
    logits = torch.randn(6, 400, generator=torch.Generator().manual_seed(2))
    args = (*_columns(options), _keys(6))
    expected = pick(logits, *args).tolist()

    broken = logits.clone()
    broken[0, 3] = math.nan
    broken[2, 399] = math.inf
    broken[4] = -math.inf
    assert [-1, expected[1], -1, expected[3], -1, expected[5]] == pick(broken, *args).tolist()


@pytest.mark.parametrize("pick", [sample, sample_reference])
def test_a_draw_is_the_same_whatever_rows_are_beside_it(pick: Callable[..., Tensor]) -> None:
    """
    Alone, in a batch, or in another order, a row with its key gives its token.
    """
    options = CASES * 4
    logits = torch.randn(32, 3001, generator=torch.Generator().manual_seed(8)) * 2
    columns, keys = _columns(options), _keys(32)
    together = pick(logits, *columns, keys)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(9))

    assert torch.equal(together[order], pick(logits[order], *(column[order] for column in columns), keys[order]))
    for row in range(32):
        alone = pick(logits[row : row + 1], *(column[row : row + 1] for column in columns), keys[row : row + 1])
        assert int(together[row]) == int(alone)


def test_padding_columns_of_a_larger_matrix_are_not_read() -> None:
    """
    A view of the first columns of a wider matrix is sampled as its copy is.
    """
    wide = torch.randn(8, 640, generator=torch.Generator().manual_seed(4))
    wide[:, 600:] = 100.0
    args = (*_columns(CASES), _keys(8))

    assert sample(wide[:, :600].clone(), *args).tolist() == sample(wide[:, :600], *args).tolist()
    assert wide[:, :600].argmax(dim=-1).tolist() == argmax(wide[:, :600]).tolist()
