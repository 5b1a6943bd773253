"""Copies of whole KV blocks between two pools: swap out, swap in."""

from collections.abc import Sequence

import torch
from torch import Tensor


def copy_blocks(
    source: Sequence[Tensor], target: Sequence[Tensor], source_blocks: Tensor, target_blocks: Tensor
) -> None:
    """
    Copy blocks from one pool to places in another, layer by layer.

    Args:
        source: Per layer [2, num_blocks, ...], each block one run of memory.
        target: The same with its own number of blocks, maybe on another device.
        source_blocks: [num_copies] int64.
        target_blocks: [num_copies] int64, all different.

    Beside a GPU, a side in host memory is pinned; `kernels.cuda.copy_blocks.BlockSwapper` moves many blocks faster.
    """
    if source[0].is_cuda or target[0].is_cuda:
        from kernels.cuda.copy_blocks import copy_blocks_triton

        copy_blocks_triton(source, target, source_blocks, target_blocks)
        return
    copy_blocks_reference(source, target, source_blocks, target_blocks)


def copy_blocks_reference(
    source: Sequence[Tensor], target: Sequence[Tensor], source_blocks: Tensor, target_blocks: Tensor
) -> None:
    for source_layer, target_layer in zip(source, target, strict=True):
        rows = torch.index_select(source_layer, 1, source_blocks.to(source_layer.device))
        target_layer.index_copy_(1, target_blocks.to(target_layer.device), rows.to(target_layer.device))
