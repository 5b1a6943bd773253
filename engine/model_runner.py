"""Performs steps: swaps, the network, and the sampling of its logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

import torch
from torch import Tensor

from engine.batch import StepBatch, build_batch
from engine.kv_cache import KVCache
from engine.model.decoder import Decoder
from engine.request import BlockCopy, Chunk, Step, StepResult, TokenLogprob
from engine.sampler import Sampled, Sampler
from engine.sampling_params import Feature
from engine.state import SamplingState
from kernels.copy_blocks import copy_blocks

# rows whose logits exist at once: 128 of 49,152 are 25 MB
PROMPT_LOGPROB_ROWS = 128


@dataclass(frozen=True, slots=True)
class DoneTicket:
    """A step that was computed when it was launched, as on a CPU."""

    step_result: StepResult

    def result(self) -> StepResult:
        return self.step_result


class ModelRunner:
    """
    Runs the model on this process's device. Implements `engine.request.Runner`.

    Only one thread may call it.
    """

    def __init__(self, model: Decoder, kv_cache: KVCache, sampler: Sampler, state: SamplingState) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.sampler = sampler
        self.state = state
        self.windows = frozenset(model.config.windows)

    @torch.inference_mode()
    def launch(self, step: Step) -> DoneTicket:
        """Perform a step; on a CPU it has been computed when this returns."""
        for slot in step.left:
            self.state.leave(slot)
        self._swap(step)
        if not step.chunks:
            return DoneTicket(StepResult(torch.empty(0, dtype=torch.int64).numpy()))
        for chunk in step.chunks:
            if chunk.join:
                self._join(chunk)
        batch = build_batch(
            step,
            kv_cache=self.kv_cache.layers[0],
            windows=self.windows,
            last_token=self.state.last_token,
            dtype=self.model.dtype,
        )
        hidden = self.model.forward(batch.forward, self.kv_cache.layers, self.kv_cache.scales)
        prompt_logprobs = self._prompt_logprobs(step, batch, hidden)
        sampled = self._sample(step, batch, hidden)
        return DoneTicket(StepResult(sampled.token_ids.numpy(), sampled.read_logprobs(), prompt_logprobs))

    def _swap(self, step: Step) -> None:
        device, host = self.kv_cache.pools, self.kv_cache.host_pools
        if step.swap_out:
            copy_blocks(device, host, *_block_ids(step.swap_out))
        if step.swap_in:
            device_blocks, host_blocks = _block_ids(step.swap_in)
            copy_blocks(host, device, host_blocks, device_blocks)

    def _join(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        self.state.join(
            sequence.slot, sequence.params, sequence.index, sequence.prompt, sequence.output, sequence.grammar
        )

    def _sample(self, step: Step, batch: StepBatch, hidden: Tensor) -> Sampled:
        sampling = step.sampling
        if not sampling:
            return Sampled(torch.empty(0, dtype=torch.int64))
        # the head runs over the rows that sample alone
        logits = self.model.logits(hidden.index_select(0, batch.sample_rows))
        features = reduce(or_, (chunk.sequence.params.features for chunk in sampling), Feature.GREEDY)
        return self.sampler.sample(logits, [chunk.sequence.slot for chunk in sampling], features)

    def _prompt_logprobs(self, step: Step, batch: StepBatch, hidden: Tensor) -> dict[int, list[TokenLogprob]]:
        found = {}
        for index, (chunk, first) in enumerate(zip(step.chunks, batch.first_rows, strict=True)):
            top = chunk.sequence.params.prompt_logprobs
            following = torch.from_numpy(chunk.predicted_prompt)
            if top is not None and len(following):
                found[index] = self._row_logprobs(hidden[first : first + len(following)], following, top)
        return found

    def _row_logprobs(self, hidden: Tensor, next_ids: Tensor, top: int) -> list[TokenLogprob]:
        logprobs: list[TokenLogprob] = []
        for start in range(0, len(hidden), PROMPT_LOGPROB_ROWS):
            rows = slice(start, start + PROMPT_LOGPROB_ROWS)
            found = self.sampler.prompt_logprobs(self.model.logits(hidden[rows]), next_ids[rows], top).read()
            logprobs += [logprob for logprob in found if logprob is not None]
        return logprobs


def _block_ids(copies: Sequence[BlockCopy]) -> tuple[Tensor, Tensor]:
    device = torch.tensor([copy.device_block for copy in copies])
    host = torch.tensor([copy.host_block for copy in copies])
    return device, host
