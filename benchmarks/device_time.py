"""How long the device takes: by its own events, of what is launched or of a graph that is replayed."""

import statistics
from collections.abc import Callable

import torch


def elapsed_s(work: Callable[[], object], repeats: int) -> float:
    """Median seconds of the device between the start and the end of `work`, the first time left out."""
    times = []
    for _ in range(repeats + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[1:])


def replayed_s(work: Callable[[], object], repeats: int, calls: int = 1) -> float:
    """Median seconds of one of `calls` calls of `work` that stand behind each other in a CUDA graph."""
    # compiled and warm before the capture
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            work()
    return elapsed_s(graph.replay, repeats) / calls
