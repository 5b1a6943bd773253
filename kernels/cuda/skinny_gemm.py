"""
Some rows, up to 64, times a weight on a GPU: the time should be that of reading the weight, once.

A program multiplies some rows of the weight by all rows of the input: what is long lies along the
rows of the matrix instructions. Where that makes too few programs to keep the memory busy, the
input features are split among more; the last to arrive at a tile adds up the parts, in their
order, so that a product has the same bits every time.

On GPUs that can start a kernel before the one ahead of it has ended, the first weights are on
their way to the L2 cache by the time there are rows.

Source: Osama et al. 2023, arXiv:2301.03598, "Stream-K" (parts joined by the last to arrive).
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.configs import SMALL_STEP_ROWS, tuned
from kernels.cuda.early import let_next_start, starts_early, wait_for_previous
from kernels.cuda.features import store_features, through_gate, weight_rows
from kernels.cuda.launching import start_kernel

MAX_ROWS = SMALL_STEP_ROWS
# of a weight that is split; others have more tiles than a GPU has multiprocessors
MAX_SPLIT_TILES = 4096
# elements of 16 bits in a line of the cache
LINE = tl.constexpr(64)

Config = dict[str, int]

DEFAULT: Config = {"use": 0, "block_n": 64, "block_k": 64, "warps": 4, "stages": 4, "splits": 1, "ahead": 4}


def skinny_gemm_triton(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> Tensor:
    """
    See `kernels.linear.linear` and `gated_linear`; the sums are float32, and are cast once, at the end.

    Args:
        x: [num_rows, in_features], `MAX_ROWS` at most; rows may lie apart, their elements may not.
        weight: [out_features, in_features], contiguous.
    """
    out_features, in_features = weight.shape
    return launch(x, weight, bias, config_for(len(x), in_features, out_features, x.dtype, gated), gated=gated)


@functools.cache
def config_for(num_rows: int, in_features: int, out_features: int, dtype: torch.dtype, gated: bool) -> Config:
    """What `launch` takes, and "use": 0 where the library is the faster, or nobody measured."""
    key = {"num_rows": padded(num_rows), "in_features": in_features, "out_features": out_features}
    return DEFAULT | tuned("skinny_gemm", dtype=str(dtype).removeprefix("torch."), gated=int(gated), **key)


def padded(num_rows: int) -> int:
    """Rows of the matrix instructions; 16 serve any smaller number."""
    return max(16, 1 << (num_rows - 1).bit_length())


def launch(x: Tensor, weight: Tensor, bias: Tensor | None, config: Config, *, gated: bool = False) -> Tensor:
    """
    Multiply with a given configuration.

    Args:
        config: "block_n", the rows of the weight that a program has, and "block_k", the input features
            that it reads at once; "splits", the parts that the input features are cut into; "warps"
            and "stages"; "ahead", the steps whose weights are asked for before there are rows.
        gated: As `kernels.linear.gated_linear`.
    """
    num_rows, in_features = x.shape
    width = weight.shape[0] // (2 if gated else 1)
    assert num_rows <= MAX_ROWS
    assert weight.is_contiguous()
    assert x.stride(1) == 1 or in_features == 1, "the elements of a row must be adjacent"
    rows, block_n, splits, early = padded(num_rows), config["block_n"], config["splits"], starts_early(num_rows)
    tiles = -(-width // (block_n // (2 if gated else 1)))
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    parts = arrivals = None
    if splits > 1:
        assert tiles <= MAX_SPLIT_TILES
        parts = torch.empty(tiles * splits * block_n * rows, dtype=torch.float32, device=x.device)
        arrivals = _arrivals(x.device)
    start_kernel(
        _skinny_gemm_kernel,
        (tiles, splits),
        out,
        x,
        weight,
        bias,
        parts,
        arrivals,
        num_rows,
        width,
        in_features,
        x.stride(0),
        ROWS=rows,
        BLOCK_N=block_n,
        BLOCK_K=config["block_k"],
        STAGES=config["stages"],
        AHEAD=config["ahead"] if early else 0,
        GATED=gated,
        EARLY=early,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=config["warps"],
        launch_pdl=early,
    )
    return out


@functools.cache
def _arrivals(device: torch.device) -> Tensor:
    """
    Programs that have arrived at each tile: zeros, which every launch leaves as it found them.

    For one stream at a time. Made by the launch before a capture, or its zeros would be one graph's.
    """
    assert not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()), "launch it before a capture"
    return torch.zeros(MAX_SPLIT_TILES, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["num_rows", "width"])
def _skinny_gemm_kernel(
    out,
    x,
    weight,
    bias,
    parts,
    arrivals,
    num_rows,
    width,
    # that 16 divides it and the stride lets loads be wide
    in_features,
    x_stride,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    let_next_start(EARLY)
    tile, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    features, is_feature = weight_rows(tile, width, BLOCK_N, GATED)
    share = tl.cdiv(tl.cdiv(in_features, BLOCK_K), splits) * BLOCK_K
    first = split * share
    # int64: a vocabulary times the hidden size passes 2**31
    # a row past the end is not stored: any other may be read in its place
    weights = weight + tl.where(is_feature, features, 0).to(tl.int64)[:, None] * in_features
    if AHEAD > 0:
        lines = first + tl.arange(0, AHEAD * BLOCK_K // LINE)[None, :] * LINE
        _ask_for(weights + tl.minimum(lines, in_features - 1))
    wait_for_previous(EARLY)

    places = tl.arange(0, BLOCK_K)
    rows = tl.arange(0, ROWS)
    inputs = x + rows.to(tl.int64)[None, :] * x_stride + places[:, None]
    sums = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for start in tl.range(first, tl.minimum(first + share, in_features), BLOCK_K, num_stages=STAGES):
        inside = start + places < in_features
        # read once: weights need not push out of the cache what comes again
        of_weight = tl.load(
            weights + (start + places)[None, :],
            mask=inside[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        given = tl.load(inputs + start, mask=inside[:, None] & (rows < num_rows)[None, :], other=0.0)
        sums = tl.dot(of_weight, given, sums, input_precision=PRECISION)

    if parts is not None:
        cells = tl.arange(0, BLOCK_N)[:, None] * ROWS + rows[None, :]
        of_tile = parts + tile.to(tl.int64) * splits * (BLOCK_N * ROWS)
        tl.store(of_tile + split * (BLOCK_N * ROWS) + cells, sums)
        # what all threads of the program stored comes before its arrival
        tl.debug_barrier()
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") < splits - 1:
            return
        tl.store(arrivals + tile, 0)
        sums = tl.zeros([BLOCK_N, ROWS], tl.float32)
        for part in range(splits):
            # from the L2 cache, where other multiprocessors' stores are
            sums += tl.load(of_tile + part * (BLOCK_N * ROWS) + cells, cache_modifier=".cg")
    if bias is not None:
        sums += tl.load(bias + features, mask=is_feature, other=0.0).to(tl.float32)[:, None]
    if GATED:
        sums = through_gate(sums)
    store_features(out, sums, tile, num_rows, width)


@triton.jit
def _ask_for(places):
    """Have lines of memory brought to the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [places.to(tl.int64, bitcast=True)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
