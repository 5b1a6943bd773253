"""The CUDA kernels pick what the references pick, with lists that hold a row's candidates and that don't."""

import math
import random

import pytest
import torch

from kernels.cuda import argmax as argmax_module
from kernels.cuda import sampling as sampling_module
from kernels.cuda.argmax import argmax_triton
from kernels.cuda.sampling import sample_slots_triton, sample_triton
from kernels.random_draws import draw_keys
from kernels.sampling import argmax_reference, sample_reference, sample_slots_reference
from tests.support.sampling import columns_of, keys_of, mixed_logits, mixed_options

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of some hundred tokens has several tiles, a list holds 32."""
    monkeypatch.setattr(argmax_module, "BLOCK", 64)
    for name, size in {"PEAK_BLOCK": 64, "DRAW_BLOCK": 64, "FILTER_BLOCK": 64, "SEARCH_BLOCK": 128}.items():
        monkeypatch.setattr(sampling_module, name, size)
    monkeypatch.setattr(sampling_module, "CAPACITY", 32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocab", "programs"), [(1, 37, 264), (3, 300, 264), (2, 300, 6), (5, 130, 4)])
def test_argmax_is_the_first_of_the_largest(
    rows: int, vocab: int, dtype: torch.dtype, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Split over programs or not, ties go to the lowest id and padding is not read.
    """
    monkeypatch.setattr(argmax_module, "PROGRAMS", programs)
    wide = torch.full((rows, vocab + 40), math.inf, dtype=dtype)
    wide[:, :vocab] = (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows)) * 2).round()

    assert argmax_reference(wide[:, :vocab]).tolist() == argmax_triton(wide[:, :vocab]).tolist()


def test_argmax_refuses_rows_that_are_not_finite() -> None:
    """
    A NaN, +inf or nothing finite makes -1 of its row alone; a -inf is a token never taken.
    """
    logits = torch.zeros(5, 300)
    logits[:, 11] = 1.0
    logits[0, 299] = math.nan
    logits[1, 5] = math.inf
    logits[2, :] = -math.inf
    logits[3, :11] = -math.inf

    assert [-1, -1, -1, 11, 11] == argmax_triton(logits).tolist()


def _check(rows: int, vocab: int, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.full((rows, vocab + 24), math.nan, dtype=dtype)
    wide[:, :vocab] = mixed_logits(rows, vocab, generator).to(dtype)
    options = columns_of(mixed_options(random.Random(seed), rows, vocab))
    keys = keys_of(rows, seed)

    expected = sample_reference(wide[:, :vocab], *options, keys)

    assert expected.tolist() == sample_triton(wide[:, :vocab], *options, keys).tolist()


@pytest.mark.parametrize(("dtype", "vocab"), [*zip(DTYPES, (190, 37, 129), strict=True)])
def test_draws_are_those_of_the_reference(dtype: torch.dtype, vocab: int) -> None:
    """
    Whatever the options and however many ties, the same token as with a full sort.
    """
    _check(12, vocab, dtype, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [37, 64, 200, 300])
@pytest.mark.parametrize("seed", range(5))
def test_more_draws_are_those_of_the_reference(dtype: torch.dtype, vocab: int, seed: int) -> None:
    """
    The same over many more rows.
    """
    _check(30, vocab, dtype, seed=100 + seed)


@pytest.mark.parametrize(
    "options",
    [(1.0, 20, 1.0, 0.0), (1.0, 60, 0.9, 0.01), (3.0, 0, 0.95, 0.0), (1.0, 12, 0.8, 0.02), (1.0, 0, 0.1, 0.0)],
)
def test_kept_sets_are_those_of_the_reference(options: tuple[float, int, float, float]) -> None:
    """
    Where the largest noise falls on a token at the edge of what is kept, both keep or drop it.
    """
    generator = torch.Generator().manual_seed(5)
    # two values apart by one place of float32 before, and none after, division by the temperature
    logits = (torch.randn(1, 150, generator=generator) * 4).round() / 4 + 1e-7 * torch.arange(150)
    columns = columns_of([options] * 2)

    assert (
        sample_reference(logits.expand(2, -1), *columns, keys_of(2)).tolist()
        == sample_triton(logits.expand(2, -1), *columns, keys_of(2)).tolist()
    )


def test_rows_that_are_not_finite_are_named() -> None:
    """
    A row with NaN or inf gives -1 with filters and without, and its neighbours their tokens.
    """
    logits = mixed_logits(5, 90, torch.Generator().manual_seed(3))
    logits[0, 3], logits[1, 89], logits[2] = math.nan, math.inf, -math.inf
    columns = columns_of(
        [(1.0, 5, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 0, 0.5, 0.0), (1.0, 3, 0.5, 0.0), (0.0, 0, 1.0, 0)]
    )

    picked = sample_triton(logits, *columns, keys_of(5))

    assert sample_reference(logits, *columns, keys_of(5)).tolist() == picked.tolist()
    assert [-1, -1, -1] == picked[:3].tolist()


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_options_are_read_by_slot(index: torch.dtype) -> None:
    """
    Slots in any order give what gathered options and keys give.
    """
    rng = random.Random(2)
    logits = mixed_logits(6, 100, torch.Generator().manual_seed(7))
    temperature, top_k, top_p, min_p = columns_of(mixed_options(rng, 9, 100))
    knobs = torch.stack([temperature, top_p, min_p, *torch.full((3, 9), math.nan)], dim=1)
    streams = torch.randint(-(2**31), 2**31, (9, 2), dtype=torch.int32, generator=torch.Generator().manual_seed(8))
    positions = torch.arange(9, dtype=torch.int32) * 1000
    slots = torch.tensor([8, 0, 3, 2, 7, 5], dtype=index)
    chosen = slots.long()

    picked = sample_slots_triton(logits, slots, knobs, top_k, streams, positions)

    args = (temperature[chosen], top_k[chosen], top_p[chosen], min_p[chosen])
    keys = draw_keys(streams[chosen], positions[chosen])
    assert sample_reference(logits, *args, keys).tolist() == picked.tolist()
    assert sample_slots_reference(logits, slots, knobs, top_k, streams, positions).tolist() == picked.tolist()
