"""On the card, sampling, penalties and log-probabilities are those of the references, at real sizes."""

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.logprobs import token_logprobs, token_logprobs_reference
from kernels.penalties import apply_penalties, apply_penalties_reference
from kernels.random_draws import draw_keys
from kernels.sampling import argmax, argmax_reference, sample, sample_reference, sample_slots, sample_slots_reference
from kernels.token_masks import apply_token_masks, apply_token_masks_reference
from tests.support.sampling import columns_of, keys_of, mixed_logits, mixed_options

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
VOCAB = 151_936


def _logits(rows: int, vocab: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """A view of a wider matrix whose padding is NaN."""
    wide = torch.full((rows, vocab + 64), math.nan, dtype=dtype, device="cuda")
    wide[:, :vocab] = mixed_logits(rows, vocab, torch.Generator().manual_seed(seed))
    return wide[:, :vocab]


def _on_card(columns: tuple[Tensor, ...]) -> list[Tensor]:
    return [column.cuda() for column in columns]


def _near_equal(expected: Tensor, actual: Tensor, allowed: int) -> None:
    """Equal but for draws that a rounding at the edge of a set, or between two scores, may turn."""
    assert int((expected != actual).sum()) <= allowed, (expected - actual).nonzero().flatten().tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocab"), [(1, VOCAB), (7, 50_257), (32, 128_256), (600, VOCAB)])
def test_argmax_is_the_first_of_the_largest(rows: int, vocab: int, dtype: torch.dtype) -> None:
    """
    Whether rows are split or not; NaN, +inf and nothing finite give -1.
    """
    logits = _logits(rows, vocab, dtype)
    logits[rows // 2, vocab - 1] = math.nan
    logits[rows // 3, 3] = math.inf
    logits[0] = -math.inf

    assert torch.equal(argmax_reference(logits), argmax(logits))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [300, 50_257, VOCAB])
def test_draws_are_those_of_the_reference(vocab: int, dtype: torch.dtype) -> None:
    """
    The same tokens as by a full sort, for all mixtures of options.
    """
    rows = 120
    logits = _logits(rows, vocab, dtype, seed=1)
    logits[5, 17], logits[11, 0], logits[16] = math.nan, math.inf, -math.inf
    options = _on_card(columns_of(mixed_options(random.Random(vocab), rows, vocab)))
    keys = keys_of(rows).cuda()

    _near_equal(sample_reference(logits, *options, keys), sample(logits, *options, keys), allowed=1)


@pytest.mark.parametrize(
    "options",
    [(1.0, 0, 1.0, 0.0), (0.8, 50, 0.9, 0.0), (1.0, 0, 0.95, 0.0), (1.0, 0, 1.0, 0.05), (1.0, 3000, 0.9, 0.0)],
)
def test_many_rows_of_one_kind_draw_as_the_reference(options: tuple[float, int, float, float]) -> None:
    """
    One path of the kernels at a time, over more rows than the card holds at once.
    """
    rows = 400
    logits = (
        torch.randn(rows, 128_256, generator=torch.Generator("cuda").manual_seed(2), device="cuda").mul_(3).bfloat16()
    )
    columns = _on_card(columns_of([options] * rows))
    keys = keys_of(rows).cuda()

    first = sample(logits, *columns, keys)

    _near_equal(sample_reference(logits, *columns, keys), first, allowed=1)
    assert all(torch.equal(first, sample(logits, *columns, keys)) for _ in range(3))


def _slot_inputs(rows: int) -> tuple[Tensor, ...]:
    temperature, top_k, top_p, min_p = columns_of(mixed_options(random.Random(3), rows, VOCAB))
    knobs = torch.stack([temperature, top_p, min_p, *torch.zeros(3, rows)], dim=1).cuda()
    streams = torch.randint(-(2**31), 2**31, (rows, 2), dtype=torch.int32).cuda()
    slots = torch.randperm(rows, dtype=torch.int32).cuda()
    return slots, knobs, top_k.cuda(), streams, torch.arange(rows, dtype=torch.int32).cuda()


def test_a_captured_graph_draws_anew_at_each_replay() -> None:
    """
    Options by slot; what a graph draws follows the positions it finds.
    """
    logits = _logits(60, VOCAB, torch.bfloat16)
    slots, knobs, top_k, streams, positions = _slot_inputs(60)
    sample_slots(logits, slots, knobs, top_k, streams, positions)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        picked = sample_slots(logits, slots, knobs, top_k, streams, positions)

    for step in range(3):
        positions.fill_(step)
        graph.replay()
        index = slots.long()
        keys = draw_keys(streams[index], positions[index])
        temperature, top_p, min_p = knobs[index, :3].unbind(1)
        _near_equal(sample_reference(logits, temperature, top_k[index], top_p, min_p, keys), picked, allowed=1)
        assert torch.equal(sample_slots_reference(logits, slots, knobs, top_k, streams, positions), picked)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_top", [0, 5, 20])
def test_logprobs_are_the_log_softmax(num_top: int, dtype: torch.dtype) -> None:
    """
    Values near float64's, ids by value and then by id, also where more tie than a list holds.
    """
    logits = _logits(40, VOCAB, dtype)
    tokens = torch.randint(VOCAB, (40,), device="cuda")
    full = logits.double().log_softmax(dim=-1).clamp(min=-9999.0)
    order = logits.double().sort(dim=-1, descending=True, stable=True).indices[:, :num_top]

    chosen, best, values = token_logprobs(logits, tokens, num_top)

    assert torch.equal(order, best)
    torch.testing.assert_close(full.gather(-1, order).float(), values, rtol=3e-6, atol=3e-6)
    torch.testing.assert_close(full.gather(-1, tokens[:, None])[:, 0].float(), chosen, rtol=3e-6, atol=3e-6)
    reference = token_logprobs_reference(logits, tokens, num_top)
    torch.testing.assert_close(reference[0], chosen, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("make", [lambda: torch.arange(0, 64, 2), lambda: torch.randperm(64)])
def test_penalties_are_those_of_the_reference(make: Callable[[], Tensor]) -> None:
    """
    In place, named rows alone.
    """
    logits = _logits(64, VOCAB, torch.float32).nan_to_num(neginf=-1e4)
    rows = make().cuda()
    slots = torch.randperm(64)[: len(rows)].cuda()
    in_prompt = torch.rand(64, VOCAB, device="cuda") < 0.01
    counts = torch.randint(-50, 4, (64, VOCAB), dtype=torch.int32, device="cuda").clamp_(min=0)
    strengths = torch.rand(len(rows), 3, device="cuda") + 0.5
    expected = logits.clone()
    apply_penalties_reference(expected, rows, slots, in_prompt, counts, strengths)

    apply_penalties(logits, rows, slots, in_prompt, counts, strengths)

    torch.testing.assert_close(expected, logits, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("vocab", [VOCAB, 49_152, 151_643])
def test_token_masks_are_those_of_the_reference(vocab: int) -> None:
    """
    In place, named rows alone, also where the vocabulary ends inside a word.
    """
    logits = torch.randn(64, vocab + 37, device="cuda")
    rows = torch.randperm(64, device="cuda")[:20]
    masks = torch.randint(-(2**31), 2**31, (20, -(-vocab // 32)), device="cuda").to(torch.int32)
    expected = logits.clone()
    apply_token_masks_reference(expected[:, :vocab], rows, masks)

    apply_token_masks(logits[:, :vocab], rows, masks)

    assert torch.equal(expected, logits)
