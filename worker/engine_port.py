"""What the worker needs of an engine, and of whatever runs one: a thread of this process, or another process."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeVar

from engine.capacity import Capacity
from engine.errors import EngineError, RequestError
from engine.request import Progress, Request, RequestOutput, StepOutputs, TextDelta, TokenIds
from worker.timings import Timings

T = TypeVar("T")


class EngineGone(EngineError):
    """Raised when the engine has ended and cannot answer."""


class Tokenizer(Protocol):
    """Text to token ids and back; safe to use from several threads."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_token_id(self) -> int | None: ...

    def encode(self, text: str) -> TokenIds: ...

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str: ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> TokenIds: ...

    def token_text(self, token_id: int) -> str: ...

    def to_json(self) -> str:
        """As tokenizer.json, for whoever counts tokens elsewhere."""
        ...


class EngineStats(Protocol):
    """Counters of an engine, from its start."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_swapped(self) -> int: ...

    @property
    def kv_usage(self) -> float: ...

    @property
    def num_steps(self) -> int: ...

    @property
    def num_preemptions(self) -> int: ...

    @property
    def num_sheds(self) -> int: ...

    @property
    def prefix_hit_tokens(self) -> int: ...

    @property
    def prefix_query_tokens(self) -> int: ...

    @property
    def generated_tokens(self) -> int: ...

    @property
    def prompt_tokens(self) -> int: ...


class Engine(Protocol):
    """
    A batch of requests that advances step by step; one thread touches it.

    `model_name`, `fingerprint`, `kv_tokens` and the limits `max_...` do not change
    and may be read from anywhere.
    """

    @property
    def model_name(self) -> str: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def max_num_seqs(self) -> int: ...

    @property
    def max_num_batched_tokens(self) -> int: ...

    @property
    def kv_tokens(self) -> int: ...

    @property
    def has_work(self) -> bool: ...

    def add(self, request: Request) -> None: ...

    def abort(self, request_id: str) -> RequestOutput | None: ...

    def step(self) -> StepOutputs: ...

    def capacity(self) -> Capacity: ...

    def stats(self) -> EngineStats: ...

    def progress(self, known: Mapping[str, Sequence[int]]) -> dict[str, list[Progress]]: ...

    def num_started(self, request_id: str) -> int: ...


def progress(engine: Engine, known: Mapping[str, Sequence[int]]) -> dict[str, list[Progress]]:
    """
    As `Engine.progress`, for `EngineDoor.call`: the engine's process finds it by name, and has loaded this
    module, while another would have to be loaded between two steps.
    """
    return engine.progress(known)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """
    What does not change of an engine.

    Args:
        gpu: The GPU that it computes on, as the driver names it; empty for a CPU.
    """

    model_name: str
    fingerprint: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_tokens: int
    gpu: str = ""

    @classmethod
    def of(cls, engine: Engine, *, gpu: str = "") -> Self:
        return cls(
            model_name=engine.model_name,
            fingerprint=engine.fingerprint,
            max_model_len=engine.max_model_len,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            kv_tokens=engine.kv_tokens,
            gpu=gpu,
        )


@dataclass(slots=True)
class Turn:
    """What the engine took and gave since the turn before."""

    added: list[str] = field(default_factory=list)
    rejected: list[tuple[str, RequestError]] = field(default_factory=list)
    finished: list[RequestOutput] = field(default_factory=list)
    deltas: list[TextDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.added or self.rejected or self.finished or self.deltas)


class EngineDoor(Protocol):
    """
    The way to an engine that runs elsewhere; all is called on the event loop, the callbacks too.

    After `on_crash` the engine is over: its state is not to be trusted, nothing else is delivered.
    """

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def capacity(self) -> Capacity:
        """What the engine could take, as it last said; so are its stats."""
        ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def timings(self) -> Timings: ...

    @property
    def alive(self) -> bool: ...

    @property
    def step_age_s(self) -> float:
        """For how long the engine has been at what it does now; 0 while it idles."""
        ...

    def start(self, *, on_turns: Callable[[list[Turn]], None], on_crash: Callable[[BaseException], None]) -> None:
        """
        Deliver to the running event loop from now on.

        Args:
            on_turns: Takes what came out, oldest first; and nothing, where there may be room for more.
            on_crash: Takes what has ended the engine.
        """
        ...

    def add(self, requests: Iterable[Request]) -> None:
        """Queue requests; a later turn names each as added or rejected."""
        ...

    async def abort(self, request_ids: Iterable[str], *, unstarted_only: bool = False) -> dict[str, RequestOutput]:
        """
        Take requests out of the engine, between two steps; what each has, of those that were in it.

        Args:
            unstarted_only: Leave those in it of which something has been computed.

        Raises:
            EngineGone: as `call`.
        """
        ...

    async def call(self, command: Callable[[Engine], T]) -> T:
        """
        Run `command` on the engine between two steps and return what it returns.

        Args:
            command: What pickle takes: a function of this module, or a partial of one.

        Raises:
            EngineGone: the engine has ended before it could answer.
        """
        ...

    async def stop(self) -> None:
        """Let the step that runs end, then end the engine."""
        ...

    async def kill(self) -> None:
        """End the engine at once, where that can be done: a thread ends with its process alone."""
        ...
