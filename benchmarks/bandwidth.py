"""What the card's memory moves at most, by which memory-bound kernels are judged."""

import itertools
import statistics
import time
from collections.abc import Callable

import torch

COPY_BYTES = 2 << 30
# until the clocks are up
WARM_UP_S = 0.2
NUM_COPIES = 21


def copy_bandwidth() -> float:
    """
    Bytes a second, read and written, of a large copy from the card to itself.

    The better of the driver's copy and a kernel's, each warmed up, the median of many. Nothing else
    may use the card meanwhile: measure before other processes compile or run there.
    """
    source = torch.empty(COPY_BYTES // 8, dtype=torch.int64, device="cuda").random_()
    target = torch.empty_like(source)
    copies: list[Callable[[], object]] = [
        lambda: target.copy_(source),
        lambda: torch.bitwise_not(source, out=target),
    ]
    return 2 * source.nbytes / min(_median_s(copy) for copy in copies)


def _median_s(work: Callable[[], object]) -> float:
    deadline = time.perf_counter() + WARM_UP_S
    while time.perf_counter() < deadline:
        work()
        torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_COPIES + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) / 1e3 for start, end in itertools.pairwise(marks)]
    return statistics.median(times)
