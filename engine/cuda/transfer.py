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


MakeEvent = Callable[[], Event]


def make_cuda_event() -> Event:
    """An event that leaves the processor to others while it is waited for."""
    event: Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    return event


def record_timed_event() -> Event:
    """An event at the end of what is queued now, whose distance in time to others can be asked."""
    event: Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class Transfers:
    """
    What steps exchange with the device: numbers down, token ids back.

    On the device both have one buffer each, always at the same address; on the host a ring of pinned
    ones, with one event each that says when the device is done with them.

    Args:
        num_numbers: Most numbers of a step.
        num_rows: Most tokens that a step samples.
        depth: Buffers of the ring: more than steps are in flight at a time.
    """

    def __init__(
        self, device: torch.device, make_event: MakeEvent, *, num_numbers: int, num_rows: int, depth: int = 4
    ) -> None:
        self.numbers = torch.zeros(num_numbers, dtype=torch.int32, device=device)
        self.token_ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
        pinned = device.type == "cuda"
        self._numbers = [torch.zeros(num_numbers, dtype=torch.int32, pin_memory=pinned) for _ in range(depth)]
        self._token_ids = [torch.zeros(num_rows, dtype=torch.int64, pin_memory=pinned) for _ in range(depth)]
        self._done = [make_event() for _ in range(depth)]
        self._place = 0

    def send(self, numbers: NDArray[np.int32]) -> Tensor:
        """
        Begin a step: copy its numbers to the device.

        Returns:
            The buffer there, right for work that is queued before the next `send`.
        """
        self._place = (self._place + 1) % len(self._done)
        self._done[self._place].synchronize()
        count = len(numbers)
        host = self._numbers[self._place]
        host.numpy()[:count] = numbers
        self.numbers[:count].copy_(host[:count], non_blocking=True)
        return self.numbers

    def fetch(self, token_ids: Tensor) -> tuple[Tensor, Event]:
        """
        End a step: copy what it sampled to the host.

        Returns:
            [len(token_ids)] int64, right once the event has come and until as many more steps have
            begun as the ring is deep; what `to_host` started before is there then, too.
        """
        count = len(token_ids)
        host = self._token_ids[self._place][:count]
        if count:
            host.copy_(token_ids, non_blocking=True)
        done = self._done[self._place]
        done.record()
        return host, done


def to_host(values: Tensor) -> Tensor:
    """Start a copy to pinned memory; what it holds is right once an event recorded afterwards has come."""
    return values.to("cpu", non_blocking=True, copy=True)
