"""Rotation, head norms and the cache write, against plain float64."""

import pytest
import torch
from torch import Tensor

from kernels.fp8_kv import dequantise_kv, quantise_kv
from kernels.rope import HeadNorms, rope_and_store
from tests.support.numerics import assert_near

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 16, 4


def make_cache(dtype: torch.dtype) -> Tensor:
    return torch.full((2, 6, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM), torch.nan, dtype=dtype).transpose(2, 3)


def make_angles(num_tokens: int, rotary_dim: int = HEAD_DIM) -> Tensor:
    return torch.rand(num_tokens, rotary_dim // 2) * 50


def spread(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Angles as the kernel reads them: cosines twice over, sines negated and then plain."""
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], dim=-1)[:, None], torch.cat([-sin, sin], dim=-1)[:, None]


def rotate(head: Tensor, angles: Tensor) -> Tensor:
    """One head, pair by pair."""
    half = len(angles)
    out = head.double().clone()
    for pair in range(half):
        cos, sin = angles[pair].cos().double(), angles[pair].sin().double()
        first, second = head[pair].double(), head[half + pair].double()
        out[pair] = first * cos - second * sin
        out[half + pair] = second * cos + first * sin
    return out


def norm(head: Tensor, weight: Tensor) -> Tensor:
    return head.double() / torch.sqrt(head.double().square().mean() + 1e-6) * weight.double()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rotary_dim", [HEAD_DIM, HEAD_DIM // 2])
@pytest.mark.parametrize("normed", [False, True])
def test_queries_and_keys_are_normed_and_rotated(dtype: torch.dtype, rotary_dim: int, normed: bool) -> None:
    """
    Each head is normed if it has a norm, then turned by its token's angles.
    """
    torch.manual_seed(0)
    heads = torch.randn(5, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM, dtype=dtype)
    angles = make_angles(5, rotary_dim)
    weights = torch.rand(HEAD_DIM, dtype=dtype), torch.rand(HEAD_DIM, dtype=dtype)
    before = heads.clone()

    query, key, value = rope_and_store(
        heads.view(5, -1),
        spread(angles),
        torch.tensor([4, 5, 6, 20, 9]),
        make_cache(dtype),
        NUM_HEADS,
        HeadNorms(*weights, eps=1e-6) if normed else None,
    )

    num_rotated = NUM_HEADS + NUM_KV_HEADS
    expected = torch.empty(5, num_rotated, HEAD_DIM, dtype=torch.float64)
    for token in range(5):
        for head in range(num_rotated):
            plain = before[token, head]
            plain = norm(plain, weights[head >= NUM_HEADS]) if normed else plain
            expected[token, head] = rotate(plain, angles[token])
    assert_near(expected, torch.cat([query, key], dim=1))
    assert torch.equal(before[:, num_rotated:], value)


def test_keys_and_values_go_to_their_slots_and_nowhere_else() -> None:
    """
    A slot holds its token's rotated key and its value; slot -1 writes nothing.
    """
    torch.manual_seed(1)
    kv_cache = make_cache(torch.float32)
    qkv = torch.randn(4, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    slots = [21, -1, 6, 7]

    _, key, value = rope_and_store(qkv, spread(make_angles(4)), torch.tensor(slots), kv_cache, NUM_HEADS)

    for token, slot in enumerate(slots):
        if slot >= 0:
            block, offset = divmod(slot, BLOCK_SIZE)
            assert torch.equal(key[token], kv_cache[0, block, :, offset])
            assert torch.equal(value[token], kv_cache[1, block, :, offset])
    written = ~kv_cache.isnan().any(dim=(2, 4))
    assert 2 * 3 == int(written.sum())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_cache_of_eight_bits_rounds_in_place_too(dtype: torch.dtype) -> None:
    """
    Keys and values that are attended fresh are those that the cache gives back; queries stay.
    """
    torch.manual_seed(0)
    qkv, rotation = torch.randn(4, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, dtype=dtype), spread(make_angles(4))
    slots = torch.tensor([5, -1, 22, 11])
    plain = rope_and_store(qkv.clone(), rotation, slots, make_cache(dtype), NUM_HEADS)
    kv_cache = make_cache(torch.float32).to(torch.float8_e4m3fn)
    kv_scales = torch.full(kv_cache.shape[:4], torch.nan)

    query, *fresh = rope_and_store(qkv, rotation, slots, kv_cache, NUM_HEADS, kv_scales=kv_scales)

    assert torch.equal(plain[0], query)
    for part, (before, after) in enumerate(zip(plain[1:], fresh, strict=True)):
        stored, scales = quantise_kv(before)
        assert torch.equal(dequantise_kv(stored, scales, dtype), after)
        for token in (0, 2, 3):
            block, offset = divmod(int(slots[token]), BLOCK_SIZE)
            assert torch.equal(stored[token].float(), kv_cache[part, block, :, offset].float())
            assert torch.equal(scales[token], kv_scales[part, block, :, offset])
    assert 3 * 2 * NUM_KV_HEADS == int((~kv_scales.isnan()).sum())
