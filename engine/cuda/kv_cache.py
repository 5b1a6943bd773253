"""Keys and values on a GPU, and the pinned memory that preempted sequences are swapped to."""

from collections.abc import Sequence

import torch

from engine.kv_cache import CacheShape, split_scales
from engine.request import BlockCopy
from kernels.cuda.copy_blocks import BlockSwapper


class CudaKVCache:
    """
    Keys and values of all blocks: per layer [2, num_blocks, num_kv_heads, block_size, head_dim], contiguous
    but for the scales behind each block of eight bits.

    The null block is zero and is never written; what else was not written may hold anything. On the
    host all of a block is one run of memory: [num_host_blocks, num_layers, 2, num_kv_heads,
    block_size, head_dim], or [num_host_blocks, num_layers, 2, part_bytes] with scales.

    `scales` are per layer [2, num_blocks, num_kv_heads, block_size], None of a dtype without.
    """

    def __init__(self, shape: CacheShape, device: torch.device) -> None:
        self.shape = shape
        block: tuple[int, ...] = (shape.num_kv_heads, shape.block_size, shape.head_dim)
        dtype = shape.dtype
        if shape.scaled:
            block, dtype = (shape.part_bytes,), torch.uint8
        self.pools = [
            torch.empty(2, shape.num_blocks, *block, dtype=dtype, device=device) for _ in range(shape.num_layers)
        ]
        for pool in self.pools:
            pool[:, 0] = 0
        self.layers = self.pools
        self.scales: list[torch.Tensor] | None = None
        if shape.scaled:
            parts = [split_scales(pool, shape, (shape.num_kv_heads, shape.block_size)) for pool in self.pools]
            self.layers, self.scales = [numbers for numbers, _ in parts], [scales for _, scales in parts]
        self._host_pool: torch.Tensor | None = None
        if shape.num_host_blocks:
            self._host_pool = torch.empty(
                shape.num_host_blocks, shape.num_layers, 2, *block, dtype=dtype, pin_memory=device.type == "cuda"
            )
            self._swapper = BlockSwapper(self._host_pool[0].nbytes, device)

    def swap(self, swap_out: Sequence[BlockCopy], swap_in: Sequence[BlockCopy]) -> None:
        """Queue the copies of a step, those to the host first."""
        if self._host_pool is None:
            assert not swap_out, "there is no host pool"
            assert not swap_in, "there is no host pool"
            return
        if swap_out:
            self._swapper.swap_out(self.pools, self._host_pool, *_block_ids(swap_out))
        if swap_in:
            self._swapper.swap_in(self.pools, self._host_pool, *_block_ids(swap_in))


def _block_ids(copies: Sequence[BlockCopy]) -> tuple[list[int], list[int]]:
    return [copy.device_block for copy in copies], [copy.host_block for copy in copies]
