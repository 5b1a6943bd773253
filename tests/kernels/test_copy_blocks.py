"""Swaps of blocks between pools."""

import torch

from kernels.copy_blocks import copy_blocks


def test_blocks_arrive_whole_and_others_stay() -> None:
    """
    Every layer's keys and values of the named blocks are copied; no other block changes.
    """
    torch.manual_seed(0)
    source = [torch.randn(2, 6, 4, 2, 8) for _ in range(3)]
    target = [torch.zeros(2, 5, 4, 2, 8) for _ in range(3)]

    copy_blocks(source, target, torch.tensor([5, 1]), torch.tensor([0, 3]))

    for before, after in zip(source, target, strict=True):
        assert torch.equal(before[:, [5, 1]], after[:, [0, 3]])
        assert 0 == int(after[:, [1, 2, 4]].count_nonzero())
