"""
Copies of whole KV blocks on a GPU: between pools it can address, and to and from host memory.

A block of a layer is two pieces, keys and values, of a few tens of KB: too small for one DMA
each. Towards the host a kernel packs the pieces of many blocks into one buffer on the device,
block after block as the host pool holds them, and few large DMAs move that.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

# words of 8 bytes that a program copies: 4 wide loads a thread
WORDS = 1024
WORD_BYTES = 8
# of the buffer on the device that blocks pass through
BOUNCE_BYTES = 64 << 20

Ids = Sequence[int] | npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class _Pool:
    """
    Where the pieces lie: layer l's part p of block b at addresses[l] + (p * part + b * block) words.

    Args:
        addresses: [num_layers] int64, on the device that copies.
    """

    addresses: Tensor
    part: int
    block: int

    @classmethod
    def of(cls, layers: Sequence[Tensor], device: torch.device) -> "_Pool":
        first = layers[0]
        part, block = (stride * first.itemsize for stride in first.stride()[:2])
        assert block == first[0, 0].numel() * first.itemsize, "a block must be one run of memory"
        assert block % (2 * WORD_BYTES) == 0, "a block must be a multiple of 16 bytes"
        assert all(layer.stride() == first.stride() for layer in layers)
        addresses = torch.tensor([layer.data_ptr() for layer in layers], device=device)
        return cls(addresses, part // WORD_BYTES, block // WORD_BYTES)

    @classmethod
    def packed(cls, memory: Tensor, num_layers: int) -> "_Pool":
        """Of [num_blocks, words], each block's layers end to end: a layer's keys, then its values."""
        words = memory.shape[1]
        layer_bytes = words // num_layers * WORD_BYTES
        addresses = torch.arange(num_layers, device=memory.device) * layer_bytes + memory.data_ptr()
        return cls(addresses, words // num_layers // 2, words)


def copy_blocks_triton(
    source: Sequence[Tensor], target: Sequence[Tensor], source_blocks: Tensor, target_blocks: Tensor
) -> None:
    """
    See `kernels.copy_blocks.copy_blocks`. One side may be in pinned host memory.

    Piece by piece through the bus, which is right for a few blocks; `BlockSwapper` is for many.
    """
    assert len(source) == len(target)
    assert source[0].stride()[2:] == target[0].stride()[2:], "a block must be laid out alike in both pools"
    assert source[0].dtype == target[0].dtype
    device = source[0].device if source[0].is_cuda else target[0].device
    if device.type == "cuda":
        assert all(layer.is_cuda or layer.is_pinned() for layer in (*source, *target)), "the host's side must be pinned"
    _launch(
        _Pool.of(source, device),
        _Pool.of(target, device),
        source_blocks.to(device),
        target_blocks.to(device),
        len(source_blocks),
    )


class BlockSwapper:
    """
    Copies blocks of all layers to a pinned host pool and back.

    The host pool is one tensor, [num_host_blocks, num_layers, 2, num_kv_heads, block_size, head_dim],
    pinned and contiguous: all of a block is one run of memory, and neighbours are one DMA.
    The layers are [2, num_blocks, num_kv_heads, block_size, head_dim], contiguous.

    Both directions are queued on the current stream and return at once: blocks may be given away to
    later work on that stream, and the host may read its pool once the stream has come this far.
    One thread at a time.

    Args:
        block_bytes: Of one block in all layers.
        device: Of the layers.
        bounce_bytes: Of the buffer on the device that blocks pass through; at least one block's.
    """

    def __init__(self, block_bytes: int, device: torch.device, bounce_bytes: int = BOUNCE_BYTES) -> None:
        self._blocks_per_round = max(1, bounce_bytes // block_bytes)
        self._bounce = torch.empty(self._blocks_per_round, block_bytes // WORD_BYTES, dtype=torch.int64, device=device)
        self._uploads = _Uploads(self._blocks_per_round, device)
        self._layers: Sequence[Tensor] | None = None
        self._pools: tuple[_Pool, _Pool] | None = None
        self._done = torch.cuda.Event() if device.type == "cuda" else None

    def swap_out(self, layers: Sequence[Tensor], host_pool: Tensor, device_blocks: Ids, host_blocks: Ids) -> None:
        """
        Copy blocks of the layers to the host pool.

        Args:
            device_blocks: [num_copies].
            host_blocks: [num_copies], all different.
        """
        pool, packed = self._prepare(layers)
        words = self._words(host_pool)
        for device_ids, host_ids in self._rounds(device_blocks, host_blocks):
            _launch(pool, packed, self._uploads.upload(device_ids), None, len(device_ids))
            for start, end, first in runs(host_ids):
                words[first : first + end - start].copy_(self._bounce[start:end], non_blocking=True)
        self._finish()

    def swap_in(self, layers: Sequence[Tensor], host_pool: Tensor, device_blocks: Ids, host_blocks: Ids) -> None:
        """
        Copy blocks of the host pool to the layers.

        Args:
            device_blocks: [num_copies], all different.
            host_blocks: [num_copies].
        """
        pool, packed = self._prepare(layers)
        words = self._words(host_pool)
        for device_ids, host_ids in self._rounds(device_blocks, host_blocks):
            for start, end, first in runs(host_ids):
                self._bounce[start:end].copy_(words[first : first + end - start], non_blocking=True)
            _launch(packed, pool, None, self._uploads.upload(device_ids), len(device_ids))
        self._finish()

    def _prepare(self, layers: Sequence[Tensor]) -> tuple[_Pool, _Pool]:
        # the buffers are shared by all calls, whatever streams they come on
        if self._done is not None:
            self._done.wait()
        if self._pools is None or self._layers is not layers:
            device = self._bounce.device
            assert all(layer.is_contiguous() for layer in layers)
            pool, packed = _Pool.of(layers, device), _Pool.packed(self._bounce, len(layers))
            assert pool.block == packed.part, "block_bytes must be those of one block in all layers"
            self._layers, self._pools = layers, (pool, packed)
        return self._pools

    def _words(self, host_pool: Tensor) -> Tensor:
        # from memory that is not pinned the copies would wait for the device, one by one
        assert host_pool.is_pinned() or self._done is None, "the host pool must be pinned"
        return host_pool.view(len(host_pool), -1).view(torch.int64)

    def _rounds(self, device_blocks: Ids, host_blocks: Ids) -> Iterator[tuple[npt.NDArray[np.int64], ...]]:
        device_ids, host_ids = (np.asarray(ids, dtype=np.int64) for ids in (device_blocks, host_blocks))
        assert len(device_ids) == len(host_ids)
        # in the host's order, which makes the runs long
        order = host_ids.argsort(kind="stable")
        device_ids, host_ids = device_ids[order], host_ids[order]
        for start in range(0, len(order), self._blocks_per_round):
            part = slice(start, start + self._blocks_per_round)
            yield device_ids[part], host_ids[part]

    def _finish(self) -> None:
        if self._done is not None:
            self._done.record()


class _Uploads:
    """
    Brings block ids to the device without waiting for it.

    A ring of pinned rows: a row is written again once its last upload has left it.
    """

    def __init__(self, max_ids: int, device: torch.device, num_rows: int = 32) -> None:
        on_gpu = device.type == "cuda"
        self._host = torch.empty(num_rows, max_ids, dtype=torch.int64, pin_memory=on_gpu)
        self._device = torch.empty(num_rows, max_ids, dtype=torch.int64, device=device)
        self._left = [torch.cuda.Event() for _ in range(num_rows)] if on_gpu else []
        self._row = 0

    def upload(self, ids: npt.NDArray[np.int64]) -> Tensor:
        """Ids on the device; good for work that is queued before as many uploads more as there are rows."""
        row, self._row = self._row, (self._row + 1) % len(self._host)
        if self._left:
            self._left[row].synchronize()
        staged, ids_there = self._host[row, : len(ids)], self._device[row, : len(ids)]
        staged.copy_(torch.from_numpy(ids))
        ids_there.copy_(staged, non_blocking=True)
        if self._left:
            self._left[row].record()
        return ids_there


def runs(ids: npt.NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    """Start, end and first id of each stretch in which every id is the one before plus one."""
    edges = [0, *(np.flatnonzero(np.diff(ids) != 1) + 1).tolist(), len(ids)]
    for start, end in pairwise(edges):
        yield start, end, int(ids[start])


def _launch(
    source: _Pool, target: _Pool, source_blocks: Tensor | None, target_blocks: Tensor | None, num_copies: int
) -> None:
    num_layers = len(source.addresses)
    piece = source.block if source_blocks is not None else target.block
    num_chunks = -(-piece // WORDS)
    _copy_blocks_kernel[(num_copies * num_layers * 2 * num_chunks,)](
        source.addresses,
        target.addresses,
        source_blocks,
        target_blocks,
        num_layers,
        num_chunks,
        piece,
        source.part,
        source.block,
        target.part,
        target.block,
        WORDS=WORDS,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_layers", "num_chunks"])
def _copy_blocks_kernel(
    source_addresses,
    target_addresses,
    source_blocks,
    target_blocks,
    num_layers,
    num_chunks,
    piece,
    source_part_stride,
    source_block_stride,
    target_part_stride,
    target_block_stride,
    WORDS: tl.constexpr,
):
    """Copy one chunk of a layer's keys or values of a block; without ids, copy i is of block i."""
    program = tl.program_id(0)
    words = program % num_chunks * WORDS + tl.arange(0, WORDS)
    part = (program // num_chunks % 2).to(tl.int64)
    layer = program // (num_chunks * 2) % num_layers
    copy = (program // (num_chunks * 2 * num_layers)).to(tl.int64)

    source_block, target_block = copy, copy
    if source_blocks is not None:
        source_block = tl.load(source_blocks + copy)
    if target_blocks is not None:
        target_block = tl.load(target_blocks + copy)
    source = _address(source_addresses, layer) + part * source_part_stride + source_block * source_block_stride
    target = _address(target_addresses, layer) + part * target_part_stride + target_block * target_block_stride
    mask = words < piece
    tl.store(target + words, tl.load(source + words, mask=mask), mask=mask)


@triton.jit
def _address(addresses, layer):
    # allocations begin at multiples of 16 bytes, which wide loads need to know
    return tl.multiple_of(tl.load(addresses + layer).to(tl.pointer_type(tl.int64)), 16)
