"""
From logits to one token a row: argmax, or a random draw after temperature and filters.

A draw is the argmax of filtered, scaled logits plus Gumbel noise that is keyed by token
(kernels/random_draws.py): no sum over the row is needed, and no row sees its neighbours.

Filters apply in this order, each to what the one before left: min-p, top-k, top-p. All keep
the largest logits, so together they are one threshold a row; a token that ties with the last
one kept is kept too, which makes the set independent of any sort's order.

Source: Gumbel-max, Maddison et al. 2014, arXiv:1411.0030; top-p, Holtzman et al. 2020,
arXiv:1904.09751; min-p, Nguyen et al. 2024, arXiv:2407.01082.
"""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.random_draws import draw_keys, gumbel_noise

# colder than this is greedy: logits over temperature would leave float32
MIN_TEMPERATURE = 1e-5

Floats = NDArray[Any]
Ids = NDArray[np.int64]


def argmax(logits: Tensor) -> Tensor:
    """
    Pick the largest logit of each row, the lowest id where several tie.

    Args:
        logits: [rows, vocab] float.

    Returns:
        [rows] int64; -1 for a row that has a NaN or +inf, or nothing finite.
    """
    if logits.is_cuda and logits.dtype != torch.float64:
        from kernels.cuda.argmax import argmax_triton

        return argmax_triton(logits)
    pick = argmax_cpu if logits.device.type == "cpu" else argmax_reference
    return pick(logits)


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, keys: Tensor) -> Tensor:
    """
    Draw a token from each row, each with its own options.

    Args:
        logits: [rows, vocab] float; computed in float32, or in float64 for float64.
        temperature: [rows] float32; under 1e-5 the row is greedy.
        top_k: [rows] int; 0 keeps all.
        top_p: [rows] float32; 1 keeps all.
        min_p: [rows] float32; 0 keeps all.
        keys: [rows, 2] int32 from `draw_keys`.

    Returns:
        [rows] int64; -1 for a row that has a NaN or +inf, or nothing finite.
    """
    if logits.is_cuda and logits.dtype != torch.float64:
        from kernels.cuda.sampling import sample_triton

        return sample_triton(logits, temperature, top_k, top_p, min_p, keys)
    pick = sample_cpu if logits.device.type == "cpu" else sample_reference
    return pick(logits, temperature, top_k, top_p, min_p, keys)


def sample_slots(
    logits: Tensor, slots: Tensor, knobs: Tensor, top_k: Tensor, streams: Tensor, positions: Tensor
) -> Tensor:
    """
    Draw a token from each row, with the options and the stream of the row's slot.

    Args:
        logits: [rows, vocab] float, as for `sample`.
        slots: [rows] int32 or int64.
        knobs: [num_slots, at least 3] float32: temperature, top-p, min-p, and what is not read.
        top_k: [num_slots] int32.
        streams: [num_slots, 2] int32, from `stream_words`.
        positions: [num_slots] int32, the place in its answer of each slot's next token.

    Returns:
        [rows] int64: what `sample` gives with the keys of `draw_keys`.
    """
    if logits.is_cuda and logits.dtype != torch.float64:
        from kernels.cuda.sampling import sample_slots_triton

        return sample_slots_triton(logits, slots, knobs, top_k, streams, positions)
    return sample_slots_reference(logits, slots, knobs, top_k, streams, positions)


def argmax_reference(logits: Tensor) -> Tensor:
    peak = logits.amax(dim=-1, keepdim=True)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    # torch.argmax promises no order among equals
    first = torch.where(logits == peak, ids, logits.shape[-1]).amin(dim=-1)
    return torch.where(peak[:, 0].isfinite(), first, -1)


def sample_reference(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, keys: Tensor
) -> Tensor:
    # differences of 16-bit logits would be rounded to 16 bits
    logits = logits if logits.dtype == torch.float64 else logits.float()
    greedy = temperature < MIN_TEMPERATURE
    peak = logits.amax(dim=-1, keepdim=True)
    # the peak goes first: a cold temperature may then take the others to -inf, never the peak to +inf
    scaled = (logits - peak) / temperature.masked_fill(greedy, 1.0).to(logits.dtype)[:, None]
    threshold = filter_threshold(scaled, top_k, top_p, min_p)

    ids = torch.arange(logits.shape[-1], device=logits.device, dtype=torch.int32)
    noise = gumbel_noise(keys[:, None], ids).masked_fill(greedy[:, None], 0.0)
    scores = (scaled + noise).masked_fill(scaled < threshold[:, None], -math.inf)
    return torch.where(peak[:, 0].isfinite(), argmax_reference(scores), -1)


