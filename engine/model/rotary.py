"""
Rotary frequencies of every scaling that the supported models use, and the table made of them.

Frequencies are computed in float32 in the order of operations that checkpoints were trained and
published with, so that the table's bits are those of transformers.
Sources: Su et al. 2021, arXiv:2104.09864 (RoPE); Peng et al. 2023, arXiv:2309.00071 (YaRN, and
NTK scaling); Ding et al. 2024, arXiv:2402.13753 (LongRoPE).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.errors import StartupError, UnknownArchitecture


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeShape:
    """
    What a scaling is computed from.

    Args:
        rope: Parameters with `rope_type`, `rope_theta`, and those of the type.
        rotary_dim: Elements of a head that are rotated.
        max_positions: Longest sequence of the model.
        max_model_len: Longest sequence of this engine. Scalings that depend on a length take
            this one, once: cached keys must all be rotated alike.
    """

    rope: Mapping[str, Any]
    rotary_dim: int
    max_positions: int
    max_model_len: int


def rotary_table(shape: RopeShape) -> Tensor:
    """
    Make the table whose rows `kernels.rope` reads.

    Returns:
        [max_model_len, 2, rotary_dim] float32, both times the attention factor of the scaling:
        the cosines of rotary_dim / 2 angles, twice over, and their sines, negated and then plain.

    Raises:
        UnknownArchitecture: the rope type is none of those in SCALINGS.
    """
    frequencies, factor = inverse_frequencies(shape)
    angles = torch.arange(shape.max_model_len, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.stack([torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)], dim=1)


def inverse_frequencies(shape: RopeShape) -> tuple[Tensor, float]:
    """
    Return the angle per position of each pair, [rotary_dim / 2] float32, and the attention factor.
    """
    kind = shape.rope["rope_type"]
    if kind not in SCALINGS:
        raise UnknownArchitecture(f"config.json asks for rope type {kind!r}; supported are {', '.join(SCALINGS)}")
    try:
        return SCALINGS[kind](shape)
    except KeyError as error:
        raise StartupError(f"config.json lacks {error.args[0]!r}, which rope type {kind!r} needs") from None


def _periods(shape: RopeShape, base: float | Tensor) -> Tensor:
    exponents = torch.arange(0, shape.rotary_dim, 2, dtype=torch.int64).float() / shape.rotary_dim
    return torch.pow(base, exponents)


def _plain(shape: RopeShape) -> tuple[Tensor, float]:
    return 1.0 / _periods(shape, shape.rope["rope_theta"]), 1.0


def _linear(shape: RopeShape) -> tuple[Tensor, float]:
    return _plain(shape)[0] / shape.rope["factor"], 1.0


def _dynamic(shape: RopeShape) -> tuple[Tensor, float]:
    factor, dim = shape.rope["factor"], shape.rotary_dim
    # a tensor, for the base too is rounded to float32: at position 33,000 the angle differs by 6e-6
    length = torch.tensor(max(shape.max_model_len, shape.max_positions))
    stretch = (factor * length / shape.max_positions) - (factor - 1)
    return 1.0 / _periods(shape, shape.rope["rope_theta"] * stretch ** (dim / (dim - 2))), 1.0


def _yarn(shape: RopeShape) -> tuple[Tensor, float]:
    rope, dim = shape.rope, shape.rotary_dim
    base, original = rope["rope_theta"], rope["original_max_position_embeddings"]
    factor = rope.get("factor") or shape.max_positions / original

    def turns_at(num_turns: float) -> float:
        """The pair that turns so many times within the original length."""
        return (dim * math.log(original / (num_turns * 2 * math.pi))) / (2 * math.log(base))

    low, high = turns_at(rope.get("beta_fast") or 32), turns_at(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = (high - low) or 0.001
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)

    periods = _periods(shape, base)
    frequencies = 1.0 / (factor * periods) * (1 - kept) + 1.0 / periods * kept
    return frequencies, _yarn_attention_factor(rope, factor)


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    def of(strength: float) -> float:
        return 0.1 * strength * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return of(rope["mscale"]) / of(rope["mscale_all_dim"])
    return of(1.0)


def _longrope(shape: RopeShape) -> tuple[Tensor, float]:
    rope, original = shape.rope, shape.rope["original_max_position_embeddings"]
    factor = rope.get("factor") or shape.max_positions / original
    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    chosen = rope["long_factor"] if shape.max_model_len > original else rope["short_factor"]
    stretched = torch.tensor(chosen, dtype=torch.float32) * _periods(shape, rope["rope_theta"])
    return 1.0 / stretched, float(attention_factor)


def _llama3(shape: RopeShape) -> tuple[Tensor, float]:
    rope = shape.rope
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    original = rope["original_max_position_embeddings"]

    frequencies = _plain(shape)[0]
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / factor, frequencies)
    # between the two limits: a blend by how often the pair turns within the original length
    blend = (original / wavelengths - low) / (high - low)
    blended = (1 - blend) * scaled / factor + blend * scaled
    between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(between, blended, scaled), 1.0


SCALINGS: Mapping[str, Callable[[RopeShape], tuple[Tensor, float]]] = {
    "default": _plain,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}
