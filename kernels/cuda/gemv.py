"""
One row, or up to four, times a weight on a GPU: the time is that of reading the weight, once.

A program makes some output features of all rows. Its threads read the weight 16 bytes at a time
along the input features, each with sums of its own for what it reads; the sums meet once, at the
end, so that one launch is enough however long the rows are. On GPUs that can start a kernel before
the one ahead of it has ended, a program's first weights are on their way by the time there are rows.

Source: NVIDIA, CUDA C++ Programming Guide, "Programmatic Dependent Launch".
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.configs import tuned
from kernels.cuda.early import let_next_start, starts_early, wait_for_previous
from kernels.cuda.features import store_features, through_gate, weight_rows
from kernels.cuda.launching import start_kernel

MAX_ROWS = 4
# elements of 16 bits that one thread loads at once
VECTOR = tl.constexpr(8)
# what a warp reads of one row of the weight by one instruction
WARP_SPAN = 256
# two programs for each multiprocessor of the largest GPUs
MIN_PROGRAMS = 264
# above it the library reads at the speed of the memory too
MAX_WEIGHT_BYTES = 128 << 20

Config = dict[str, int]


def gemv_triton(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """
    See `kernels.linear.linear`; the sums are float32, and are cast once, after the bias.

    Args:
        x: [num_rows, in_features], `MAX_ROWS` at most; rows may lie apart, their elements may not.
        weight: [out_features, in_features], contiguous.
    """
    out_features, in_features = weight.shape
    return launch(x, weight, bias, config_for(len(x), in_features, out_features, x.dtype, False))


def gated_gemv_triton(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `kernels.linear.gated_linear`; as `gemv_triton`, and nothing is rounded before the gate."""
    out_features, in_features = weight.shape
    return launch(x, weight, bias, config_for(len(x), in_features, out_features, x.dtype, True), gated=True)


@functools.cache
def config_for(num_rows: int, in_features: int, out_features: int, dtype: torch.dtype, gated: bool) -> Config:
    """What `launch` takes, and "use": 0 where the library is the faster."""
    padded = _padded(num_rows)
    config = default_config(padded, in_features, out_features)
    key = {"num_rows": padded, "in_features": in_features, "out_features": out_features}
    config |= tuned("gemv", dtype=str(dtype).removeprefix("torch."), gated=int(gated), **key)
    # a gate and what it is for
    return config | {"block_n": max(2, config["block_n"])} if gated else config


def default_config(num_rows: int, in_features: int, out_features: int) -> Config:
    """
    A configuration for a shape that nobody measured: one row of a weight of ordinary size is used.

    Rows whose start 16 bytes do not divide would be read in small pieces, and are not.
    """
    most = 8 if num_rows == 1 else 4
    columns = next((n for n in (8, 4, 2) if n <= most and -(-out_features // n) >= MIN_PROGRAMS), 1)
    spans = triton.next_power_of_2(-(-in_features // WARP_SPAN))
    warps = min(4, spans)
    # eight loads in flight for each thread keep the memory busy
    vectors = min(max(1, 8 // (columns * num_rows)), spans // warps)
    fits = in_features % 8 == 0 and 2 * in_features * out_features <= MAX_WEIGHT_BYTES
    return {
        "use": int(num_rows == 1 and fits),
        "block_n": columns,
        "block_k": vectors * warps * WARP_SPAN,
        "warps": warps,
        "stages": 1,
        "early": 0,
    }


def launch(x: Tensor, weight: Tensor, bias: Tensor | None, config: Config, *, gated: bool = False) -> Tensor:
    """
    Multiply with a given configuration.

    Args:
        config: "block_n", the rows of the weight that a program has; "block_k", the input features that it
            reads at once, 256 for each of its "warps" or a multiple, for so each row's sums stay in
            the threads that read it; "stages": 1 loads into registers, more load ahead into
            shared memory; "early": 1 starts before the kernel ahead in the stream has ended, and
            waits for it once the first weights are asked for: of compute capability 9.0 and above.
        gated: As `kernels.linear.gated_linear`; "block_n" is 2 at least.
    """
    num_rows, in_features = x.shape
    out_features = weight.shape[0] // (2 if gated else 1)
    columns = config["block_n"] // (2 if gated else 1)
    assert num_rows <= MAX_ROWS
    assert weight.is_contiguous()
    assert x.stride(1) == 1 or in_features == 1, "the elements of a row must be adjacent"
    early = bool(config["early"]) and starts_early(num_rows)
    out = torch.empty(num_rows, out_features, dtype=x.dtype, device=x.device)
    start_kernel(
        _gemv_kernel,
        (-(-out_features // columns),),
        out,
        x,
        weight,
        bias,
        num_rows,
        out_features,
        in_features,
        x.stride(0),
        ROWS=_padded(num_rows),
        BLOCK_N=config["block_n"],
        BLOCK_K=config["block_k"],
        STAGES=config["stages"],
        GATED=gated,
        EARLY=early,
        num_warps=config["warps"],
        launch_pdl=early,
    )
    return out


def _padded(num_rows: int) -> int:
    return 1 << (num_rows - 1).bit_length()


@triton.jit(do_not_specialize=["num_rows", "out_features"])
def _gemv_kernel(
    out,
    x,
    weight,
    bias,
    num_rows,
    out_features,
    # that 16 divides it and the stride lets loads be wide
    in_features,
    x_stride,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    features, is_feature = weight_rows(tl.program_id(0), out_features, BLOCK_N, GATED)
    # rows, output features, input features: all tensors have these axes, so that none changes threads
    rows = tl.arange(0, ROWS)[:, None, None]
    places = tl.arange(0, BLOCK_K)[None, None, :]
    inputs = x + rows.to(tl.int64) * x_stride + places
    # int64: a vocabulary times the hidden size passes 2**31
    weights = weight + features.to(tl.int64)[None, :, None] * in_features + places

    is_column, is_row = is_feature[None, :, None], rows < num_rows
    # read once: weights need not push out of the cache what comes again
    tile = tl.load(weights, mask=is_column & (places < in_features), other=0.0, eviction_policy="evict_first")
    # nobody writes weights meanwhile; the rows come from the kernel ahead, and `out` may be its input
    wait_for_previous(EARLY)
    sums = _products(tile, tl.load(inputs, mask=is_row & (places < in_features), other=0.0))
    for start in tl.range(BLOCK_K, in_features, BLOCK_K, num_stages=STAGES):
        inside = start + places < in_features
        tile = tl.load(weights + start, mask=is_column & inside, other=0.0, eviction_policy="evict_first")
        sums += _products(tile, tl.load(inputs + start, mask=is_row & inside, other=0.0))

    total = tl.sum(sums, axis=2)
    if bias is not None:
        total += tl.load(bias + features, mask=is_feature, other=0.0).to(tl.float32)[None, :]
    total = tl.trans(total)
    if GATED:
        total = through_gate(total)
    store_features(out, total, tl.program_id(0), num_rows, out_features)


@triton.jit
def _products(tile, given):
    """Multiply; what a thread loaded at once, it adds up: [ROWS, BLOCK_N, BLOCK_K / VECTOR]."""
    products = tile.to(tl.float32) * given.to(tl.float32)
    pieces: tl.constexpr = products.shape[2] // VECTOR
    return tl.sum(tl.reshape(products, [products.shape[0], products.shape[1], pieces, VECTOR]), axis=3)