def sample_slots_reference(
    logits: Tensor, slots: Tensor, knobs: Tensor, top_k: Tensor, streams: Tensor, positions: Tensor
) -> Tensor:
    index = slots.long()
    temperature, top_p, min_p = knobs[index, :3].unbind(dim=1)
    keys = draw_keys(streams[index], positions[index])
    return sample(logits, temperature, top_k[index], top_p, min_p, keys)


def filter_threshold(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """
    Find the smallest logit that the filters keep, by a full sort.

    Args:
        scaled: [rows, vocab], divided by temperature, with 0 as each row's largest.
        top_k, top_p, min_p: [rows], as in `sample`.

    Returns:
        [rows] of the dtype of `scaled`; the largest is always kept.
    """
    ordered = scaled.sort(dim=-1, descending=True).values
    kth = ordered.gather(-1, (top_k.long().clamp(1, ordered.shape[-1]) - 1)[:, None])

    keep = ordered >= min_p.to(ordered.dtype).log()[:, None]
    keep &= (ordered >= kth) | (top_k == 0)[:, None]
    mass = ordered.double().exp().masked_fill(~keep, 0.0).cumsum(dim=-1)
    before = torch.cat([torch.zeros_like(mass[:, :1]), mass[:, :-1]], dim=-1)
    keep &= (before < top_p[:, None] * mass[:, -1:]) | (top_p >= 1)[:, None]

    last = keep.sum(dim=-1, keepdim=True).clamp(min=1) - 1
    return ordered.gather(-1, last)[:, 0]


def argmax_cpu(logits: Tensor) -> Tensor:
    # numpy's argmax is vectorised and takes the first of equals, a NaN before all:
    # 9 us a row of 49,152 where torch takes 120
    values = _as_numpy(logits)
    best = [row.argmax() for row in values]
    return torch.tensor(
        [int(token) if math.isfinite(row[token]) else -1 for row, token in zip(values, best, strict=True)],
        dtype=torch.int64,
    )


def sample_cpu(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, keys: Tensor
) -> Tensor:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    picked = argmax_cpu(logits)
    ids = torch.arange(logits.shape[-1], dtype=torch.int32)
    options = zip(temperature.tolist(), top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True)
    for row, (heat, k, p, floor) in enumerate(options):
        if heat < MIN_TEMPERATURE or picked[row] < 0:
            continue
        scaled = (logits[row] - logits[row, picked[row]]).div_(heat)
        if 0 < k < len(ids) or p < 1 or floor > 0:
            # noise for what is left: 1,000 of 49,152 tokens as a rule, often 50
            kept = torch.from_numpy(_kept_ids(_as_numpy(scaled), k, p, floor))
            scores = scaled[kept] + gumbel_noise(keys[row], kept.to(torch.int32))
            picked[row] = kept[int(_as_numpy(scores).argmax())]
        else:
            scaled += gumbel_noise(keys[row], ids)
            picked[row] = int(_as_numpy(scaled).argmax())
    return picked


def _kept_ids(scaled: Floats, top_k: int, top_p: float, min_p: float) -> Ids:
    """The tokens of one row that the filters keep, ascending; as `filter_threshold`, without its sort."""
    threshold = math.log(min_p) if min_p > 0 else -math.inf
    if 0 < top_k < len(scaled):
        kth = len(scaled) - top_k
        threshold = max(threshold, float(np.partition(scaled, kth)[kth]))
    if threshold == -math.inf:
        return _nucleus(scaled, top_p) if top_p < 1 else np.arange(len(scaled))
    kept: Ids = np.flatnonzero(scaled >= threshold)
    return kept[_nucleus(scaled[kept], top_p)] if top_p < 1 else kept


def _nucleus(scaled: Floats, top_p: float) -> Ids:
    """The smallest set of largest logits that has top_p of the probability, and its ties."""
    weights = _as_numpy(torch.from_numpy(scaled).exp())
    total = weights.sum(dtype=np.float64)
    # all tokens this light together weigh at most 1 - top_p: the set lies among the others
    light = (1 - top_p) * total / len(weights)
    candidates: Ids = np.flatnonzero(weights > light)
    weights = weights[candidates]

    ordered = np.sort(weights)[::-1]
    last = int(np.searchsorted(ordered.cumsum(dtype=np.float64), top_p * total))
    kept: Ids = candidates[weights >= ordered[min(last, len(ordered) - 1)]]
    return kept


def _as_numpy(values: Tensor) -> Floats:
    return values.detach().numpy()
