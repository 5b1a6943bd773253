"""The layers between the attentions: linear, embedding, norm, MLP."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.linear import added_linear, gated_linear, linear, normed_linear, pack_weight
from kernels.rms_norm import RowNorm, add_rms_norm, rms_norm

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

    def normed_forward(self, x: Tensor, norm: "Norm", *, gated: bool) -> Tensor:
        """`forward` or `gated_forward` of the norm of `x`."""
        return normed_linear(x, RowNorm(norm.weight, norm.eps), self.weight, self.bias, gated=gated)

    def add_forward(self, x: Tensor, residual: Tensor) -> bool:
        """Add `forward` of `x` to the residual in place, if one kernel can do both, and say whether."""
        return added_linear(x, self.weight, self.bias, residual)

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


class ResidualStream:
    """
    What the layers read and add to, one row a token.

    A sum waits until the stream is read, so that one kernel adds and norms; or the product that makes it adds it.

    Args:
        rows: [num_tokens, hidden_size].
    """

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows
        self._delta: Tensor | None = None

    def through(self, norm: Norm, linear: Linear, *, gated: bool = False) -> Tensor:
        """The norm of the stream through a layer."""
        if self._delta is None:
            return linear.normed_forward(self._rows, norm, gated=gated)
        hidden, self._delta = norm.add_forward(self._delta, self._rows), None
        return linear.gated_forward(hidden) if gated else linear.forward(hidden)

    def add(self, linear: Linear, x: Tensor) -> None:
        """Add what a layer makes of `x`."""
        assert self._delta is None, "one sum waits at a time"
        if not linear.add_forward(x, self._rows):
            self._delta = linear.forward(x)

    def settled(self) -> Tensor:
        """The rows, with all that was added."""
        if self._delta is not None:
            self._rows.add_(self._delta)
            self._delta = None
        return self._rows


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

    def tensors(self, prefix: str) -> Iterator[NamedTensor]:
        yield from self.gate_up.tensors(prefix)
        yield from self.down.tensors(prefix)

    def linears(self) -> Iterator[Linear]:
        yield self.gate_up
        yield self.down
