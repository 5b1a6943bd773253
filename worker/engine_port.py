"""What the worker needs of an engine: the real one and the fake one fit."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from engine.request import Capacity, Progress, Request, RequestOutput, StepOutputs, TokenIds


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
    def num_sheds(self) -> int: ...

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
