"""
The draws of kernels/random_draws.py as device functions, for kernels that need them in registers.

Integers equal those of the reference bit for bit. The logarithm is our own: the hardware's is
good to 2**-22 absolute, which near 1 leaves no digit, and there the large noise comes from.
"""

import triton
import triton.language as tl

from kernels import random_draws

_MASK_32 = 0xFFFFFFFF
ODD_A = tl.constexpr(random_draws.ODD_A & _MASK_32)
ODD_B = tl.constexpr(random_draws.ODD_B & _MASK_32)
MULTIPLY_A = tl.constexpr(random_draws.MULTIPLY_A & _MASK_32)
MULTIPLY_B = tl.constexpr(random_draws.MULTIPLY_B & _MASK_32)
UNIT = tl.constexpr(random_draws.UNIT)
HALF_UNIT = tl.constexpr(random_draws.UNIT / 2)

# 0.5 ** 0.5 as a float32's bits: mantissas are taken from there to twice that
_ROOT_HALF = tl.constexpr(0x3F3504F3)
# the high part has few enough bits that its product with an exponent is exact
_LN2_HIGH = tl.constexpr(0.693145751953125)
_LN2_LOW = tl.constexpr(1.4286068203094172e-06)


@triton.jit
def position_keys(stream_0, stream_1, position):
    """`draw_keys` of one stream's two int32 words; returns two uint32."""
    place = position.to(tl.uint32, bitcast=True)
    first = _mix(stream_0.to(tl.uint32, bitcast=True) + place * ODD_A)
    second = _mix((stream_1.to(tl.uint32, bitcast=True) ^ (place * ODD_B)) + first)
    return first, second


@triton.jit
def uniform_draws(key_0, key_1, token_ids):
    """Two uint32 keys and [n] int32 ids to [n] float32 in (0, 1)."""
    draws = (random_bits(key_0, key_1, token_ids) & 0x7FFFFFFF).to(tl.int32)
    return draws.to(tl.float32) * UNIT + HALF_UNIT


@triton.jit
def random_bits(key_0, key_1, token_ids):
    bits = token_ids.to(tl.uint32) * ODD_A + key_0
    bits = bits ^ (bits >> 16)
    bits = bits * MULTIPLY_A
    bits = bits ^ (bits >> 15)
    bits = bits + key_1
    bits = bits * MULTIPLY_B
    return bits ^ (bits >> 16)


@triton.jit
def gumbel_of(draws):
    """Standard Gumbel noise of uniform draws: -log(-log1p(-draw))."""
    # log1p by what rounding took from 1 - draw
    rest = 1.0 - draws
    lost = draws - (1.0 - rest)
    return -natural_log(tl.math.div_rn(lost, rest) - natural_log(rest))


@triton.jit
def natural_log(x):
    """Logarithm of normal positive float32, good to about the last place, near 1 too."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - _ROOT_HALF) >> 23
    f = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    # log(1 + f) = 2 atanh(z); with f split off, what is rounded is small beside it
    z = tl.math.div_rn(f, 2.0 + f)
    w = z * z
    series = w * (2.0 / 3 + w * (2.0 / 5 + w * (2.0 / 7 + w * (2.0 / 9 + w * (2.0 / 11)))))
    scale = exponent.to(tl.float32)
    return scale * _LN2_HIGH + ((f - z * (f - series)) + scale * _LN2_LOW)


@triton.jit
def _mix(word):
    word = word ^ (word >> 16)
    word = word * MULTIPLY_A
    word = word ^ (word >> 15)
    word = word * MULTIPLY_B
    return word ^ (word >> 16)
