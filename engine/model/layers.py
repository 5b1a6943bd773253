"""The layers between the attentions: linear, embedding, norm, MLP."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.linear import gated_linear, linear, pack_weight
from kernels.rms_norm import add_rms_norm, rms_norm

# a tensor's name in the checkpoint, and the memory it is loaded into
NamedTensor = tuple[str, Tensor]


class Linear:
    """
    Rows times a weight: one matrix of the checkpoint, or several stacked that share their input.

    Args:
        parts: Name of each matrix in the checkpoint to its output features, in the order of the stack.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int], *, bias: bool, dtype: torch.dtype) -> None:
        self.parts = dict(parts)
        out_features = sum(self.parts.values())
        self.weight = torch.empty(out_features, in_features, dtype=dtype)
        self.bias = torch.empty(out_features, dtype=dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[num_rows, in_features] to [num_rows, out_features]."""
        return linear(x, self.weight, self.bias)

    def gated_forward(self, x: Tensor) -> Tensor:
        """The same, and the SiLU of its first half times its second: [num_rows, out_features / 2]."""
        return gated_linear(x, self.weight, self.bias)

    def tensors(self, prefix: str) -> Iterator[NamedTensor]:
        start = 0
        for name, size in self.parts.items():
            rows = slice(start, start + size)
            yield f"{prefix}{name}.weight", self.weight[rows]
            if self.bias is not None:
                yield f"{prefix}{name}.bias", self.bias[rows]
            start += size

    def pack(self) -> None:
        """Lay the loaded weight out for the device; `tensors` is of no use afterwards."""
        self.weight = pack_weight(self.weight)


class Norm:
    """RMSNorm, alone or with the residual sum before it."""

    def __init__(self, size: int, *, eps: float, dtype: torch.dtype) -> None:
        self.weight = torch.empty(size, dtype=dtype)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add_forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add `x` to the residual in place, and norm the sum."""
        return add_rms_norm(x, residual, self.weight, self.eps)

    def tensors(self, prefix: str) -> Iterator[NamedTensor]:
        yield f"{prefix}weight", self.weight


class Embedding:
    """Token ids to rows; with tied embeddings its weight is the head's too."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype) -> None:
        self.weight = torch.empty(vocab_size, hidden_size, dtype=dtype)

    def forward(self, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, self.weight)

    def tensors(self, prefix: str) -> Iterator[NamedTensor]:
        yield f"{prefix}weight", self.weight


class GatedMLP:
    """down(silu(gate(x)) * up(x)), with gate and up as one product."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool, dtype: torch.dtype) -> None:
        both = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up = Linear(hidden_size, both, bias=bias, dtype=dtype)
        self.down = Linear(intermediate_size, {"down_proj": hidden_size}, bias=bias, dtype=dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down.forward(self.gate_up.gated_forward(hidden))

    def tensors(self, prefix: str) -> Iterator[NamedTensor]:
        yield from self.gate_up.tensors(prefix)
        yield from self.down.tensors(prefix)

    def linears(self) -> Iterator[Linear]:
        yield self.gate_up
        yield self.down
