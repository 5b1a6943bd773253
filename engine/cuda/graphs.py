"""
Decode steps as CUDA graphs: one launch in place of some hundreds.

A batch runs in the graph of the next larger size, its missing rows filled with padding.
"""

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from math import inf

import torch

from engine.sampling_params import Feature

# what a graph cannot do: it needs the host's knowledge of single rows
EAGER_SAMPLING = Feature.PENALTY | Feature.BIAS | Feature.MIN_TOKENS | Feature.LOGPROBS | Feature.GRAMMAR


class Sampling(Enum):
    """How far a graph goes: to the largest logit, to a random draw, or to the logits alone."""

    GREEDY = "greedy"
    RANDOM = "random"
    LOGITS = "logits"

    @classmethod
    def of(cls, features: Feature) -> "Sampling":
        """The one for a batch of which some rows have these."""
        if features & EAGER_SAMPLING:
            return cls.LOGITS
        return cls.RANDOM if features & Feature.RANDOM else cls.GREEDY


# runs the first rows of a batch through the static buffers, with or without a pass over shared prefixes
DecodeRows = Callable[[int, Sampling, bool], None]


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes that have a graph: closer together where a row more costs more of a step."""
    sizes = {size for size in (1, 2, 4) if size < max_num_seqs} | {max_num_seqs}
    for stop, step in ((256, 8), (512, 16), (max_num_seqs, 32)):
        sizes.update(range(step, min(stop, max_num_seqs) + 1, step))
    return sorted(sizes)


def cascade_sizes(max_num_seqs: int) -> list[int]:
    """Those with a graph that passes over shared prefixes: what it saves outweighs some rows of padding."""
    sizes = {max_num_seqs}
    for stop, step in ((64, 16), (256, 32), (512, 64), (max_num_seqs, 128)):
        sizes.update(range(step, min(stop, max_num_seqs) + 1, step))
    return sorted(sizes)


class DecodeGraphs:
    """
    A graph for every size and kind of sampling, all in one memory pool.

    Args:
        run: Enqueues one decode step over the static buffers; the same for every replay.
        sizes: Ascending.
        cascade_sizes: Some of them, ascending, that have graphs with the pass over shared prefixes too.
    """

    def __init__(self, run: DecodeRows, sizes: Sequence[int], cascade_sizes: Sequence[int] = ()) -> None:
        self._sizes = {False: sizes, True: cascade_sizes}
        self._run = run
        self._graphs: dict[tuple[int, Sampling, bool], torch.cuda.CUDAGraph] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def capture(self) -> None:
        """Capture them all, the largest first: the smaller ones fit into its memory."""
        pool = torch.cuda.graph_pool_handle()
        with garbage_kept():
            for size, sampling, cascade in self._kinds():
                # libraries load their kernels for a shape at its first call, which a capture may not contain
                if not cascade or sampling is Sampling.GREEDY:
                    self._run(size, sampling, cascade)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    self._run(size, sampling, cascade)
                self._graphs[size, sampling, cascade] = graph
        torch.cuda.synchronize()

    def more_padding(self, num_rows: int) -> float:
        """Rows that the graph with the pass over shared prefixes has more than the one without; inf without any."""
        return inf if not self._sizes[True] else self.size_for(num_rows, True) - self.size_for(num_rows, False)

    def size_for(self, num_rows: int, cascade: bool) -> int:
        """The size of the graph that runs so many rows."""
        sizes = self._sizes[cascade]
        return sizes[bisect_left(sizes, num_rows)]

    def replay(self, size: int, sampling: Sampling, cascade: bool) -> None:
        """Run one of the sizes."""
        self._graphs[size, sampling, cascade].replay()

    def _kinds(self) -> Iterator[tuple[int, Sampling, bool]]:
        # those with the pass last: all but that is known by then, and one kind of sampling shows it for all
        for cascade, sizes in self._sizes.items():
            for size in reversed(sizes):
                for sampling in Sampling:
                    yield size, sampling, cascade


@contextmanager
def garbage_kept() -> Iterator[None]:
    """Collect garbage before, and none meanwhile: graphs of an earlier engine among it would end a capture."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
