"""Root mean square norm on a GPU, one program a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda.early import let_next_start, starts_early, wait_for_previous
from kernels.cuda.launching import start_kernel


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.rms_norm.rms_norm`. Rows may lie apart; the elements of a row may not."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    hidden = x.shape[-1]
    rows = x if x.dim() == 2 else x.reshape(-1, hidden)
    assert rows.stride(1) == 1 or hidden == 1, "the elements of a row must be adjacent"
    block, num_warps = _tile(hidden)
    early = starts_early(len(rows))
    start_kernel(
        _rms_norm_kernel,
        (len(rows),),
        rows,
        weight,
        out,
        rows.stride(0),
        hidden,
        eps,
        BLOCK=block,
        EARLY=early,
        num_warps=num_warps,
        launch_pdl=early,
    )
    return out


def add_rms_norm_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.rms_norm.add_rms_norm`. Rows may lie apart; the elements of a row may not."""
    num_tokens, hidden = x.shape
    assert x.stride(1) == residual.stride(1) == 1 or hidden == 1, "the elements of a row must be adjacent"
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block, num_warps = _tile(hidden)
    early = starts_early(num_tokens)
    start_kernel(
        _add_rms_norm_kernel,
        (num_tokens,),
        x,
        residual,
        weight,
        out,
        x.stride(0),
        residual.stride(0),
        hidden,
        eps,
        BLOCK=block,
        EARLY=early,
        num_warps=num_warps,
        launch_pdl=early,
    )
    return out


def _tile(hidden: int) -> tuple[int, int]:
    """The padded length of a row, and the warps that share it."""
    block = 1 << (hidden - 1).bit_length()
    # 16 elements a thread, two wide loads of half precision
    return block, min(8, max(4, block // 512))


@triton.jit
def _rms_norm_kernel(x, weight, out, x_stride, hidden, eps, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    let_next_start(EARLY)
    # int64: num_tokens * hidden passes 2**31 on long prefills
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < hidden

    scale = tl.load(weight + cols, mask=mask, other=0.0)
    wait_for_previous(EARLY)
    loaded = tl.load(x + row * x_stride + cols, mask=mask, other=0.0)
    normed = _norm(loaded, scale, hidden, eps)
    tl.store(out + row * hidden + cols, normed, mask=mask)


@triton.jit
def _add_rms_norm_kernel(
    x, residual, weight, out, x_stride, residual_stride, hidden, eps, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    let_next_start(EARLY)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < hidden

    scale = tl.load(weight + cols, mask=mask, other=0.0)
    wait_for_previous(EARLY)
    loaded = tl.load(x + row * x_stride + cols, mask=mask, other=0.0)
    stream = residual + row * residual_stride + cols
    total = (loaded.to(tl.float32) + tl.load(stream, mask=mask, other=0.0).to(tl.float32)).to(loaded.dtype)
    tl.store(stream, total, mask=mask)
    # of the sum as the next layer reads it, rounded
    normed = _norm(total, scale, hidden, eps)
    tl.store(out + row * hidden + cols, normed, mask=mask)


@triton.jit
def _norm(row, weight, hidden, eps):
    """Norm a padded row, cast, and multiply by the weight in float32; zero padding adds nothing to the sum."""
    wide = row.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / hidden + eps)
    return ((wide * scale).to(row.dtype).to(tl.float32) * weight.to(tl.float32)).to(row.dtype)
