"""
Decode steps as CUDA graphs: one launch in place of some hundreds.

A batch runs in the graph of the next larger size, its missing rows filled with padding.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from enum import Enum

import torch


class Sampling(Enum):
    """How far a graph goes: to the largest logit, to a random draw, or to the logits alone."""

    GREEDY = "greedy"
    RANDOM = "random"
    LOGITS = "logits"


# runs the first rows of a batch through the static buffers
DecodeRows = Callable[[int, Sampling], None]


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes that have a graph: closer together where a row more costs more of a step."""
    sizes = {size for size in (1, 2, 4) if size < max_num_seqs} | {max_num_seqs}
    for stop, step in ((256, 8), (512, 16), (max_num_seqs, 32)):
        sizes.update(range(step, min(stop, max_num_seqs) + 1, step))
    return sorted(sizes)


class DecodeGraphs:
    """
    A graph for every size and kind of sampling, all in one memory pool.

    Args:
        run: Enqueues one decode step over the static buffers; the same for every replay.
        sizes: Ascending.
    """

    def __init__(self, run: DecodeRows, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self._run = run
        self._graphs: dict[tuple[int, Sampling], torch.cuda.CUDAGraph] = {}

    def capture(self) -> None:
        """Capture them all, the largest first: the smaller ones fit into its memory."""
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self.sizes):
            for sampling in Sampling:
                # libraries load their kernels for a shape at its first call, which a capture may not contain
                self._run(size, sampling)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    self._run(size, sampling)
                self._graphs[size, sampling] = graph
        torch.cuda.synchronize()

    def size_for(self, num_rows: int) -> int:
        """The size of the graph that runs so many rows."""
        return self.sizes[bisect_left(self.sizes, num_rows)]

    def replay(self, size: int, sampling: Sampling) -> None:
        """Run one of `sizes`."""
        self._graphs[size, sampling].replay()
