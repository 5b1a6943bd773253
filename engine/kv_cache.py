"""The tensors behind the blocks, and how many blocks fit."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import NotEnoughMemory
from engine.model.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """
    What was found to fit.

    Args:
        num_blocks: Blocks of the device pool; block 0, the null block, is one of them.
        num_host_blocks: Blocks of the host pool, for sequences that are swapped out.
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


def bytes_per_block(config: ModelConfig, *, block_size: int, dtype: torch.dtype) -> int:
    """Keys and values of one block in all layers."""
    return 2 * config.num_layers * config.num_kv_heads * block_size * config.head_dim * dtype.itemsize


class KVCache:
    """
    Keys and values of all blocks: per layer [2, num_blocks, num_kv_heads, block_size, head_dim].

    On a CPU the memory runs token by token, [2, num_blocks, block_size, num_kv_heads, head_dim]:
    a block is one run, and blocks that are gathered end to end are a sequence's keys as SDPA
    reads them. The null block is zero and is never written; what else was not written may hold anything.
    """

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self.layers = [_pool(shape, shape.num_blocks) for _ in range(shape.num_layers)]
        self.host_layers = [_pool(shape, shape.num_host_blocks) for _ in range(shape.num_layers)]


def _pool(shape: CacheShape, num_blocks: int) -> Tensor:
    # not filled: the system gives pages as they are first written, so an idle worker stays small
    pool = torch.empty(2, num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim, dtype=shape.dtype)
    pool[:, :1] = 0
    return pool.transpose(2, 3)
