"""Numbers on their way to the device and back, without waiting for either."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Event(Protocol):
    """A point in the device's queue of work."""

    def record(self) -> None:
        """Put the point at the end of what is queued now."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has come to it."""
        ...


RecordEvent = Callable[[], Event]


def record_cuda_event() -> Event:
    """Mark the current stream's end; waiting for the mark leaves the processor to others."""
    event: Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def record_timed_event() -> Event:
    """As `record_cuda_event`, of those whose distance in time can be asked."""
    event: Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class Upload:
    """
    One int32 buffer on the device, always at the same address, filled anew for each step.

    The host's side is a ring of pinned buffers, each used again only when the copy from it is done.

    Args:
        depth: Buffers of the ring.
    """

    def __init__(self, device: torch.device, record_event: RecordEvent, *, count: int, depth: int = 4) -> None:
        self.device = device
        self.buffer = torch.zeros(count, dtype=torch.int32, device=device)
        self._record_event = record_event
        self._ring = [self._pinned(count) for _ in range(depth)]
        self._copied: list[Event | None] = [None] * depth
        self._next = 0

    def send(self, numbers: NDArray[np.int32]) -> Tensor:
        """
        Copy numbers to the device.

        Returns:
            [at least len(numbers)] int32 on the device, right for work that is queued before the next `send`.
        """
        count = len(numbers)
        if count > len(self.buffer):
            raise ValueError(f"a step of {count:,} numbers is larger than the buffer of {len(self.buffer):,}")
        place, self._next = self._next, (self._next + 1) % len(self._ring)
        copied = self._copied[place]
        if copied is not None:
            copied.synchronize()
        host = self._ring[place]
        host.numpy()[:count] = numbers
        self.buffer[:count].copy_(host[:count], non_blocking=True)
        self._copied[place] = self._record_event()
        return self.buffer

    def _pinned(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, pin_memory=self.device.type == "cuda")


def to_host(values: Tensor) -> Tensor:
    """Start a copy to pinned memory; what it holds is right once an event recorded afterwards has come."""
    return values.to("cpu", non_blocking=True, copy=True)
