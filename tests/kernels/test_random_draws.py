"""The draws are uniform, independent of their neighbours, and a function of their name alone."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.random_draws import (
    draw_keys,
    gumbel_noise,
    random_bits,
    random_bits_reference,
    stream_words,
    uniform_draws,
)

VOCAB = 49_152
# a chi-squared statistic this many deviations over its mean is one in some 10**6
LIMIT = 5.0


def _keys(seeds: list[int], positions: list[int], index: int = 0) -> Tensor:
    streams = torch.tensor([stream_words(seed, index) for seed in seeds], dtype=torch.int32)
    return draw_keys(streams, torch.tensor(positions, dtype=torch.int32))


def _row(seed: int, position: int, index: int = 0) -> Tensor:
    return uniform_draws(_keys([seed], [position], index), torch.arange(VOCAB, dtype=torch.int32))


def _deviations(counts: Tensor) -> float:
    """How many standard deviations a table's chi-squared lies over that of equal chances."""
    expected = counts.sum() / counts.numel()
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    freedom = counts.numel() - 1
    return (chi2 - freedom) / math.sqrt(2 * freedom)


def _pairs(first: Tensor, second: Tensor, bins: int = 24) -> Tensor:
    cells = (first * bins).long() * bins + (second * bins).long()
    return torch.bincount(cells.flatten(), minlength=bins * bins).double()


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 + 11, -1])
def test_draws_of_a_row_are_uniform(seed: int) -> None:
    """
    The draws of all tokens at one position fill the interval evenly.
    """
    draws = torch.cat([_row(seed, position) for position in range(8)])

    assert abs(_deviations(torch.bincount((draws * 1000).long(), minlength=1000).double())) < LIMIT


def test_draws_of_one_token_are_uniform_over_positions_and_seeds() -> None:
    """
    One token's draws along an answer, and over consecutive seeds, fill the interval evenly.
    """
    token = torch.tensor([17], dtype=torch.int32)
    along = uniform_draws(_keys([5] * 60_000, list(range(60_000))), token)
    over = uniform_draws(_keys(list(range(60_000)), [3] * 60_000), token)

    for draws in (along, over):
        assert abs(_deviations(torch.bincount((draws * 200).long(), minlength=200).double())) < LIMIT


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param((9, 4, 0), (9, 5, 0), id="position"),
        pytest.param((9, 4, 0), (10, 4, 0), id="seed"),
        pytest.param((9, 4, 0), (9 + 2**32, 4, 0), id="high seed word"),
        pytest.param((9, 4, 0), (9, 4, 1), id="answer"),
        pytest.param((9, 4, 1), (10, 4, 0), id="seed against answer"),
    ],
)
def test_neighbouring_names_are_independent(first: tuple[int, int, int], second: tuple[int, int, int]) -> None:
    """
    Draws whose names differ by one in one part are independent pairs.
    """
    rows = [(_row(first[0] + 2 * i, *first[1:]), _row(second[0] + 2 * i, *second[1:])) for i in range(4)]
    table = torch.stack([_pairs(a, b) for a, b in rows]).sum(dim=0)

    assert abs(_deviations(table)) < LIMIT
    for a, b in rows:
        assert int((a == b).sum()) < 5


def test_neighbouring_tokens_are_independent() -> None:
    """
    The draws of token ids a small or a round distance apart are independent pairs.
    """
    rows = torch.stack([_row(seed, 0) for seed in range(8)])

    for distance in (1, 2, 64, 1024, 32_768):
        assert abs(_deviations(_pairs(rows[:, :-distance], rows[:, distance:]))) < LIMIT


def test_every_bit_flips_half_the_time() -> None:
    """
    Changing the position by one flips each of the 32 bits in half of the draws.
    """
    tokens = torch.arange(VOCAB, dtype=torch.int32)
    changed = random_bits(_keys([3], [100]), tokens) ^ random_bits(_keys([3], [101]), tokens)

    for bit in range(32):
        share = ((changed >> bit) & 1).double().mean()
        assert abs(float(share) - 0.5) < LIMIT * 0.5 / math.sqrt(VOCAB)


