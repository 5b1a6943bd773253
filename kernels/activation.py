"""The gate of the MLP."""

from torch import Tensor
from torch.nn import functional as F


def silu_mul(gate_up: Tensor) -> Tensor:
    """
    Multiply the second half of each row by the SiLU of the first.

    Args:
        gate_up: [num_tokens, 2 * width], gate then up. Its contents are used up.

    Returns:
        [num_tokens, width], the dtype of `gate_up`; contiguous.
    """
    if gate_up.is_cuda:
        from kernels.cuda.activation import silu_mul_triton

        return silu_mul_triton(gate_up)
    return silu_mul_reference(gate_up)


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    # in place: a fresh buffer of this size costs more in page faults than the arithmetic
    return F.silu(gate, inplace=True) * up
