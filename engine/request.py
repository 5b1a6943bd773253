"""What travels inside the engine: requests, the steps that advance them, and what comes out."""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from itertools import takewhile
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.errors import RequestError
from engine.grammar import GrammarState
from engine.sampling_params import SamplingParams
from engine.sequence_tokens import SequenceTokens

TokenIds = NDArray[np.int32]

# those that capacity tells apart: interactive, standard, bulk
PRIORITIES = (0, 1, 2)
# nobody waits for these: the engine may put them in the order in which all of them end soonest
BULK = PRIORITIES[-1]


class Status(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's natural log-probability and the best others at its place, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """
    What one answer has so far, or a piece of it: what is saved of it, and what another engine continues.

    Args:
        logprobs: One a token, where they were asked for.
        finish_reason: Why it has ended; None where it goes on.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None


NO_PROGRESS = Progress()


@dataclass(frozen=True, slots=True)
class Request:
    """
    One prompt to be completed, once or `params.n` times.

    Args:
        request_id: Unique among the requests that are not finished.
        prompt: [num_prompt_tokens] int32, at least one token.
        params: Sampling options.
        cache_salt: Prompts share cached blocks only with prompts of the same salt.
        resumed: What another engine has made of it already, one per answer; empty for nothing.
        priority: Lower is served first and preempted last.
        stream: Give text deltas while it runs.
        has_deadline: It is ended at some time, answered or not, and so starts as soon as there is room.
        timed: Its output is to have its times.
    """

    request_id: str
    prompt: TokenIds
    params: SamplingParams
    cache_salt: str | None = None
    resumed: tuple[Progress, ...] = ()
    priority: int = 0
    stream: bool = False
    has_deadline: bool = False
    timed: bool = False


class Sequence(SequenceTokens):
    """One answer in the making: its tokens, its blocks, and where it is in its life."""

    __slots__ = (
        "block_hashes",
        "block_table",
        "finish_reason",
        "grammar",
        "host_blocks",
        "index",
        "num_cached",
        "num_committed",
        "num_known_at_start",
        "num_preemptions",
        "request",
        "slot",
        "status",
    )

    def __init__(self, request: Request, index: int, grammar: GrammarState | None = None) -> None:
        self.request = request
        self.index = index
        # what its tokens so far leave of its grammar; moved on by whoever takes in its tokens
        self.grammar = grammar
        super().__init__(request.prompt, self.resumed.token_ids)
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None

        # a row of the device state while it runs; -1 otherwise
        self.slot = -1
        self.block_table: list[int] = []
        self.host_blocks: list[int] = []
        # hashes of the full blocks whose tokens are known, in order
        self.block_hashes: list[bytes] = []

        # prompt tokens found in the prefix cache when it was first admitted
        self.num_cached = 0
        # leading blocks that are in the prefix cache under their hash
        self.num_committed = 0
        # what it knew when it was given its blocks: with the next token that comes, all of that is computed
        self.num_known_at_start = 0
        self.num_preemptions = 0

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def resumed(self) -> Progress:
        """What it brought from another engine."""
        return self.request.resumed[self.index] if self.request.resumed else NO_PROGRESS

    @property
    def newest_block(self) -> int:
        """The last of its block table; 0, the null block, where there is none."""
        return self.block_table[-1] if self.block_table else 0

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.request_id}#{self.index}, {self.status.value}, "
            f"{self.num_prompt_tokens}+{self.num_output}+{self.num_in_flight} tokens, "
            f"{self.num_computed} computed, {len(self.block_table)} blocks)"
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """
    The tokens of one sequence that one step computes: positions start to start + length.

    A prompt is one long chunk or several; a decode is a chunk of 1. A chunk that reaches
    the sequence's last token samples the next one. `join` marks the first chunk since the
    sequence took its slot: what the device keeps by slot is then set anew.
    """

    sequence: Sequence
    start: int
    length: int
    samples: bool
    join: bool = False

    @property
    def predicted_prompt(self) -> TokenIds:
        """The prompt's tokens that its own tokens predict, in order: the prompt's last one predicts the answer."""
        return self.sequence.prompt[self.start + 1 : self.start + self.length + 1]


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """One KV block to copy between device and host: ids in the two pools."""

    device_block: int
    host_block: int


@dataclass(frozen=True, slots=True)
class Decodes:
    """
    Chunks of one token that sample the next, of sequences that had their slots before: by column.

    Args:
        sequences: In the order of the rows; not to be changed.
        slots: [num_decodes] int64; a sequence may leave its slot after the step was planned.
        starts: [num_decodes] int32, the position of each one's token.
        blocks: [num_decodes] int32, the block of that token, which is the newest of the table.
        last: [num_decodes] bool: the answer ends by length with the token that is sampled.
    """

    sequences: list[Sequence]
    slots: NDArray[np.int64]
    starts: NDArray[np.int32]
    blocks: NDArray[np.int32]
    last: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.sequences)

    @classmethod
    def of(cls, chunks: SequenceOf[Chunk]) -> "Decodes":
        """Put such chunks, whose ends nobody knows, in columns."""
        return cls(
            sequences=[chunk.sequence for chunk in chunks],
            slots=np.array([chunk.sequence.slot for chunk in chunks], dtype=np.int64),
            starts=np.array([chunk.start for chunk in chunks], dtype=np.int32),
            blocks=np.array([chunk.sequence.newest_block for chunk in chunks], dtype=np.int32),
            last=np.zeros(len(chunks), dtype=np.bool_),
        )

    def followed_by(self, others: "Decodes") -> "Decodes":
        """These, then others, of other sequences."""
        return Decodes(
            sequences=self.sequences + others.sequences,
            slots=np.concatenate([self.slots, others.slots]),
            starts=np.concatenate([self.starts, others.starts]),
            blocks=np.concatenate([self.blocks, others.blocks]),
            last=np.concatenate([self.last, others.last]),
        )

    def chunks(self) -> Iterator[Chunk]:
        """The same, one by one."""
        for sequence, start in zip(self.sequences, self.starts.tolist(), strict=True):
            yield Chunk(sequence, start, 1, True)


