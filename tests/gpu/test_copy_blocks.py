"""Swaps of blocks between the card and pinned memory."""

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.copy_blocks import copy_blocks
from kernels.cuda.copy_blocks import BlockSwapper

NUM_LAYERS, SHAPE = 4, (8, 16, 128)


def make_layers(num_blocks: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(2, num_blocks, *SHAPE, device="cuda").to(dtype) for _ in range(NUM_LAYERS)]


def make_host_pool(num_blocks: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(num_blocks, NUM_LAYERS, 2, *SHAPE, dtype=dtype, pin_memory=True)


def bits(x: Tensor) -> Tensor:
    """On the CPU, and comparable whatever the dtype."""
    return x.cpu().contiguous().view(torch.int8)


def block_bytes(layers: list[Tensor]) -> int:
    return NUM_LAYERS * 2 * layers[0][0, 0].nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("blocks_per_round", [1, 7, 1000])
def test_swapped_blocks_come_back_elsewhere(dtype: torch.dtype, blocks_per_round: int) -> None:
    """
    Blocks go out and come back to other blocks bit by bit, in one round or in more than ids are staged for.
    """
    rng = np.random.default_rng(0)
    layers, host_pool = make_layers(300, dtype), make_host_pool(150, dtype)
    before = [bits(layer) for layer in layers]
    swapper = BlockSwapper(block_bytes(layers), torch.device("cuda", 0), block_bytes(layers) * blocks_per_round)
    sources, places, targets = rng.permutation(300)[:100], rng.permutation(150)[:100], rng.permutation(300)[:100]

    swapper.swap_out(layers, host_pool, sources, places)
    torch.cuda.synchronize()
    for number, old in enumerate(before):
        assert torch.equal(old[:, sources], bits(host_pool)[places, number].transpose(0, 1))
    for layer in layers:
        layer.zero_()
    swapper.swap_in(layers, host_pool, targets.tolist(), places.tolist())

    others = np.setdiff1d(np.arange(300), targets)
    for old, layer in zip(before, layers, strict=True):
        new = bits(layer)
        assert torch.equal(old[:, sources], new[:, targets])
        assert 0 == int(new[:, others].count_nonzero())


def test_calls_on_two_streams_do_not_meet_in_the_buffer() -> None:
    """
    A call waits on the device for the one before, on whatever stream that was.
    """
    layers, host_pool = make_layers(64, torch.bfloat16), make_host_pool(64, torch.bfloat16)
    swapper = BlockSwapper(block_bytes(layers), torch.device("cuda", 0), block_bytes(layers) * 4)
    torch.cuda.synchronize()

    with torch.cuda.stream(torch.cuda.Stream()):
        swapper.swap_out(layers, host_pool, range(32), range(32))
    with torch.cuda.stream(torch.cuda.Stream()):
        swapper.swap_out(layers, host_pool, range(32, 64), range(32, 64))
    torch.cuda.synchronize()

    for number, layer in enumerate(layers):
        assert torch.equal(bits(layer), bits(host_pool[:, number].transpose(0, 1)))


@pytest.mark.parametrize("source_side", ["cuda", "pinned"])
@pytest.mark.parametrize("target_side", ["cuda", "pinned"])
def test_blocks_arrive_whole_and_others_stay(source_side: str, target_side: str) -> None:
    """
    Pools layer by layer, each on the card or in pinned memory.
    """
    if source_side == target_side == "pinned":
        pytest.skip("the copy of two pools in host memory is the reference's")

    def make(values: Tensor, side: str) -> Tensor:
        return values.cuda() if side == "cuda" else values.pin_memory()

    source = [make(torch.randn(2, 9, *SHAPE), source_side) for _ in range(NUM_LAYERS)]
    target = [make(torch.zeros(2, 7, *SHAPE), target_side) for _ in range(NUM_LAYERS)]

    copy_blocks(source, target, torch.tensor([8, 1, 3]), torch.tensor([0, 6, 2]))
    torch.cuda.synchronize()

    for before, after in zip(source, target, strict=True):
        assert torch.equal(before.cpu()[:, [8, 1, 3]], after.cpu()[:, [0, 6, 2]])
        assert 0 == int(after[:, [1, 3, 4, 5]].count_nonzero())


def test_memory_that_is_not_pinned_is_refused() -> None:
    """
    Pageable memory would make every copy wait, or be out of a kernel's reach.
    """
    layers = make_layers(4, torch.float32)
    swapper = BlockSwapper(block_bytes(layers), torch.device("cuda", 0))

    with pytest.raises(AssertionError, match="pinned"):
        swapper.swap_out(layers, torch.zeros(4, NUM_LAYERS, 2, *SHAPE), [1], [1])
    with pytest.raises(AssertionError, match="pinned"):
        copy_blocks(layers, [layer.cpu() for layer in layers], torch.tensor([1]), torch.tensor([1]))
