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


class CudaEvent:
    """An event of the stream that is current when it is made; who waits leaves the processor to others."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        # asked for once: torch makes a new object of it at each question
        self._stream = torch.cuda.current_stream()
        self.synchronize = self._event.synchronize

    def record(self) -> None:
        self._event.record(self._stream)


def record_timed_event() -> Event:
    """An event at the end of what is queued now, whose distance in time to others can be asked."""
    event: Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class HostBuffers:
    """
    The host's side of what one step exchanges with the device; the step's own until it has been waited for.

    Args:
        head_count: Numbers that every step has.
        pinned: So that copies need not be waited for.
    """

    def __init__(self, done: Event, *, num_numbers: int, head_count: int, num_rows: int, pinned: bool) -> None:
        self.numbers_tensor = torch.zeros(num_numbers, dtype=torch.int32, pin_memory=pinned)
        self.token_ids_tensor = torch.zeros(num_rows, dtype=torch.int64, pin_memory=pinned)
        # the same memory, looked up once
        self.head = self.numbers_tensor[:head_count]
        self.numbers: NDArray[np.int32] = self.numbers_tensor.numpy()
        self._token_ids: NDArray[np.int64] = self.token_ids_tensor.numpy()
        self._done = done
        self._in_use = False

    def end(self) -> None:
        """Note that all which the device does with them is queued."""
        self._done.record()
        self._in_use = True

    def wait(self) -> NDArray[np.int64]:
        """
        Wait until the device is done with them.

        Returns:
            [num_rows], the tokens that were sampled first; right until the step that has these buffers next.
        """
        if self._in_use:
            self._done.synchronize()
            self._in_use = False
        return self._token_ids


class Transfers:
    """
    What steps exchange with the device: numbers down, token ids back.

    On the device both have one buffer each, always at the same address; on the host there is a ring of them.

    Args:
        num_numbers: Most numbers of a step.
        head_count: Numbers that every step has; a step of no others costs least.
        num_rows: Most tokens that a step samples.
        depth: Buffers of the ring: more than steps are in flight at a time.
    """

    def __init__(
        self,
        device: torch.device,
        make_event: MakeEvent,
        *,
        num_numbers: int,
        head_count: int,
        num_rows: int,
        depth: int = 4,
    ) -> None:
        self.numbers = torch.zeros(num_numbers, dtype=torch.int32, device=device)
        self.token_ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._head_count = head_count
        self._head = self.numbers[:head_count]
        self._ring = [
            HostBuffers(
                make_event(),
                num_numbers=num_numbers,
                head_count=head_count,
                num_rows=num_rows,
                pinned=device.type == "cuda",
            )
            for _ in range(depth)
        ]
        self._place = 0

    def begin(self) -> NDArray[np.int32]:
        """Begin a step: the host's buffer for its numbers, [num_numbers]."""
        self._place = (self._place + 1) % len(self._ring)
        buffers = self._ring[self._place]
        # as a rule its step was waited for long ago
        buffers.wait()
        return buffers.numbers

    def send(self, count: int) -> Tensor:
        """
        Copy the first numbers to the device.

        Args:
            count: head_count at least.

        Returns:
            The buffer there, right for work that is queued before the next `send`.
        """
        buffers = self._ring[self._place]
        if count == self._head_count:
            self._head.copy_(buffers.head, non_blocking=True)
        else:
            self.numbers[:count].copy_(buffers.numbers_tensor[:count], non_blocking=True)
        return self.numbers

    def fetch(self) -> HostBuffers:
        """
        End a step: copy `token_ids` to the host.

        Returns:
            What to wait for; what `to_host` started before has come then, too.
        """
        buffers = self._ring[self._place]
        buffers.token_ids_tensor.copy_(self.token_ids, non_blocking=True)
        buffers.end()
        return buffers


def to_host(values: Tensor) -> Tensor:
    """Start a copy to pinned memory; what it holds is right once an event recorded afterwards has come."""
    return values.to("cpu", non_blocking=True, copy=True)
