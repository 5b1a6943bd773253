"""Captures of decode steps on the card."""

import gc
from collections.abc import Iterator

import pytest
import torch

from engine.cuda.graphs import DecodeGraphs, Sampling


@pytest.fixture
def eager_collector() -> Iterator[None]:
    """
    Garbage is collected at nearly every object that is made.
    """
    threshold = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    yield
    gc.set_threshold(*threshold)


def captured() -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ones(8, device="cuda").add_(1)
    return graph


@pytest.mark.usefixtures("eager_collector")
def test_graphs_that_nobody_holds_do_not_end_a_capture() -> None:
    """
    Those of an engine that was given up, in a cycle of objects: they are destroyed before a capture or after.
    """
    numbers = torch.zeros(4, device="cuda")
    old = [captured() for _ in range(2 * len(Sampling) * 2)]

    def run(count: int, sampling: Sampling, cascade: bool) -> None:  # noqa: ARG001
        cycle: list[object] = [old.pop()]
        cycle.append(cycle)
        del cycle
        numbers[:count].add_(len([[] for _ in range(100)]))

    graphs = DecodeGraphs(run, [2, 4])
    graphs.capture()

    assert gc.isenabled()
    numbers.zero_()
    graphs.replay(2, Sampling.GREEDY, False)
    graphs.replay(4, Sampling.LOGITS, False)
    assert [200, 200, 100, 100] == numbers.tolist()
