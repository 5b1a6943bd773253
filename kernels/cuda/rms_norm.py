"""Root mean square norm on a GPU, one program a row, or for some short ones."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda.early import let_next_start, starts_early, wait_for_previous

# a program of one short row waits for memory most of its time
SHORT_ROW = 2048
ROWS_TOGETHER = 4
# fewer rows would leave multiprocessors without a program
MANY_ROWS = 2048


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.rms_norm.rms_norm`. Rows may lie apart; the elements of a row may not."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    hidden = x.shape[-1]
    rows = x if x.dim() == 2 else x.reshape(-1, hidden)
    assert rows.stride(1) == 1 or hidden == 1, "the elements of a row must be adjacent"
    together, block, num_warps = _tile(len(rows), hidden)
    early = starts_early(len(rows))
    _rms_norm_kernel[(triton.cdiv(len(rows), together),)](
        rows,
        weight,
        out,
        rows.stride(0),
        len(rows),
        hidden,
        eps,
        ROWS=together,
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
    together, block, num_warps = _tile(num_tokens, hidden)
    early = starts_early(num_tokens)
    _add_rms_norm_kernel[(triton.cdiv(num_tokens, together),)](
        x,
        residual,
        weight,
        out,
        x.stride(0),
        residual.stride(0),
        num_tokens,
        hidden,
        eps,
        ROWS=together,
        BLOCK=block,
        EARLY=early,
        num_warps=num_warps,
        launch_pdl=early,
    )
    return out


def _tile(num_rows: int, hidden: int) -> tuple[int, int, int]:
    """The rows of a program, their padded length, and the warps that share them."""
    block = 1 << (hidden - 1).bit_length()
    together = ROWS_TOGETHER if num_rows >= MANY_ROWS and block <= SHORT_ROW else 1
    # 16 elements a thread and row, two wide loads of half precision
    return together, block, min(8, max(4, block // 512))


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x, weight, out, x_stride, num_rows, hidden, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    let_next_start(EARLY)
    rows, cols, mask = _places(num_rows, hidden, ROWS, BLOCK)
    scale = tl.load(weight + cols, mask=cols < hidden, other=0.0)
    wait_for_previous(EARLY)
    loaded = tl.load(x + rows * x_stride + cols, mask=mask, other=0.0)
    tl.store(out + rows * hidden + cols, _norm(loaded, scale, hidden, eps), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _add_rms_norm_kernel(
    x, residual, weight, out, x_stride, residual_stride, num_rows, hidden, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    rows, cols, mask = _places(num_rows, hidden, ROWS, BLOCK)
    scale = tl.load(weight + cols, mask=cols < hidden, other=0.0)
    wait_for_previous(EARLY)
    loaded = tl.load(x + rows * x_stride + cols, mask=mask, other=0.0)
    stream = residual + rows * residual_stride + cols
    total = (loaded.to(tl.float32) + tl.load(stream, mask=mask, other=0.0).to(tl.float32)).to(loaded.dtype)
    tl.store(stream, total, mask=mask)
    # of the sum as the next layer reads it, rounded
    tl.store(out + rows * hidden + cols, _norm(total, scale, hidden, eps), mask=mask)


@triton.jit
def _places(num_rows, hidden, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A program's rows, [ROWS, 1] int64, its columns, [1, BLOCK], and which of their places there are."""
    # int64: num_tokens * hidden passes 2**31 on long prefills
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    return rows, cols, (rows < num_rows) & (cols < hidden)


@triton.jit
def _norm(rows, weight, hidden, eps):
    """Norm padded rows, cast, and multiply by the weight in float32; zero padding adds nothing to the sum."""
    wide = rows.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / hidden + eps)
    return ((wide * scale[:, None]).to(rows.dtype).to(tl.float32) * weight.to(tl.float32)).to(rows.dtype)
