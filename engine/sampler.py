"""One pass from a step's logits to its tokens; rows pay only for the features they use."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.request import TokenLogprob
from engine.sampling_params import Feature
from engine.state import FREQUENCY, MIN_P, PRESENCE, REPETITION, TEMPERATURE, TOP_P, SamplingState
from kernels.logprobs import LOGPROB_FLOOR, token_logprobs
from kernels.penalties import apply_penalties
from kernels.random_draws import draw_keys
from kernels.sampling import argmax, sample
from kernels.token_masks import apply_token_masks


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """
    Log-probabilities of some rows, where the device has put them.

    Args:
        rows: Which rows of the logits these are.
        token_ids: [len(rows)] int64; -1 where the row failed.
        chosen: [len(rows)], the log-probability of each token.
        best, values: [len(rows), most], the best tokens and their log-probabilities, best first.
        num_top: How many of these each row asked for.
    """

    rows: tuple[int, ...]
    token_ids: Tensor
    chosen: Tensor
    best: Tensor
    values: Tensor
    num_top: tuple[int, ...]

    def map(self, copy: Callable[[Tensor], Tensor]) -> "LogprobRows":
        """The same with each tensor copied."""
        return LogprobRows(
            rows=self.rows,
            token_ids=copy(self.token_ids),
            chosen=copy(self.chosen),
            best=copy(self.best),
            values=copy(self.values),
            num_top=self.num_top,
        )

    def read(self) -> list[TokenLogprob | None]:
        """One entry a row of these; None where the row failed. Waits for the device."""
        columns = (self.token_ids.tolist(), self.chosen.tolist(), self.best.tolist(), self.values.tolist())
        return [
            TokenLogprob(token_id, chosen, tuple(zip(best[:top], values[:top], strict=True))) if token_id >= 0 else None
            for token_id, chosen, best, values, top in zip(*columns, self.num_top, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Sampled:
    """
    What one step sampled.

    Args:
        token_ids: [rows] int64; -1 where the logits were not finite.
        logprobs: Of the rows that asked; None when no row did.
    """

    token_ids: Tensor
    logprobs: LogprobRows | None = None

    def read_logprobs(self) -> list[TokenLogprob | None]:
        """Empty when no row asked; else one a row, None where it did not ask or failed. Waits for the device."""
        if self.logprobs is None:
            return []
        entries: list[TokenLogprob | None] = [None] * len(self.token_ids)
        for row, entry in zip(self.logprobs.rows, self.logprobs.read(), strict=True):
            entries[row] = entry
        return entries


class Sampler:
    """
    Turns logits into tokens by the parameters that the state holds for each slot.

    Logits change in this order: penalties, bias, ends masked under min_tokens, the grammar's mask,
    temperature, min-p, top-k, top-p. Log-probabilities are those of the model, before all of it.
    """

    def __init__(self, state: SamplingState, vocab_size: int) -> None:
        self.state = state
        self.vocab_size = vocab_size

    def sample(self, logits: Tensor, slots: Sequence[int], features: Feature) -> Sampled:
        """
        Sample one token a row and advance the state by it.

        Args:
            logits: [rows, at least vocab_size] float; overwritten. Columns past vocab_size are
                padding of the model's and are never sampled.
            slots: The slot of each row; no slot twice.
            features: All that any of these rows needs.
        """
        logits = self._real_columns(logits)
        index = torch.tensor(slots, dtype=torch.int64, device=logits.device)
        asked = self._rows(slots, Feature.LOGPROBS) if features & Feature.LOGPROBS else []
        raw = logits[asked] if asked else None

        if features & Feature.PENALTY:
            self._penalise(logits, slots, index)
        if features & Feature.BIAS:
            for row, slot in enumerate(slots):
                if slot in self.state.bias:
                    tokens, values = self.state.bias[slot]
                    logits[row, tokens] += values.to(logits.dtype)
        if features & Feature.MIN_TOKENS:
            for row, slot in enumerate(slots):
                if slot in self.state.masked_ends:
                    # taken off, not set: a NaN or inf there still makes the row fail
                    logits[row, self.state.masked_ends[slot][0]] -= math.inf
        if features & Feature.GRAMMAR:
            self._mask(logits, slots)

        token_ids = self._draw(logits, index) if features & Feature.RANDOM else argmax(logits)
        self.state.advance(slots, index, token_ids)
        if raw is None:
            return Sampled(token_ids)
        num_top = tuple(self.state.num_top[slots[row]] for row in asked)
        return Sampled(token_ids, _logprob_rows(raw, tuple(asked), token_ids[asked], num_top))

    def prompt_logprobs(self, logits: Tensor, next_ids: Tensor | Sequence[int], top: int) -> LogprobRows:
        """
        Give the log-probability of the prompt token that follows each row.

        Args:
            logits: [rows, at least vocab_size] float, as the model gave them.
            next_ids: [rows]; one from vocab_size on is never sampled, and gets the least there is.
            top: How many of the best to add.
        """
        logits = self._real_columns(logits)
        ids = torch.as_tensor(next_ids, dtype=torch.int64, device=logits.device)
        return _logprob_rows(logits, tuple(range(len(ids))), ids, (min(top, self.vocab_size),) * len(ids))

    def _real_columns(self, logits: Tensor) -> Tensor:
        logits = logits[:, : self.vocab_size]
        return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()

    def _rows(self, slots: Sequence[int], feature: Feature) -> list[int]:
        return [row for row, slot in enumerate(slots) if feature in self.state.features[slot]]

    def _penalise(self, logits: Tensor, slots: Sequence[int], index: Tensor) -> None:
        rows = torch.tensor(self._rows(slots, Feature.PENALTY), dtype=torch.int64, device=logits.device)
        chosen = index[rows]
        strengths = self.state.knobs[chosen][:, [REPETITION, PRESENCE, FREQUENCY]]
        apply_penalties(logits, rows, chosen, self.state.in_prompt, self.state.output_counts, strengths)

    def _mask(self, logits: Tensor, slots: Sequence[int]) -> None:
        grammars = self.state.grammars
        rows = [row for row, slot in enumerate(slots) if slot in grammars]
        if rows:
            # the host fills these in while the device computes the logits
            masks = np.stack([grammars[slots[row]].mask() for row in rows])
            sent = self.state.sent
            apply_token_masks(logits, sent(torch.tensor(rows)), sent(torch.from_numpy(masks)))

    def _draw(self, logits: Tensor, index: Tensor) -> Tensor:
        state = self.state
        knobs = state.knobs[index]
        keys = draw_keys(state.streams[index], state.positions[index])
        return sample(logits, knobs[:, TEMPERATURE], state.top_k[index], knobs[:, TOP_P], knobs[:, MIN_P], keys)


def _logprob_rows(logits: Tensor, rows: tuple[int, ...], token_ids: Tensor, num_top: tuple[int, ...]) -> LogprobRows:
    ids = token_ids.clamp(0, logits.shape[1] - 1)
    chosen, best, values = token_logprobs(logits, ids, max(num_top, default=0))
    chosen = chosen.masked_fill(token_ids > ids, LOGPROB_FLOOR)
    return LogprobRows(rows, token_ids, chosen, best, values, num_top)
