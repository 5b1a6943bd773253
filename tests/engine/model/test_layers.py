"""The residual stream, whose sums wait for the norm behind them."""

import pytest
import torch
from torch import Tensor

from engine.model.layers import Linear, Norm, ResidualStream
from tests.support.elementwise import EPS, normed
from tests.support.numerics import assert_near, gated_product, product

HIDDEN = 24


def layer(in_features: int, out_features: int) -> Linear:
    made = Linear(in_features, {"part": out_features}, bias=True, dtype=torch.float64)
    assert made.bias is not None
    made.weight.copy_(torch.randn(out_features, in_features, dtype=torch.float64))
    made.bias.copy_(torch.randn(out_features, dtype=torch.float64))
    return made


class Adding(Linear):
    """
    As where one kernel multiplies and adds.
    """

    def add_forward(self, x: Tensor, residual: Tensor) -> bool:
        residual.add_(self.forward(x))
        return True


@pytest.mark.parametrize("kind", [Linear, Adding])
def test_a_stream_is_the_sum_of_what_was_added(kind: type[Linear]) -> None:
    """
    Its norm goes through the layers, whether a product is added at once or by the norm that comes next.
    """
    torch.manual_seed(0)
    rows = torch.randn(5, HIDDEN, dtype=torch.float64)
    norm, inner, gate, outer = (
        Norm(HIDDEN, eps=EPS, dtype=torch.float64),
        layer(HIDDEN, 10),
        layer(HIDDEN, 20),
        layer(10, HIDDEN),
    )
    outer.__class__ = kind
    norm.weight.copy_(torch.rand(HIDDEN, dtype=torch.float64))
    truth = rows.clone()
    stream = ResidualStream(rows)

    for _ in range(2):
        made = stream.through(norm, inner)
        assert_near(product(normed(truth, norm.weight), inner.weight, inner.bias), made)
        stream.add(outer, made)
        truth = truth + product(made, outer.weight, outer.bias)
        made = stream.through(norm, gate, gated=True)
        assert_near(gated_product(normed(truth, norm.weight), gate.weight, gate.bias), made)
        stream.add(outer, made)
        truth = truth + product(made, outer.weight, outer.bias)

    assert_near(truth, stream.settled())
    assert stream.settled() is rows


def test_one_sum_waits_at_a_time() -> None:
    """
    A second one is a fault of the layer.
    """
    stream = ResidualStream(torch.zeros(2, HIDDEN, dtype=torch.float64))
    outer, x = layer(10, HIDDEN), torch.ones(2, 10, dtype=torch.float64)
    stream.add(outer, x)

    with pytest.raises(AssertionError, match="one sum waits"):
        stream.add(outer, x)
