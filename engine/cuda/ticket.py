"""What a step that the device has been given will have found out."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.cuda.transfer import HostBuffers
from engine.request import StepResult, TokenLogprob
from engine.sampler import LogprobRows, Sampled


@dataclass(frozen=True, slots=True)
class CudaTicket:
    """
    A step that the device has been given.

    Args:
        buffers: Where the tokens come, in the order of the rows that sampled; all below is on the host by then, too.
        logprobs: What sampling gave besides tokens; None where nobody asked.
        order: Place in `Step.sampled` of each of these; None where that is their order.
        prompt_logprobs: Index into `Step.chunks` to what was computed of it, in pieces.
    """

    buffers: HostBuffers
    num_sampled: int
    logprobs: Sampled | None
    order: NDArray[np.int64] | None
    prompt_logprobs: dict[int, list[LogprobRows]]

    def result(self) -> StepResult:
        # a copy, as the buffers will be another step's
        token_ids = self.buffers.wait()[: self.num_sampled].copy()
        logprobs = self.logprobs.read_logprobs() if self.logprobs is not None else []
        if self.order is not None:
            token_ids = _reordered(token_ids, self.order)
            by_place = dict(zip(self.order.tolist(), logprobs, strict=False))
            logprobs = [by_place[place] for place in range(len(logprobs))]
        return StepResult(token_ids, logprobs, {index: _read(found) for index, found in self.prompt_logprobs.items()})


def _reordered(values: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
    out = np.empty_like(values)
    out[places] = values
    return out


def _read(pieces: SequenceOf[LogprobRows]) -> list[TokenLogprob]:
    return [entry for piece in pieces for entry in piece.read() if entry is not None]