@pytest.mark.parametrize("bits_of", [random_bits, random_bits_reference])
def test_bits_match_unsigned_arithmetic(bits_of: Callable[[Tensor, Tensor], Tensor]) -> None:
    """
    Signed or unsigned, the rounds give the bits of plain 32-bit arithmetic.
    """
    key = _keys([2**40 + 3], [7])
    first, second = (int(word) & 0xFFFFFFFF for word in key[0])

    def unsigned(token: int) -> int:
        bits = (token * 0x9E3779B1 + first) & 0xFFFFFFFF
        bits = ((bits ^ bits >> 16) * 0x7FEB352D) & 0xFFFFFFFF
        bits = (((bits ^ bits >> 15) + second) * 0x846CA68B) & 0xFFFFFFFF
        return bits ^ bits >> 16

    tokens = [0, 1, 2, 49_151, 151_935, 2**31 - 1]
    actual = bits_of(key, torch.tensor(tokens, dtype=torch.int32))
    assert [unsigned(token) for token in tokens] == [int(bits) & 0xFFFFFFFF for bits in actual]
    keys = _keys([1, 2, 3], [0, 5, 9])[:, None]
    ids = torch.arange(VOCAB, dtype=torch.int32)
    assert torch.equal(bits_of(keys, ids), random_bits(keys, ids))


def test_draws_never_reach_the_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    The least and the largest of all possible bits give draws inside (0, 1) and finite noise.
    """
    bits = torch.tensor([0, 1, -1, 2**31 - 1, -(2**31), 2**31 - 64, 2**31 - 65], dtype=torch.int32)
    monkeypatch.setattr("kernels.random_draws.random_bits", lambda _keys, _tokens: bits.clone())

    draws = uniform_draws(torch.empty(0), torch.empty(0))
    noise = gumbel_noise(torch.empty(0), torch.empty(0))
    assert 0 < float(draws.min()) < 2.0**-31
    assert 1 - 2.0**-24 == float(draws.max())
    assert -2.9 < float(noise.min()) < float(noise.max()) < 22.2


def test_noise_is_standard_gumbel() -> None:
    """
    The noise has the mean, the variance and the distribution function of a standard Gumbel.
    """
    tokens = torch.arange(VOCAB, dtype=torch.int32)
    noise = torch.cat([gumbel_noise(_keys([seed], [1]), tokens) for seed in range(20)]).double()

    assert abs(float(noise.mean()) - 0.5772157) < LIMIT * 1.2826 / math.sqrt(len(noise))
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.02
    below = torch.exp(-torch.exp(-noise))
    assert abs(_deviations(torch.bincount((below * 500).long().clamp(max=499), minlength=500).double())) < LIMIT


def test_some_tokens_alone_have_the_noise_they_have_in_the_row() -> None:
    """
    A token's noise is bit for bit the same in a full row, in a batch, and among a few tokens.
    """
    keys = _keys([1, 2, 3], [0, 9, 4])
    batch = gumbel_noise(keys[:, None], torch.arange(VOCAB, dtype=torch.int32))
    some = torch.tensor([48_001, 7, 30_303, 0, 49_151], dtype=torch.int32)

    for row in range(3):
        assert torch.equal(batch[row], gumbel_noise(keys[row], torch.arange(VOCAB, dtype=torch.int32)))
        assert torch.equal(batch[row, some.long()], gumbel_noise(keys[row], some))


def test_streams_of_answers_and_seeds_differ() -> None:
    """
    No two of many (seed, answer) pairs name the same stream, and only 64 bits of a seed count.
    """
    seeds = [0, 1, 2, 3, 2**31, 2**32, 2**32 + 1, 2**63, 2**64 - 1]
    names = {stream_words(seed, index) for seed in seeds for index in range(128)}

    assert len(seeds) * 128 == len(names)
    assert stream_words(5, 0) == stream_words(5 + 2**64, 0)
    assert stream_words(2**64 - 1, 2) == stream_words(-1, 2)
