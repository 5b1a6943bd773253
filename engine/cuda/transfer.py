"""Numbers on their way to the device and back, without waiting for either."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.step_state import HostRing


class Event(Protocol):
    """A point in the device's queue of work."""

    def record(self) -> None:
        """Put the point at the end of what is queued now."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has come to it."""
        ...


MakeEvent = Callable[[], Event]

_LINE_BYTES = 128


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
        numbers, token_ids: Rows of the ring.
    """

    def __init__(self, done: Event, numbers: Tensor, token_ids: Tensor) -> None:
        self.numbers_tensor = numbers
        self.token_ids_tensor = token_ids
        # the same memory, looked up once
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

    A step with prompts is copied: `send`, then `fetch`. One of decodes alone reads and writes the ring by itself: a
    copy on either side of a graph costs it 30 us. The device then has to know the place in the ring; it counts along,
    and is told wherever the host does not know that it has counted right.

    Args:
        num_numbers: Most numbers of a step.
        num_rows: Most tokens that a step samples.
        depth: Buffers of the ring: more than steps are in flight at a time.
    """

    def __init__(
        self,
        device: torch.device,
        make_event: MakeEvent,
        *,
        num_numbers: int,
        num_rows: int,
        depth: int = 4,
    ) -> None:
        self.numbers = torch.zeros(num_numbers, dtype=torch.int32, device=device)
        self.token_ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
        # pinned, so that copies need not be waited for, and kernels can read and write it
        pinned = device.type == "cuda"
        self.ring = HostRing(
            numbers=_rows(depth, num_numbers, torch.int32, pinned=pinned),
            token_ids=_rows(depth, num_rows, torch.int64, pinned=pinned),
            places=torch.zeros(2, dtype=torch.int32, device=device),
        )
        self._buffers = [
            HostBuffers(make_event(), numbers, token_ids)
            for numbers, token_ids in zip(self.ring.numbers, self.ring.token_ids, strict=True)
        ]
        self._place = 0
        # the device's own, where it is known
        self._device_place: int | None = None
        # the cell that says it, looked up once
        self._place_of_next = self.ring.places[:1]
        # whether the step's tokens come without a copy
        self._ends_itself = False

    def begin(self) -> NDArray[np.int32]:
        """Begin a step: the host's buffer for its numbers, [num_numbers]."""
        self._place = (self._place + 1) % len(self._buffers)
        self._ends_itself = False
        buffers = self._buffers[self._place]
        # as a rule its step was waited for long ago
        buffers.wait()
        return buffers.numbers

    def send(self, count: int) -> None:
        """Copy the first numbers to the device, where `numbers` is right for what this step queues."""
        numbers = self._buffers[self._place].numbers_tensor
        self.numbers[:count].copy_(numbers[:count], non_blocking=True)

    def show_place(self, *, ends: bool) -> None:
        """
        Have the device find the step in the ring: to be queued before `receive_decode`, once a step.

        Args:
            ends: `end_decode` is to follow, and brings the tokens.
        """
        if self._device_place != self._place:
            self._place_of_next.fill_(self._place)
        # until all of the step is queued
        self._device_place, self._ends_itself = None, ends

    @contextmanager
    def trials(self, number: int) -> Iterator[None]:
        """For steps that are none of the host's: wherever in the ring their turn is, they find this number alone."""
        self._device_place = None
        for buffers in self._buffers:
            buffers.wait()
            buffers.numbers_tensor.fill_(number)
        try:
            yield
        finally:
            # what they read stays until they have read it
            for buffers in self._buffers:
                buffers.end()

    def fetch(self) -> HostBuffers:
        """
        End a step: copy `token_ids` to the host, unless the tokens come by themselves.

        Returns:
            What to wait for; what `to_host` started before has come then, too.
        """
        buffers = self._buffers[self._place]
        if self._ends_itself:
            self._device_place = (self._place + 1) % len(self._buffers)
        else:
            buffers.token_ids_tensor.copy_(self.token_ids, non_blocking=True)
        buffers.end()
        return buffers


def _rows(count: int, length: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """[count, length], each row from the beginning of a cache line on: what the device reads at a time."""
    line = _LINE_BYTES // dtype.itemsize
    return torch.zeros(count, -(-length // line) * line, dtype=dtype, pin_memory=pinned)[:, :length]


def to_host(values: Tensor) -> Tensor:
    """Start a copy to pinned memory; what it holds is right once an event recorded afterwards has come."""
    return values.to("cpu", non_blocking=True, copy=True)
