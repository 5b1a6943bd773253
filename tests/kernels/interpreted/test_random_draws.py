"""The device functions give the reference's integers bit for bit, and its noise to the last places."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import random_draws
from kernels.cuda.random_draws import gumbel_of, natural_log, position_keys, random_bits, uniform_draws

N = 4096


@triton.jit
def _draws_kernel(streams_ptr, position, first_id, bits_ptr, draws_ptr, noise_ptr, N: tl.constexpr):
    key_0, key_1 = position_keys(tl.load(streams_ptr), tl.load(streams_ptr + 1), tl.load(position))
    ids = first_id + tl.arange(0, N)
    tl.store(bits_ptr + tl.arange(0, N), random_bits(key_0, key_1, ids).to(tl.int32, bitcast=True))
    draws = uniform_draws(key_0, key_1, ids)
    tl.store(draws_ptr + tl.arange(0, N), draws)
    tl.store(noise_ptr + tl.arange(0, N), gumbel_of(draws))


@triton.jit
def _math_kernel(x_ptr, log_ptr, noise_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.store(log_ptr + tl.arange(0, N), natural_log(x))
    tl.store(noise_ptr + tl.arange(0, N), gumbel_of(x))


def _run(seed: int, position: int, first_id: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    stream = torch.tensor([random_draws.stream_words(seed, 0)], dtype=torch.int32)
    place = torch.tensor([position], dtype=torch.int32)
    bits = torch.zeros(N, dtype=torch.int32)
    draws, noise = torch.full((N,), torch.nan), torch.full((N,), torch.nan)
    _draws_kernel[(1,)](stream, place, first_id, bits, draws, noise, N=N)
    return random_draws.draw_keys(stream, place)[0], bits, draws, noise


@pytest.mark.parametrize(("seed", "position", "first_id"), [(0, 0, 0), (7, 1, 148_000), (2**63 + 11, 2**31 - 1, 4096)])
def test_draws_are_those_of_the_reference(seed: int, position: int, first_id: int) -> None:
    """
    Keys, bits and uniform draws are equal; the noise is off by no more than a logarithm's rounding.
    """
    key, bits, draws, noise = _run(seed, position, first_id)
    ids = torch.arange(first_id, first_id + N, dtype=torch.int32)

    assert torch.equal(random_draws.random_bits(key, ids), bits)
    assert torch.equal(random_draws.uniform_draws(key, ids), draws)
    torch.testing.assert_close(random_draws.gumbel_noise(key, ids), noise, rtol=3e-7, atol=3e-7)


def test_logarithms_keep_their_digits_at_both_ends() -> None:
    """
    Near 1 and near 0 the logarithm and the noise are good to some 2**-22 relative to themselves.
    """
    small = 2.0 ** torch.linspace(-32, -1, N // 2)
    x = torch.cat([small, (1 - small).clamp(max=1 - 2.0**-24)])
    logs, noise = torch.full((N,), torch.nan), torch.full((N,), torch.nan)

    _math_kernel[(1,)](x, logs, noise, N=N)

    torch.testing.assert_close(x.double().log(), logs.double(), rtol=2.5e-7, atol=0)
    truth = -(-torch.log1p(-x.double())).log()
    torch.testing.assert_close(truth, noise.double(), rtol=2.5e-7, atol=2.5e-7)
