"""
The tensors behind the blocks, and how many blocks fit.

Numbers of eight bits have scales, one for each token and head. They lie in the same memory, behind
the keys or the values of their block, so that whoever moves a block moves its scales too.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import NotEnoughMemory
from engine.model.config import ModelConfig

# what follows a block's scales begins at a multiple of it: whole sectors of a GPU's memory
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """
    What was found to fit.

    Args:
        num_blocks: Blocks of the device pool; block 0, the null block, is one of them.
        num_host_blocks: Blocks of the host pool, for sequences that are swapped out.
        dtype: Of keys and values; those of eight bits have scales.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    num_host_blocks: int
    dtype: torch.dtype

    @classmethod
    def fit(
        cls,
        config: ModelConfig,
        *,
        block_size: int,
        dtype: torch.dtype,
        cache_bytes: int,
        host_bytes: int,
        max_model_len: int,
    ) -> "CacheShape":
        """
        Make as many blocks as the memory holds.

        Raises:
            NotEnoughMemory: one sequence of max_model_len would not fit.
        """
        block_bytes = bytes_per_block(config, block_size=block_size, dtype=dtype)
        # the null block holds no token
        usable = cache_bytes // block_bytes - 1
        needed = -(-max_model_len // block_size)
        if usable < needed:
            raise NotEnoughMemory(
                f"the KV cache of {cache_bytes / 2**20:,.0f} MiB holds {max(0, usable) * block_size:,} tokens, and one "
                f"sequence of max_model_len {max_model_len:,} needs {(needed + 1) * block_bytes / 2**20:,.0f} MiB: "
                f"raise kv_cache_bytes, or lower max_model_len"
            )
        return cls(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=block_size,
            num_blocks=usable + 1,
            num_host_blocks=host_bytes // block_bytes,
            dtype=dtype,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens that the device pool holds."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def scaled(self) -> bool:
        """Whether each token and head has a scale."""
        return self.dtype.itemsize == 1

    @property
    def part_bytes(self) -> int:
        """Keys, or values, of a block in one layer."""
        return _part_bytes(self.num_kv_heads * self.block_size, self.head_dim, self.dtype)


def bytes_per_block(config: ModelConfig, *, block_size: int, dtype: torch.dtype) -> int:
    """Keys and values of one block in all layers, and their scales where they have eight bits."""
    return 2 * config.num_layers * _part_bytes(config.num_kv_heads * block_size, config.head_dim, dtype)


def split_scales(pool: Tensor, shape: CacheShape, order: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """
    The numbers and the scales of a pool that has both.

    Args:
        pool: [2, num_blocks, part_bytes] uint8.
        order: Heads and tokens of a block, or tokens and heads, as they lie in memory.

    Returns:
        Views of it: [2, num_blocks, *order, head_dim] of the cache's dtype, [2, num_blocks, *order] float32.
    """
    heads, num_scales = (2, pool.shape[1], *order), order[0] * order[1]
    end = num_scales * shape.head_dim
    numbers = pool[..., :end].view(shape.dtype).view(*heads, shape.head_dim)
    return numbers, pool[..., end : end + 4 * num_scales].view(torch.float32).view(heads)


class KVCache:
    """
    Keys and values of all blocks: per layer [2, num_blocks, num_kv_heads, block_size, head_dim].

    On a CPU the memory runs token by token, [2, num_blocks, block_size, num_kv_heads, head_dim]:
    a block is one run, and blocks that are gathered end to end are a sequence's keys as SDPA
    reads them. The null block is zero and is never written; what else was not written may hold anything.

    `scales` are per layer [2, num_blocks, num_kv_heads, block_size], None of a dtype without.
    `pools` and `host_pools` are the memory itself, [2, num_blocks, ...]: what is copied in a swap.
    """

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self.pools = [_pool(shape, shape.num_blocks) for _ in range(shape.num_layers)]
        self.host_pools = [_pool(shape, shape.num_host_blocks) for _ in range(shape.num_layers)]
        self.scales: list[Tensor] | None = None
        layers = self.pools
        if shape.scaled:
            parts = [split_scales(pool, shape, (shape.block_size, shape.num_kv_heads)) for pool in self.pools]
            layers = [numbers for numbers, _ in parts]
            self.scales = [scales.transpose(2, 3) for _, scales in parts]
        self.layers = [layer.transpose(2, 3) for layer in layers]


def _part_bytes(num_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    num_bytes = num_heads * head_dim * dtype.itemsize
    if dtype.itemsize > 1:
        return num_bytes
    num_bytes += 4 * num_heads
    return num_bytes + -num_bytes % _ALIGNMENT


def _pool(shape: CacheShape, num_blocks: int) -> Tensor:
    # not filled: the system gives pages as they are first written, so an idle worker stays small
    if shape.scaled:
        pool = torch.empty(2, num_blocks, shape.part_bytes, dtype=torch.uint8)
    else:
        pool = torch.empty(2, num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim, dtype=shape.dtype)
    pool[:, :1] = 0
    return pool
