"""Decodes whose newest tokens are neither rotated nor stored."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support.paged import PagedBatch, paged_batch

Inputs = tuple[Tensor, tuple[Tensor, Tensor], Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class NewestCase:
    """
    One call of `rotate_and_attend`; each sequence's last token is NaN in the cache.

    Args:
        batch: The sequences, the newest tokens counted among them.
        qkv, rotation, slot_mapping: As `rotate_and_attend` takes them.
    """

    batch: PagedBatch
    qkv: Tensor
    rotation: tuple[Tensor, Tensor]
    slot_mapping: Tensor
    num_heads: int
    scale: float

    @property
    def kv_cache(self) -> Tensor:
        return self.batch.kv_cache

    def inputs(self, kv_cache: Tensor) -> Inputs:
        """A copy of the rows, and what else stands before the plan, with another cache."""
        return self.qkv.clone(), self.rotation, self.slot_mapping, kv_cache

    @property
    def query(self) -> Tensor:
        """The queries, where they lie in the rows."""
        return self.qkv.view(len(self.qkv), -1, self.kv_cache.shape[4])[:, : self.num_heads]


def newest_case(
    seq_lens: list[int],
    num_kv_heads: int,
    group_size: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> NewestCase:
    """Normal queries, keys and values, and any angles, in rows of a table of both."""
    torch.manual_seed(0)
    batch = paged_batch(
        seq_lens, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype, device=device
    )
    last = (batch.seq_lens - 1).long()
    blocks = batch.block_tables[batch.slots.long(), last // block_size].long()
    batch.kv_cache[:, blocks, :, last % block_size] = torch.nan
    num_heads = num_kv_heads * group_size
    qkv = torch.randn(len(seq_lens), (num_heads + 2 * num_kv_heads) * head_dim).to(device, dtype)
    angles = torch.rand(len(seq_lens), 1, head_dim // 2) * 50
    table = torch.cat([angles.cos(), angles.cos(), -angles.sin(), angles.sin()], dim=-1).to(device)
    cos, sin = table.tensor_split(2, dim=-1)
    slot_mapping = blocks * block_size + last % block_size
    return NewestCase(batch, qkv, (cos, sin), slot_mapping, num_heads, head_dim**-0.5)
