"""What sampling keeps by slot: parameters, random streams, positions, and penalty counts."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from engine.grammar import GrammarState
from engine.request import TokenIds
from engine.sampling_params import Feature, SamplingParams
from kernels.random_draws import stream_words

# columns of SamplingState.knobs
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)


class SamplingState:
    """
    One row per slot, set anew by `join` and advanced by one token at each `advance`.

    What a request says once lives here, so that a step brings slot numbers alone. A slot
    holds one sequence at a time; a sequence that comes back after preemption, or from another
    engine, joins with the output it has, and everything is rebuilt from that.

    Token ids outside the vocabulary, in a bias or among stop ids, are passed over: such a
    token is never sampled.

    Args:
        vocab_size: Ids that may be sampled: 0 to vocab_size - 1.
        eos_token_ids: The model's own ends; masked while a sequence is under its min_tokens.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        device: torch.device | str = "cpu",
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.device = torch.device(device)

        # [max_num_seqs] int64; 0 where a row failed: it ends, but its next step may run already
        self.last_token = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        # [max_num_seqs] int32: place in the answer of the token to be sampled next
        self.positions = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self.streams = torch.zeros(max_num_seqs, 2, dtype=torch.int32, device=device)
        self.knobs = torch.zeros(max_num_seqs, 6, dtype=torch.float32, device=device)
        self.top_k = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)

        # known to the host, which picks the rows that need more than an argmax
        self.features = [Feature.GREEDY] * max_num_seqs
        self.num_top = [0] * max_num_seqs
        # slot to (token ids, what is added to their logits)
        self.bias: dict[int, tuple[Tensor, Tensor]] = {}
        # slot to (tokens that end the answer, how many more times they are masked)
        self.masked_ends: dict[int, tuple[Tensor, int]] = {}
        # slot to what says which tokens may follow; moved on by whoever takes in the slot's tokens
        self.grammars: dict[int, GrammarState] = {}

        # [max_num_seqs, vocab_size] bool and int32: 12 MB for 48 slots of 49,152, so made at first use
        self._in_prompt: Tensor | None = None
        self._output_counts: Tensor | None = None

    def join(
        self,
        slot: int,
        params: SamplingParams,
        index: int,
        prompt: TokenIds,
        output: Sequence[int],
        grammar: GrammarState | None = None,
    ) -> None:
        """
        Give a slot to a sequence, whoever had it before.

        Args:
            index: Which of the request's answers this is.
            prompt: [num_prompt_tokens], at least one token.
            output: Tokens generated so far, all of them known.
            grammar: Where they stand in the answer's grammar; it says when ends are allowed, in place of min_tokens.
        """
        self.last_token[slot] = int(output[-1] if len(output) else prompt[-1])
        self.positions[slot] = len(output)
        self.streams[slot] = torch.tensor(stream_words(params.seed, index), dtype=torch.int32)
        self.knobs[slot] = torch.tensor(knob_row(params), dtype=torch.float32)
        self.top_k[slot] = min(params.top_k, self.vocab_size)
        self.remember(slot, params, prompt, output, grammar)

    def remember(
        self,
        slot: int,
        params: SamplingParams,
        prompt: TokenIds,
        output: Sequence[int],
        grammar: GrammarState | None = None,
    ) -> None:
        """The part of `join` that is no row of a small tensor: for those who write the rows themselves."""
        self.features[slot] = params.features
        self.num_top[slot] = min(params.logprobs or 0, self.vocab_size)

        self._set_bias(slot, params)
        self.masked_ends.pop(slot, None)
        self.grammars.pop(slot, None)
        if grammar is None:
            self._set_masked_ends(slot, params, len(output))
        else:
            self.grammars[slot] = grammar
        if Feature.PENALTY in params.features:
            self._count(slot, prompt, output)

    def leave(self, slot: int) -> None:
        """Forget a slot's sequence; the slot may be joined again, now or later."""
        self.features[slot] = Feature.GREEDY
        self.bias.pop(slot, None)
        self.masked_ends.pop(slot, None)
        self.grammars.pop(slot, None)

    def advance(self, slots: Sequence[int], index: Tensor, token_ids: Tensor) -> None:
        """
        Note the token that each slot just sampled.

        Args:
            slots: Each slot once.
            index: The same as int64 on the device.
            token_ids: [len(slots)] int64; -1 where the row failed.
        """
        tokens = token_ids.clamp(min=0)
        self.last_token[index] = tokens
        self.positions[index] += 1
        for slot in self.masked_ends.keys() & set(slots):
            ends, times = self.masked_ends.pop(slot)
            if times > 1:
                self.masked_ends[slot] = (ends, times - 1)

        rows = [row for row, slot in enumerate(slots) if Feature.PENALTY in self.features[slot]]
        if rows:
            self.output_counts[index[rows], tokens[rows]] += 1

    @property
    def in_prompt(self) -> Tensor:
        """[max_num_seqs, vocab_size] bool; right for slots with penalties."""
        if self._in_prompt is None:
            self._in_prompt = torch.zeros(self.max_num_seqs, self.vocab_size, dtype=torch.bool, device=self.device)
        return self._in_prompt

    @property
    def output_counts(self) -> Tensor:
        """[max_num_seqs, vocab_size] int32; right for slots with penalties."""
        if self._output_counts is None:
            self._output_counts = torch.zeros(self.max_num_seqs, self.vocab_size, dtype=torch.int32, device=self.device)
        return self._output_counts

    def _count(self, slot: int, prompt: TokenIds, output: Sequence[int]) -> None:
        # from the split as it is: what was generated never becomes part of the prompt
        in_prompt, counts = self.in_prompt[slot], self.output_counts[slot]
        in_prompt.zero_()
        in_prompt[self._known_ids(prompt)] = True
        counts.zero_()
        if len(output):
            known = self._known_ids(output)
            counts.index_add_(0, known, torch.ones_like(known, dtype=counts.dtype))

    def _set_bias(self, slot: int, params: SamplingParams) -> None:
        self.bias.pop(slot, None)
        inside = {token: bias for token, bias in params.logit_bias.items() if 0 <= token < self.vocab_size}
        if inside:
            values = torch.tensor(list(inside.values()), dtype=torch.float32)
            self.bias[slot] = (self._known_ids(list(inside)), self.sent(values))

    def _set_masked_ends(self, slot: int, params: SamplingParams, num_output: int) -> None:
        ends = set(params.stop_token_ids)
        if not params.ignore_eos:
            ends |= self.eos_token_ids
        if num_output < params.min_tokens and ends:
            self.masked_ends[slot] = (self._known_ids(sorted(ends)), params.min_tokens - num_output)

    def _known_ids(self, ids: TokenIds | Sequence[int]) -> Tensor:
        tokens = torch.as_tensor(ids, dtype=torch.int64)
        return self.sent(tokens[(tokens >= 0) & (tokens < self.vocab_size)])

    def sent(self, values: Tensor) -> Tensor:
        """Values of the host on the device, on their way there at least."""
        # from pageable memory a copy would wait for all the steps in flight
        return values.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else values


def knob_row(params: SamplingParams) -> list[float]:
    """One row of `SamplingState.knobs`."""
    row = [0.0] * 6
    row[TEMPERATURE] = 0.0 if params.greedy else params.temperature
    row[TOP_P] = params.top_p
    row[MIN_P] = params.min_p
    row[REPETITION] = params.repetition_penalty
    row[PRESENCE] = params.presence_penalty
    row[FREQUENCY] = params.frequency_penalty
    return row
