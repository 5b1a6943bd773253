"""Rows of logits and options that sampling must get right, and their random keys."""

import random

import torch
from torch import Tensor

from kernels.random_draws import draw_keys, stream_words

Options = tuple[float, int, float, float]

TEMPERATURES = (0.0, 1e-7, 1e-4, 0.7, 1.0, 100.0)
TOP_P = (1e-6, 0.3, 0.9, 0.999, 1.0, 1.0)
MIN_P = (0.0, 0.0, 0.05, 1.0)


def keys_of(rows: int, seed: int = 0) -> Tensor:
    streams = torch.tensor([stream_words(seed, row) for row in range(rows)], dtype=torch.int32)
    return draw_keys(streams, torch.arange(rows, dtype=torch.int32))


def columns_of(options: list[Options]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Temperature, top-k, top-p and min-p of each row as `sample` takes them."""
    heat, k, p, floor = zip(*options, strict=True)
    return torch.tensor(heat), torch.tensor(k, dtype=torch.int32), torch.tensor(p), torch.tensor(floor)


def mixed_options(rng: random.Random, rows: int, vocab: int) -> list[Options]:
    """Options at random, with all values of each met early."""
    return [
        (
            TEMPERATURES[row % len(TEMPERATURES)] if row % 3 else 1.0,
            rng.choice((0, 0, 1, 5, rng.randint(1, vocab), vocab)),
            rng.choice(TOP_P),
            rng.choice(MIN_P),
        )
        for row in range(rows)
    ]


def mixed_logits(rows: int, vocab: int, generator: torch.Generator) -> Tensor:
    """
    [rows, vocab] float32: of each five rows, one plain, one flat, one of few values with many
    ties, one with most of it -inf, and one that has only one finite logit.
    """
    logits = torch.randn(rows, vocab, generator=generator) * 3
    logits[1::5] *= 0.01
    logits[2::5] = logits[2::5].round()
    logits[3::5] = logits[3::5].masked_fill(torch.rand(len(logits[3::5]), vocab, generator=generator) < 0.7, -torch.inf)
    logits[4::5, torch.arange(vocab) != vocab // 2] = -torch.inf
    return logits
