"""Inputs and float64 truths of the norms, the rotation with its cache write, the gate and the gather of pages."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.fp8_kv import as_bytes, dequantise_kv
from kernels.rope import HeadNorms
from tests.support.numerics import TOLERANCES, assert_near

EPS = 1e-5
FLOAT8 = torch.float8_e4m3fn


def cut_off(dtype: torch.dtype, num_casts: int) -> float:
    """The tolerance under Triton's interpreter, which cuts bfloat16 off where a GPU rounds, at every cast."""
    return TOLERANCES[dtype] * (num_casts if dtype == torch.bfloat16 else 1)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    """Root mean square norm in float64."""
    wide = x.double()
    return wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.double()


def gated(gate_up: Tensor) -> Tensor:
    """SiLU of the first half of each row times the second, in float64."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return F.silu(gate) * up


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeCase:
    """One call of `rope_and_store`, and what must come of it."""

    dtype: torch.dtype
    num_tokens: int = 5
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    rotary_dim: int = 64
    block_size: int = 4
    has_norms: bool = False
    num_blocks: int = 40
    device: str = "cpu"
    cache_dtype: torch.dtype | None = None
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    @property
    def width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def norms(self) -> HeadNorms | None:
        if not self.has_norms:
            return None
        return HeadNorms(self.random(self.head_dim), self.random(self.head_dim), EPS)

    def rotation(self) -> tuple[Tensor, Tensor]:
        """Cosines twice over; sines negated, then plain."""
        angles = torch.rand(self.num_tokens, 1, self.rotary_dim // 2, generator=self.generator) * 50
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([cos, cos], dim=-1).to(self.device), torch.cat([-sin, sin], dim=-1).to(self.device)

    def slot_mapping(self) -> Tensor:
        """Scattered slots, the last of the pool among them; every third token has none."""
        num_slots = self.num_blocks * self.block_size
        places = torch.randperm(num_slots - self.block_size - 1, generator=self.generator)[: self.num_tokens]
        slots = places + self.block_size
        slots[1::3] = -1
        slots[-1] = num_slots - 1
        return slots.to(self.device)

    def kv_cache(self) -> Tensor:
        shape = (2, self.num_blocks, self.num_kv_heads, self.block_size, self.head_dim)
        return torch.full(shape, torch.nan, device=self.device).to(self.cache_dtype or self.dtype)

    def kv_scales(self) -> Tensor | None:
        if self.cache_dtype != FLOAT8:
            return None
        shape = (2, self.num_blocks, self.num_kv_heads, self.block_size)
        return torch.full(shape, torch.nan, device=self.device)

    def expected(self, qkv: Tensor, rotation: tuple[Tensor, Tensor], norms: HeadNorms | None) -> Tensor:
        """Queries and keys in float64, [num_tokens, num_heads + num_kv_heads, head_dim]."""
        num_rotated = self.num_heads + self.num_kv_heads
        heads = qkv.reshape(self.num_tokens, -1, self.head_dim)[:, :num_rotated].double()
        if norms is not None:
            parts = heads.split([self.num_heads, self.num_kv_heads], dim=1)
            heads = torch.cat([normed(part, w) for part, w in zip(parts, (norms.query, norms.key), strict=True)], dim=1)
        half = self.rotary_dim // 2
        cos, sin = (x.double() for x in (rotation[0][..., :half], rotation[1][..., half:]))
        first, second, rest = heads.tensor_split([half, 2 * half], dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def assert_stored(slots: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, kv_scales: Tensor | None) -> None:
    """The cache holds the tokens' keys and values in their slots, and nothing elsewhere."""
    block_size = kv_cache.shape[3]
    written = slots >= 0
    blocks, offsets = slots[written] // block_size, slots[written] % block_size
    wide = kv_cache.double()
    if kv_scales is not None:
        wide = wide * kv_scales[..., None].double()
    for part, rows in enumerate((key[written], value[written])):
        stored = wide[part, blocks, :, offsets]
        if kv_scales is None:
            assert torch.equal(rows.double(), stored)
            continue
        largest = rows.double().abs().amax(-1)
        scales = kv_scales[part, blocks, :, offsets]
        torch.testing.assert_close((largest / 448).clamp(min=1e-12).float(), scales, rtol=1e-6, atol=0)
        # half a step of 32, in which float8 is spaced up to its largest, 448
        fits = (stored - rows.double()).abs() <= largest[..., None] * (16.001 / 448)
        assert bool(fits.all())
    assert 2 * int(written.sum()) == int((~wide.isnan().any(dim=(2, 4))).sum())


def assert_attended_as_stored(
    slots: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, kv_scales: Tensor, tolerance: float = 0.0
) -> None:
    """Fresh keys and values have the bits that a gather from the cache of eight bits gives."""
    block_size = kv_cache.shape[3]
    written = slots >= 0
    blocks, offsets = slots[written] // block_size, slots[written] % block_size
    for part, rows in enumerate((key[written], value[written])):
        stored = as_bytes(kv_cache)[part, blocks, :, offsets].view(kv_cache.dtype)
        expected = dequantise_kv(stored, kv_scales[part, blocks, :, offsets], rows.dtype)
        torch.testing.assert_close(expected, rows, rtol=tolerance, atol=0)


def assert_gathered(expected: list[Tensor], actual: Tensor) -> None:
    """`actual` is the sequences' rows end to end, bit by bit."""
    assert actual.is_contiguous()
    rows = torch.cat(expected)
    assert_near(rows.double(), actual)
    assert torch.equal(rows, actual)
