"""Performs steps on a GPU: sends the plan, runs the network, and leaves the tokens on the device."""

from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import ForwardBatch
from engine.cuda.cascade import CascadeGate, StepCascade
from engine.cuda.decode_plans import DecodePlans
from engine.cuda.device_state import DeviceState
from engine.cuda.graphs import DecodeGraphs, Sampling
from engine.cuda.kv_cache import CudaKVCache
from engine.cuda.plan import PackedPrefill, PackedStep, PrefillSections, StepPacker
from engine.cuda.prefill_graphs import PrefillGraphs, PrefillShape
from engine.cuda.ticket import CudaTicket
from engine.cuda.transfer import CudaEvent, Event, MakeEvent, Transfers, record_timed_event, to_host
from engine.grammar import AnyText
from engine.model.decoder import Decoder
from engine.request import Step
from engine.sampler import LogprobRows, Sampled, Sampler
from engine.sampling_params import Feature, SamplingParams
from kernels.decode_attention import PagedDecode
from kernels.prefill_attention import VarlenPart, VarlenPrefill
from kernels.sampling import argmax, sample_slots
from kernels.step_state import (
    JOIN_COLUMNS,
    DecodeInputs,
    begin_decode,
    end_decode,
    end_step,
    join_slots,
    receive_decode,
    scatter,
)

# cached tokens whose reading costs as much as a row of padding: an estimate, between the 900 that a row's products
# make in an 8b model and nothing, as products are cut into tiles of rows
PADDING_TOKENS = 256

# rows whose logits exist at once: 512 of 128,256 in bf16 are 131 MB
PROMPT_LOGPROB_ROWS = 512


