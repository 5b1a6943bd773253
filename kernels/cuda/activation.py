"""The gate of the MLP on a GPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda.early import let_next_start, starts_early, wait_for_previous
from kernels.cuda.launching import start_kernel

# 8 elements a thread of 4 warps: one wide load of each half in half precision
BLOCK = 1024


def silu_mul_triton(gate_up: Tensor) -> Tensor:
    """See `kernels.activation.silu_mul`. Leaves `gate_up` as it is; its rows may lie apart."""
    num_tokens, width = len(gate_up), gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1, "the elements of a row must be adjacent"
    out = torch.empty((num_tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    num_blocks, early = -(-width // BLOCK), starts_early(num_tokens)
    start_kernel(
        _silu_mul_kernel,
        (num_tokens * num_blocks,),
        gate_up,
        out,
        gate_up.stride(0),
        width,
        num_blocks,
        BLOCK=BLOCK,
        EARLY=early,
        num_warps=4,
        launch_pdl=early,
    )
    return out


@triton.jit(do_not_specialize=["num_blocks"])
def _silu_mul_kernel(gate_up, out, row_stride, width, num_blocks, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    # one axis: the second of a grid ends at 65,535
    program = tl.program_id(0)
    row = (program // num_blocks).to(tl.int64)
    cols = program % num_blocks * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width

    source = gate_up + row * row_stride + cols
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * width + cols, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=mask)
