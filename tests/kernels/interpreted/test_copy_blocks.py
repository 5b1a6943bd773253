"""Copies of blocks between pools, in Triton's interpreter."""

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cuda.copy_blocks import WORDS, BlockSwapper, copy_blocks_triton, runs

NUM_LAYERS = 3
CPU = torch.device("cpu")


def make_layers(num_blocks: int, dtype: torch.dtype, head_dim: int = 8) -> list[Tensor]:
    return [torch.randn(2, num_blocks, 2, 4, head_dim).to(dtype) for _ in range(NUM_LAYERS)]


def make_swapper(layers: list[Tensor], blocks_per_round: int) -> BlockSwapper:
    block_bytes = NUM_LAYERS * 2 * layers[0][0, 0].nbytes
    # and a part of one more, which does not fit
    return BlockSwapper(block_bytes, CPU, bounce_bytes=block_bytes * blocks_per_round + block_bytes // 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("head_dim", [8, 2 * WORDS // 4])
def test_blocks_arrive_whole_and_others_stay(dtype: torch.dtype, head_dim: int) -> None:
    """
    Every layer's keys and values of the named blocks are copied; no other block changes.
    """
    torch.manual_seed(0)
    source = make_layers(6, dtype, head_dim)
    target = [torch.zeros(2, 5, 2, 4, head_dim).to(dtype) for _ in range(NUM_LAYERS)]

    copy_blocks_triton(source, target, torch.tensor([5, 1]), torch.tensor([0, 3]))

    for before, after in zip(source, target, strict=True):
        assert torch.equal(before[:, [5, 1]].float(), after[:, [0, 3]].float())
        assert 0 == int(after[:, [1, 2, 4]].float().count_nonzero())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("blocks_per_round", [1, 2, 16])
def test_a_swapped_block_comes_back_elsewhere(dtype: torch.dtype, blocks_per_round: int) -> None:
    """
    Blocks go to the host's places block by block, and come back to other blocks bit by bit, in any number of rounds.
    """
    torch.manual_seed(1)
    layers = make_layers(12, dtype)
    before = [layer.clone() for layer in layers]
    host_pool = torch.full((9, NUM_LAYERS, 2, 2, 4, 8), -1.0).to(dtype)
    swapper = make_swapper(layers, blocks_per_round)

    swapper.swap_out(layers, host_pool, [3, 9, 1, 7, 2], [6, 0, 5, 7, 2])
    for layer in layers:
        layer.fill_(9)
    swapper.swap_in(layers, host_pool, np.array([4, 8, 11], dtype=np.int32), np.array([7, 0, 6], dtype=np.int32))

    for number, (old, new) in enumerate(zip(before, layers, strict=True)):
        assert torch.equal(old[:, [3, 9, 1, 7, 2]].float(), host_pool[[6, 0, 5, 7, 2], number].transpose(0, 1).float())
        assert torch.equal(old[:, [7, 9, 3]].float(), new[:, [4, 8, 11]].float())
        others = [block for block in range(12) if block not in (4, 8, 11)]
        assert [9.0] == new[:, others].float().unique().tolist()
    assert [-1.0] == host_pool[[1, 3, 4, 8]].float().unique().tolist()


def test_no_blocks_are_no_work() -> None:
    """
    Empty lists copy nothing.
    """
    layers = make_layers(2, torch.float16)
    host_pool = torch.zeros(2, NUM_LAYERS, 2, 2, 4, 8, dtype=torch.float16)

    make_swapper(layers, 4).swap_out(layers, host_pool, [], [])

    assert 0 == int(host_pool.count_nonzero())


def test_neighbours_in_the_host_pool_are_one_copy() -> None:
    """
    A run ends where an id is not the one before plus one.
    """
    assert [(0, 3, 4), (3, 4, 9), (4, 6, 12)] == list(runs(np.array([4, 5, 6, 9, 12, 13])))
    assert [(0, 1, 7)] == list(runs(np.array([7])))


def test_the_pointer_table_follows_the_layers() -> None:
    """
    A swapper that is given other layers copies from those.
    """
    first, second = make_layers(3, torch.float16), make_layers(3, torch.float16)
    host_pool = torch.zeros(2, NUM_LAYERS, 2, 2, 4, 8, dtype=torch.float16)
    swapper = make_swapper(first, 4)

    swapper.swap_out(first, host_pool, [1], [0])
    swapper.swap_out(second, host_pool, [1], [1])

    assert torch.equal(first[0][:, 1], host_pool[0, 0])
    assert torch.equal(second[0][:, 1], host_pool[1, 0])