class CudaModelRunner:
    """
    Runs the model on a GPU. Implements `engine.request.Runner`.

    `launch` returns while the device still works on the steps before; what a step sampled stays on
    the device for the next one. Only one thread may call it.

    Args:
        sampler: With a `SamplingState` of max_num_seqs + 1 slots: the last is that of padding rows.
        max_model_len: Longest sequence; sizes the block tables.
        cascade: From when on a prefix that decodes share is read once for them; None is never.
    """

    def __init__(
        self,
        model: Decoder,
        kv_cache: CudaKVCache,
        sampler: Sampler,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        cascade: CascadeGate | None = None,
        make_event: MakeEvent = CudaEvent,
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.sampler = sampler
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.graphs: DecodeGraphs | None = None
        self.prefill_graphs: PrefillGraphs | None = None
        # where a benchmark wants to know when the device began and ended each step
        self.step_events: list[tuple[Event, Event]] | None = None

        self.block_size = kv_cache.shape.block_size
        self.windows = frozenset(model.config.windows)
        max_blocks = -(-max_model_len // self.block_size)
        self.state = DeviceState(sampler.state, max_blocks=max_blocks, max_rows=max_num_batched_tokens)
        self.cascade = StepCascade(
            model.config, model.dtype, kv_cache.shape, cascade, max_num_seqs, sampler.state.device
        )
        self._packer = StepPacker(
            max_num_seqs=max_num_seqs,
            max_blocks=max_blocks,
            block_size=self.block_size,
            vocab_size=sampler.vocab_size,
            num_reserved=self.cascade.num_numbers,
        )
        self._transfers = Transfers(
            sampler.state.device,
            make_event,
            num_numbers=self._packer.most_numbers(max_num_batched_tokens),
            num_rows=max_num_seqs + 1,
        )
        self._decode_plans = DecodePlans(
            model.config, kv_cache.shape.dtype, self.state.rows.block_tables, max_num_seqs=max_num_seqs
        )
        self._logits: Tensor | None = None
        # by slot, what sampling must do for it
        self._features = np.zeros(max_num_seqs, dtype=np.uint8)
        # the slots that were last asked for, and what sampling must do for them
        self._asked: tuple[NDArray[np.int64], Feature] | None = None

    @torch.inference_mode()
    def capture_graphs(
        self, sizes: SequenceOf[int], cascade_sizes: SequenceOf[int], prefill_shapes: SequenceOf[PrefillShape]
    ) -> None:
        """Make graphs of prefills and decode batches; the largest of `sizes`, of both kinds, must be max_num_seqs."""
        prefill_graphs = PrefillGraphs(self._forward, self.state.inputs, self.windows, prefill_shapes)
        prefill_graphs.capture()
        graphs = DecodeGraphs(self._decode_rows, sizes, cascade_sizes if self.cascade else ())
        with self._padding():
            graphs.capture()
        self.graphs, self.prefill_graphs = graphs, prefill_graphs

    def forget_graphs(self) -> None:
        """Give their memory back."""
        self.graphs = self.prefill_graphs = None

    def _forward(self, batch: ForwardBatch) -> Tensor:
        return self.model.forward(batch, self.kv_cache.layers, self.kv_cache.scales)

    @torch.inference_mode()
    def try_decode(self, num_rows: int) -> None:
        """Run a decode batch of padding, alone and beside a prompt."""
        with self._padding():
            for sampling in Sampling:
                self._decode_rows(num_rows, sampling, False)
            if self.cascade:
                self._decode_rows(num_rows, Sampling.GREEDY, True)
            # other kernels rotate and attend it there, and few rows start early
            for count in (1, num_rows):
                self._try_prefill(1, 1, num_decodes=count)

    def _padding(self) -> AbstractContextManager[None]:
        # nothing of a capture, or of the trial before it, is kept
        self.cascade.clear(self._transfers.numbers)
        return self._transfers.trials(self.max_num_seqs)

    @torch.inference_mode()
    def try_largest_step(self, num_tokens: int) -> None:
        """Run a prefill of so many tokens that writes nothing, and sample all slots: the most memory a step takes."""
        # short prompts first: other kernels attend them, and all are to be compiled before the first request
        for length in (64, 1024, self.max_model_len):
            hidden = self._try_prefill(min(num_tokens, length), min(num_tokens, length, self.max_model_len))
        hidden = self._try_prefill(num_tokens, min(num_tokens, self.max_model_len))
        self._try_sampling(hidden[: self.max_num_seqs])
        join = torch.zeros(1, JOIN_COLUMNS, dtype=torch.int32, device=hidden.device)
        join[0, 0] = self.state.padding_slot
        join_slots(self.state.rows, join)
        scatter(self.state.rows.num_computed, join[:, 0].clone(), join[:, 1].clone())

    def _try_prefill(self, num_tokens: int, length: int, num_decodes: int = 0) -> Tensor:
        inputs = self.state.inputs.rows(num_decodes + num_tokens)
        inputs.positions.zero_()
        inputs.slot_mapping.fill_(-1)
        decode = self._begin_rows(num_decodes, inputs, self._transfers.numbers, False)
        num_fresh = max(1, num_tokens - 1)
        fresh = self._trial_part(num_fresh, min(num_fresh, length), num_prefix=0)
        # the last token stands behind a prefix
        behind = (self._trial_part(1, 1, num_prefix=max(1, length - 1)),) if num_tokens > 1 else ()
        plans = {window: VarlenPrefill(window=window, fresh=fresh, behind=behind) for window in self.windows}
        return self._forward(self._batch(inputs, num_decodes, decode, plans))

    def _try_sampling(self, hidden: Tensor) -> None:
        """Sample rows with all there is to sampling, as the padding slot, which is left as it was."""
        state, slot = self.sampler.state, self.state.padding_slot
        params = SamplingParams(
            temperature=1.0, top_k=2, presence_penalty=1.0, logit_bias={0: 1.0}, min_tokens=1, logprobs=1
        )
        prompt = np.zeros(1, dtype=np.int32)
        state.join(slot, params, 0, prompt, [])
        logits = self.model.logits(hidden)
        state.grammars[slot] = AnyText(self.sampler.vocab_size)
        self.sampler.sample(logits, [slot] * len(logits), params.features | Feature.GRAMMAR)
        state.leave(slot)
        state.join(slot, SamplingParams(), 0, prompt, [])

    def _trial_part(self, num_tokens: int, length: int, *, num_prefix: int) -> VarlenPart:
        starts = [*range(0, num_tokens, length), num_tokens]
        query_start = torch.tensor(starts, dtype=torch.int32, device=self.sampler.state.device)
        key_start = query_start + num_prefix * (query_start > 0) if num_prefix else query_start
        return VarlenPart(
            query_start=query_start,
            key_start=key_start.int(),
            num_tokens=num_tokens,
            num_keys=num_tokens + num_prefix,
            max_query=length,
            max_key=length + num_prefix,
            block_tables=self.state.rows.block_tables,
            slots=torch.full_like(query_start[1:], self.state.padding_slot),
        )

    def launch(self, step: Step) -> CudaTicket:
        """Give a step to the device and return."""
        for slot in step.left:
            self.sampler.state.leave(slot)
            self.cascade.leave(slot)
        # inference mode is entered by those who compute: it would cost as much as half a step of decodes
        if step.prefill_chunks or step.swap_out or step.swap_in:
            self._prepare(step)
        numbers = self._transfers.begin()
        packed = self._packer.pack(step, numbers)
        count, shares = self.cascade.fill(numbers, packed.count, step.decodes.slots)
        # after the host's work: where the device waited for it, that is no part of the step
        begin = record_timed_event() if self.step_events is not None else None
        # the head of decodes alone is read where it is
        if packed.prefill is not None or count > packed.count:
            self._transfers.send(count)
        prompt_logprobs: dict[int, list[LogprobRows]] = {}
        if packed.prefill is None:
            sampled = self._decode(packed, self._decode_features(step.decodes.slots), shares)
        else:
            sampled, prompt_logprobs = self._compute_mixed(step, packed, packed.prefill, shares)
        return self._ticket(packed, sampled, prompt_logprobs, begin)

    @torch.inference_mode()
    def _prepare(self, step: Step) -> None:
        self.kv_cache.swap(step.swap_out, step.swap_in)
        for chunk in step.prefill_chunks:
            if chunk.join:
                sequence = chunk.sequence
                self.sampler.state.remember(
                    sequence.slot, sequence.params, sequence.prompt, sequence.output, sequence.grammar
                )
                self._features[sequence.slot] = sequence.params.features
                self.cascade.join(sequence.slot, sequence.block_table)

    def _features_of(self, slots: NDArray[np.integer[Any]]) -> Feature:
        return Feature(int(np.bitwise_or.reduce(self._features[slots], initial=0)))

    def _decode_features(self, slots: NDArray[np.int64]) -> Feature:
        # slots are the same array until one joins or leaves, and no feature changes without that
        if self._asked is None or self._asked[0] is not slots:
            self._asked = slots, self._features_of(slots)
        return self._asked[1]

    def _note_chunks(self, prefill: PackedPrefill, sent: Tensor) -> None:
        rows = self.state.rows
        if prefill.joins.count:
            join_slots(rows, sent[prefill.joins.place].view(-1, JOIN_COLUMNS))
            scatter(rows.block_tables, sent[prefill.places.place], sent[prefill.blocks.place])
        scatter(rows.num_computed, sent[prefill.moved.place], sent[prefill.computed.place])

    def _decode(self, packed: PackedStep, features: Feature, cascade: bool) -> Sampled | None:
        count, kind = packed.num_decodes, Sampling.of(features)
        self._transfers.show_place(ends=kind is not Sampling.LOGITS)
        if self.graphs is not None:
            cascade = cascade and self.graphs.more_padding(count) * PADDING_TOKENS <= self.cascade.num_saved
            self.graphs.replay(self.graphs.size_for(count, cascade), kind, cascade)
        else:
            self._decode_rows(count, kind, cascade)
        if kind is not Sampling.LOGITS:
            return None
        assert self._logits is not None
        return self._sample_eagerly(self._logits[:count], packed, features)

    @torch.inference_mode()
    def _decode_rows(self, count: int, sampling: Sampling, cascade: bool) -> None:
        """One decode step over the static buffers: what a graph holds."""
        ring, rows, numbers = self._transfers.ring, self.state.rows, self._transfers.numbers
        slots, inputs = numbers[:count], self.state.inputs.rows(count)
        start, block_size = self._packer.fresh_start, self.block_size
        receive_decode(ring, rows, slots, inputs, fresh_start=start, block_size=block_size)
        plans = self._plan_decodes(slots, inputs, numbers, cascade)
        batch = self._batch(inputs, count, plans, {})
        logits = self.model.logits(self._forward(batch))
        if sampling is Sampling.LOGITS:
            self._keep_logits(logits)
        else:
            end_decode(ring, rows, slots, self._pick(logits, slots, sampling))

    def _begin_rows(
        self, count: int, inputs: DecodeInputs, sent: Tensor, cascade: bool
    ) -> dict[int | None, PagedDecode]:
        """The first rows of a step of both kinds, if any are decodes."""
        if not count:
            return {}
        decodes, slots, start = inputs.rows(count), sent[:count], self._packer.fresh_start
        begin_decode(self.state.rows, slots, sent[start : start + count], decodes, self.block_size)
        return self._plan_decodes(slots, decodes, sent, cascade)

    def _pick(self, logits: Tensor, slots: Tensor, sampling: Sampling) -> Tensor:
        logits = logits[:, : self.sampler.vocab_size]
        if sampling is Sampling.GREEDY:
            return argmax(logits)
        rows = self.state.rows
        return sample_slots(logits, slots, rows.knobs, rows.top_k, rows.streams, rows.positions)

    def _keep_logits(self, logits: Tensor) -> None:
        if self._logits is None:
            self._logits = logits.new_empty(self.max_num_seqs, logits.shape[1])
        self._logits[: len(logits)].copy_(logits)

    @torch.inference_mode()
    def _compute_mixed(
        self, step: Step, packed: PackedStep, prefill: PackedPrefill, cascade: bool
    ) -> tuple[Sampled | None, dict[int, list[LogprobRows]]]:
        sent = self._transfers.numbers
        self._note_chunks(prefill, sent)
        hidden = self._forward_mixed(packed.num_decodes, prefill, sent, cascade)
        prompt_logprobs = self._prompt_logprobs(step, prefill, hidden)
        return self._sample_mixed(packed, prefill, hidden, sent), prompt_logprobs

    def _forward_mixed(self, count: int, prefill: PackedPrefill, sent: Tensor, cascade: bool) -> Tensor:
        graphs = self.prefill_graphs if not count else None
        if graphs is not None and (shape := graphs.shape_for(prefill)) is not None:
            return graphs.replay(shape, prefill, sent)
        inputs = self.state.inputs.rows(count + prefill.num_tokens)
        decode = self._begin_rows(count, inputs, sent, cascade)
        inputs.input_ids[count:].copy_(sent[prefill.input_ids.place])
        inputs.positions[count:].copy_(sent[prefill.positions.place])
        inputs.slot_mapping[count:].copy_(sent[prefill.slot_mapping.place])
        batch = self._batch(inputs, count, decode, self._prefill_plans(prefill, sent))
        return self._forward(batch)

    def _sample_mixed(self, packed: PackedStep, prefill: PackedPrefill, hidden: Tensor, sent: Tensor) -> Sampled | None:
        num_sampled = len(packed.slots)
        if not num_sampled:
            return None
        # the head runs over the rows that sample alone
        logits = self.model.logits(hidden.index_select(0, sent[prefill.sample_rows.place]))
        features = self._features_of(packed.slots)
        kind = Sampling.of(features)
        if kind is Sampling.LOGITS:
            return self._sample_eagerly(logits, packed, features)
        slots, token_ids = sent[:num_sampled], self._transfers.token_ids[:num_sampled]
        token_ids.copy_(self._pick(logits, slots, kind))
        end_step(self.state.rows, slots, token_ids)
        return None

    @torch.inference_mode()
    def _sample_eagerly(self, logits: Tensor, packed: PackedStep, features: Feature) -> Sampled:
        sampled = self.sampler.sample(logits, packed.slots.tolist(), features)
        self._transfers.token_ids[: len(packed.slots)].copy_(sampled.token_ids)
        return sampled

    def _batch(
        self,
        inputs: DecodeInputs,
        num_decodes: int,
        decode: dict[int | None, PagedDecode],
        prefill: dict[int | None, VarlenPrefill],
    ) -> ForwardBatch:
        return ForwardBatch(
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            slot_mapping=inputs.slot_mapping,
            num_decodes=num_decodes,
            decode=decode,
            prefill=prefill,
        )

    def _plan_decodes(
        self, slots: Tensor, inputs: DecodeInputs, sent: Tensor, cascade: bool
    ) -> dict[int | None, PagedDecode]:
        shared = self.cascade.plan(sent, len(slots)) if cascade else None
        return self._decode_plans.plan(slots, inputs.seq_lens, shared)

    def _prefill_plans(self, prefill: PackedPrefill, sent: Tensor) -> dict[int | None, VarlenPrefill]:
        fresh = self._part(prefill.fresh, sent) if prefill.fresh is not None else None
        behind = tuple(self._part(sections, sent) for sections in prefill.behind)
        return {window: VarlenPrefill(window=window, fresh=fresh, behind=behind) for window in self.windows}

    def _part(self, sections: PrefillSections, sent: Tensor) -> VarlenPart:
        return VarlenPart(
            query_start=sent[sections.query_start.place],
            key_start=sent[sections.key_start.place],
            num_tokens=sections.num_tokens,
            num_keys=sections.num_keys,
            max_query=sections.max_query,
            max_key=sections.max_key,
            block_tables=self.state.rows.block_tables,
            slots=sent[sections.slots.place],
        )

    def _prompt_logprobs(self, step: Step, prefill: PackedPrefill, hidden: Tensor) -> dict[int, list[LogprobRows]]:
        found = {}
        places = range(step.num_decodes, step.num_decodes + len(step.prefill_chunks))
        for index, chunk, first in zip(places, step.prefill_chunks, prefill.first_rows, strict=True):
            top = chunk.sequence.params.prompt_logprobs
            following = torch.from_numpy(chunk.predicted_prompt)
            if top is not None and len(following):
                rows = hidden[first : first + len(following)]
                pieces = zip(
                    torch.split(rows, PROMPT_LOGPROB_ROWS), torch.split(following, PROMPT_LOGPROB_ROWS), strict=True
                )
                found[index] = [
                    self.sampler.prompt_logprobs(self.model.logits(rows), ids, top).map(to_host) for rows, ids in pieces
                ]
        return found

    def _ticket(
        self,
        packed: PackedStep,
        sampled: Sampled | None,
        prompt_logprobs: dict[int, list[LogprobRows]],
        begin: Event | None,
    ) -> CudaTicket:
        if begin is not None and self.step_events is not None:
            self.step_events.append((begin, record_timed_event()))
        if sampled is not None and sampled.logprobs is not None:
            sampled = Sampled(sampled.token_ids, sampled.logprobs.map(to_host))
        order = packed.prefill.order if packed.prefill is not None else None
        return CudaTicket(self._transfers.fetch(), len(packed.slots), sampled, order, prompt_logprobs)
