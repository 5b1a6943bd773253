"""
Random numbers that are a function of their name: (seed, answer, position, token id).

Nothing is carried from draw to draw, so a token's noise is the same whatever rows are
beside it, whichever step computes it, and on whichever device. The integers come from
32-bit multiply and xor-shift rounds; int32 in torch wraps as uint32 does elsewhere, so that
all agree bit for bit. The logarithms after them may differ in the last place. The CUDA twin is a
set of device functions (kernels/cuda/random_draws.py), part of the kernels that draw.

Source: the rounds and constants of lowbias32 (C. Wellons, "Prospecting for hash functions",
2018) with key words added between them; the seed is spread as in SplitMix64 (Steele, Lea,
Flood 2014, doi:10.1145/2660193.2660195).
"""

import numpy as np
import torch
from torch import Tensor

_MASK_32 = (1 << 32) - 1
_MASK_64 = (1 << 64) - 1
_GOLDEN_64 = 0x9E3779B97F4A7C15


def _signed(word: int) -> int:
    """The int32 that has the bits of a uint32."""
    return word - (1 << 32) if word >= 1 << 31 else word


ODD_A = _signed(0x9E3779B1)
ODD_B = _signed(0x85EBCA77)
MULTIPLY_A = _signed(0x7FEB352D)
MULTIPLY_B = _signed(0x846CA68B)

# the step from 31 random bits to the open interval: (2**31 - 1) rounds up to 2**31 in
# float32, which this takes to 1 - 2**-24, and 0 becomes 2**-32 by the half step added
UNIT = (1 - 2.0**-24) / 2**31


def stream_words(seed: int, index: int) -> tuple[int, int]:
    """
    Name the random stream of one answer by two int32 words.

    Args:
        seed: The request's seed; its low 64 bits count.
        index: Which of the request's answers; each has a stream of its own.
    """
    word = seed & _MASK_64
    for addend in (_GOLDEN_64, index + 1):
        word = (word + addend * _GOLDEN_64) & _MASK_64
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK_64
        word ^= word >> 31
    return _signed(word & _MASK_32), _signed(word >> 32)


def draw_keys(streams: Tensor, positions: Tensor) -> Tensor:
    """
    Name the draws of one position in each stream.

    Args:
        streams: [rows, 2] int32, from `stream_words`.
        positions: [rows] int32, the place of the token in its answer, from 0.

    Returns:
        [rows, 2] int32.
    """
    places = positions.to(torch.int32)
    first = _mix(streams[:, 0] + places * ODD_A)
    second = _mix((streams[:, 1] ^ (places * ODD_B)) + first)
    return torch.stack([first, second], dim=-1)


def random_bits(keys: Tensor, token_ids: Tensor) -> Tensor:
    """
    Hash each token id with its key to 32 random bits.

    Args:
        keys: [..., 2] int32, from `draw_keys`.
        token_ids: [..., n] int32, broadcast against keys[..., 0].

    Returns:
        int32 of the broadcast shape.
    """
    pick = random_bits_cpu if token_ids.device.type == "cpu" else random_bits_reference
    return pick(keys, token_ids)


def random_bits_reference(keys: Tensor, token_ids: Tensor) -> Tensor:
    bits = token_ids * ODD_A + keys[..., 0]
    bits ^= (bits >> 16) & 0xFFFF
    bits *= MULTIPLY_A
    bits ^= (bits >> 15) & 0x1FFFF
    bits += keys[..., 1]
    bits *= MULTIPLY_B
    return bits ^ ((bits >> 16) & 0xFFFF)


def random_bits_cpu(keys: Tensor, token_ids: Tensor) -> Tensor:
    # numpy has unsigned shifts, torch has to mask signed ones: 70 us a row of 49,152 to its 155
    words, ids = keys.numpy().view(np.uint32), token_ids.numpy().view(np.uint32)
    bits = ids * np.uint32(ODD_A & _MASK_32) + words[..., 0]
    bits ^= bits >> np.uint32(16)
    bits *= np.uint32(MULTIPLY_A & _MASK_32)
    bits ^= bits >> np.uint32(15)
    bits += words[..., 1]
    bits *= np.uint32(MULTIPLY_B & _MASK_32)
    bits ^= bits >> np.uint32(16)
    return torch.from_numpy(bits.view(np.int32))


def uniform_draws(keys: Tensor, token_ids: Tensor) -> Tensor:
    """
    Draw from the open interval (0, 1), finest near 0: 2**-32 to 1 - 2**-24.

    Arguments as in `random_bits`; returns float32.
    """
    # 31 bits: the sign bit of an int32 would have to be undone first
    draws = (random_bits(keys, token_ids) & 0x7FFFFFFF).to(torch.float32)
    return draws.mul_(UNIT).add_(UNIT / 2)


def gumbel_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """
    Draw standard Gumbel noise: the argmax of logits + noise is a draw from their softmax.

    Arguments as in `random_bits`; returns float32 between -2.9 and 22.2.
    """
    # -log(-log(u)) with u = 1 - draw: large noise decides, and there the draws are finest
    return uniform_draws(keys, token_ids).neg_().log1p_().neg_().log_().neg_()


def _mix(word: Tensor) -> Tensor:
    """Spread every input bit over the whole int32; one to one."""
    word = word ^ ((word >> 16) & 0xFFFF)
    word = word * MULTIPLY_A
    word = word ^ ((word >> 15) & 0x1FFFF)
    word = word * MULTIPLY_B
    return word ^ ((word >> 16) & 0xFFFF)