NO_DECODES = Decodes.of(())


class Step:
    """
    What the next forward does; nothing of it has happened yet.

    The runner performs swap_out, then swap_in, then the forward over `chunks`, in order. The
    first `num_decodes` of them are the decodes, which are kept in columns: a runner of many
    sequences reads `decodes`, and of the chunks `prefill_chunks` alone.

    Args:
        chunks: All of them, or those after `decodes` where these are given.
        left: The slots given up since the step before.
    """

    __slots__ = ("_chunks", "decodes", "left", "prefill_chunks", "step_id", "swap_in", "swap_out")

    def __init__(
        self,
        step_id: int,
        chunks: tuple[Chunk, ...],
        swap_out: tuple[BlockCopy, ...] = (),
        swap_in: tuple[BlockCopy, ...] = (),
        left: tuple[int, ...] = (),
        decodes: Decodes | None = None,
    ) -> None:
        self.step_id = step_id
        self.swap_out = swap_out
        self.swap_in = swap_in
        self.left = left
        self._chunks: tuple[Chunk, ...] | None = None
        if decodes is None:
            self._chunks = chunks
            num_decodes = sum(1 for _ in takewhile(_is_decode, chunks))
            decodes, chunks = Decodes.of(chunks[:num_decodes]), chunks[num_decodes:]
        self.decodes = decodes
        self.prefill_chunks = chunks

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """All chunks, the decodes first; made when they are first asked for."""
        if self._chunks is None:
            self._chunks = (*self.decodes.chunks(), *self.prefill_chunks)
        return self._chunks

    @property
    def sampling(self) -> tuple[Chunk, ...]:
        """The chunks that sample a token, in order."""
        return tuple(chunk for chunk in self.chunks if chunk.samples)

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences of `sampling`; not to be changed."""
        others = [chunk.sequence for chunk in self.prefill_chunks if chunk.samples]
        return self.decodes.sequences + others if others else self.decodes.sequences

    @property
    def num_decodes(self) -> int:
        return len(self.decodes)

    @property
    def num_sampling(self) -> int:
        return len(self.decodes) + sum(chunk.samples for chunk in self.prefill_chunks)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(chunk.length for chunk in self.prefill_chunks)

    def __repr__(self) -> str:
        return f"Step({self.step_id}, {self.num_decodes} decodes, {len(self.prefill_chunks)} other chunks)"


def _is_decode(chunk: Chunk) -> bool:
    return chunk.length == 1 and chunk.samples and not chunk.join


@dataclass(frozen=True, slots=True)
class StepResult:
    """
    What a step's forward gave, in the order of `Step.sampling`.

    Args:
        token_ids: [num sampling chunks] int64; -1 where the logits were not finite.
        logprobs: One per sampling chunk, or empty when no request asked; None for rows that did not.
        prompt_logprobs: Index into `Step.chunks` to the log-probabilities of the prompt tokens
            start + 1 to start + length that lie within the prompt.
    """

    token_ids: NDArray[np.int64]
    logprobs: SequenceOf[TokenLogprob | None] = ()
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)


class Ticket(Protocol):
    """A launched step."""

    def result(self) -> StepResult:
        """Wait for the step and return what it sampled."""
        ...


class Runner(Protocol):
    """What performs steps: the model on a device, or a fake in tests."""

    def launch(self, step: Step) -> Ticket:
        """
        Start a step and return at once where the device allows it.

        A step that fails here, or in its result, may have done anything but to keep slots that were left.
        """
        ...


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished answer. `error` says what happened where finish_reason is "error"."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """When a request was in a step for the first time, and had its first token; by the monotonic clock."""

    started: float | None = None
    answered: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """
    A finished request with all its answers, by index.

    `gpu_ms`, its share of the engine's time, and `times` are set by whoever steps the engine.
    """

    request_id: str
    completions: tuple[Completion, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    num_preemptions: int = 0
    gpu_ms: int = 0
    times: RequestTimes | None = None


@dataclass(frozen=True, slots=True)
class TextDelta:
    """
    New text of a streaming request, after `num_tokens` tokens of that answer.

    The deltas of an answer join to its text; those of a resumed one begin with what was resumed.
    """

    request_id: str
    index: int
    text: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """
    What one turn of the engine gave to the outside.

    Args:
        rejected: Requests that were added, and can never be served.
        started: Requests that are in a step for the first time.
        answered: Requests of which the first token has come.
    """

    finished: tuple[RequestOutput, ...] = ()
    deltas: tuple[TextDelta, ...] = ()
    rejected: tuple[tuple[str, RequestError], ...] = ()
    started: tuple[str, ...] = ()
    answered: tuple[str, ...] = ()
