"""
Jobs and results as they travel: the wire format (versions.py).

A job is JSON under the key d:<id>, or in an object; a result likewise under r:<id> (keys.py). Unknown
fields are refused, so that a misspelt option is an error and not a silent default.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from pagemill.errors import InvalidJob
from pagemill.grammars import check_grammar
from pagemill.ids import uuid7
from pagemill.reply_fields import ReplyContext, check_reply
from pagemill.trace_context import TraceContext
from pagemill.versions import SCHEMA_VERSION, TRACED_SINCE, check_fields, check_version

MAX_PAYLOAD_BYTES = 8 * 1024 * 1024

# no model reaches it; sums of estimates stay exact in the queue's counters
MAX_ANSWER_TOKENS = 2**24

# kept in the queue beside the result, and returned with it
MAX_METADATA_BYTES = 16 * 1024

MAX_STOP_BYTES = 1024

# of one object: each of them may be a fault, and a fault takes a kilobyte while it is told
MAX_FIELDS = 1024

# that a message names
MAX_FAULTS = 8

# what ids and tenants look like
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.@-]{0,127}$"

Lane = Literal["interactive", "standard", "bulk"]
LANES: tuple[Lane, ...] = ("interactive", "standard", "bulk")

FailureCode = Literal[
    "invalid_job",
    "empty_prompt",
    "prompt_too_long",
    "payload_too_large",
    "invalid_encoding",
    "unknown_model",
    "unsupported_version",
    "not_supported",
    "deadline_passed",
    "lost_payload",
    "engine_error",
    "poison",
    "invalid_grammar",
]

# of a job, what does not make it another one
_AROUND = {"id", "version", "traceparent", "tracestate"}

# options of which each binds the whole answer
GRAMMARS = ("json_schema", "regex", "choice")

_TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Name = Annotated[str, Field(pattern=NAME)]
_HeaderText = Annotated[str, Field(pattern=r"^[ -~]*$", max_length=2048)]


class _Wire(BaseModel):
    # a fault of ours is logged with its message, in which no prompt and no answer shall stand
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


def _few(value: Any) -> Any:
    """Refuse an object of very many fields before each of them is looked at."""
    if isinstance(value, dict) and len(value) > MAX_FIELDS:
        raise ValueError(f"{len(value):,} fields: want no more than {MAX_FIELDS:,}")
    return value


def _small(metadata: dict[str, str]) -> dict[str, str]:
    num_bytes = sum(_num_bytes(name) + _num_bytes(value) for name, value in metadata.items())
    if num_bytes > MAX_METADATA_BYTES:
        raise ValueError(f"metadata has {num_bytes:,} bytes: want no more than {MAX_METADATA_BYTES:,}")
    return metadata


Metadata = Annotated[dict[str, str], BeforeValidator(_few), AfterValidator(_small)]


class Message(_Wire):
    """One turn of a chat; the worker renders the model's own template."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class Options(_Wire):
    """
    How the answer is sampled and when it ends.

    `max_tokens` counts tokens of one answer. Temperature 0 is greedy. Without a seed the
    queue chooses one when the job is accepted, so that a retry draws the same tokens.
    `truncate` says what happens to a prompt that is too long: an error, or tokens cut from
    the left or right end.

    At most one of three binds the whole answer (docs/structured.md): `json_schema`, of which
    {"type": "object"} is any object; `regex`; `choice`, one of some texts.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    max_tokens: int = Field(256, ge=1, le=MAX_ANSWER_TOKENS)
    min_tokens: int = Field(0, ge=0, le=MAX_ANSWER_TOKENS)
    n: int = Field(1, ge=1, le=128)
    temperature: float = Field(0.0, ge=0, le=100)
    top_k: int = Field(0, ge=0, lt=2**31)
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Annotated[dict[_TokenId, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_few)] = Field(
        default_factory=dict
    )
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field((), max_length=16)
    stop_token_ids: tuple[_TokenId, ...] = Field((), max_length=64)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = Field(None, ge=0, le=20)
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    truncate: Literal["error", "left", "right"] = "error"
    json_schema: dict[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: Any) -> Any:
        return _few(value)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens} and max_tokens {self.max_tokens}: want no more")
        grammars = [name for name in GRAMMARS if getattr(self, name) is not None]
        if len(grammars) > 1:
            raise ValueError(f"{' and '.join(grammars)} are given: want one of them")
        longest = max((_num_bytes(text) for text in self.stop), default=0)
        if longest > MAX_STOP_BYTES:
            raise ValueError(f"a stop string has {longest:,} bytes: want no more than {MAX_STOP_BYTES:,}")
        return self


class Job(_Wire):
    """
    One prompt to be answered.

    Exactly one of `prompt` (text, or token ids) and `messages` (a chat) is given.

    Args:
        id: Made by the client (UUIDv7) and the default idempotency key: a submit of the
            same Job object can be repeated.
        model: The model that must answer; None takes what the queue serves.
        lane: Who waits: a person (interactive), a service (standard), nobody (bulk).
        tenant: Who pays; the queue is fair between tenants.
        timeout_s: Seconds from acceptance, by the server's clock, after which the answer is
            worth nothing: the job then ends as `expired`.
        result_ttl_s: Seconds that the result is kept.
        idempotency_key: Two submits with the same key are one job; the same key with
            another content is a Conflict.
        stream: Also publish tokens while they are generated.
        result_store: "auto" puts large results into the object store, "object" all of them.
        batch: The batch that the job is counted in; it must be open.
        reply_to: The stream of replies that is told of the end, once (replies.py).
        reply_context: Handed back with that reply; never read. At most 256 KiB.
        metadata: Returned with the result; never read. At most 16 KiB.
        traceparent, tracestate: The trace that the job belongs to, as W3C's headers of these names.
    """

    version: int = SCHEMA_VERSION
    id: Name = Field(default_factory=uuid7)
    model: str | None = None
    prompt: str | Annotated[tuple[int, ...], Field(fail_fast=True)] | None = None
    messages: Annotated[tuple[Message, ...], Field(fail_fast=True)] | None = None
    options: Options = Options()
    lane: Lane = "standard"
    tenant: Name = "default"
    timeout_s: float | None = Field(None, gt=0, le=30 * 86400, allow_inf_nan=False)
    result_ttl_s: int = Field(86400, ge=1, le=30 * 86400)
    idempotency_key: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    stream: bool = False
    result_store: Literal["auto", "redis", "object"] = "auto"
    batch: Name | None = None
    reply_to: Name | None = None
    reply_context: ReplyContext | None = None
    metadata: Metadata = Field(default_factory=dict)
    traceparent: _HeaderText | None = None
    tracestate: _HeaderText | None = None

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: Any) -> Any:
        return _few(value)

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give exactly one of prompt and messages")
        check_reply(self.reply_to, self.reply_context)
        return self

    @classmethod
    def build(cls, **fields: Any) -> Self:
        """
        Validate the fields of a job.

        Raises:
            InvalidJob: with a code and every fault in one message.
        """
        try:
            job = cls.model_validate(fields)
        except ValidationError as error:
            raise InvalidJob("invalid_job", explain(error)) from None
        job.check()
        return job

    @classmethod
    def parse(cls, payload: bytes, taker: int = SCHEMA_VERSION) -> Self:
        """
        Read a job from its payload, for a worker of version `taker`; one without a version is of that.

        Raises:
            InvalidJob: with the code that its failure result carries.
            NewerVersion: it is of a later version.
        """
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise InvalidJob("payload_too_large", _too_large(len(payload)))
        try:
            payload.decode()
        except UnicodeDecodeError as error:
            message = f"the payload is not UTF-8: {error.reason} at byte {error.start}"
            raise InvalidJob("invalid_encoding", message) from None
        try:
            job = cls.model_validate_json(payload)
        except ValidationError as error:
            # of a later version's field we can only say that it is unknown: the number says more
            if (version := _version_in(payload)) is not None:
                check_version(version, taker)
            raise InvalidJob("invalid_job", explain(error)) from None
        if "version" not in job.model_fields_set:
            job = job.model_copy(update={"version": taker})
        job.check(taker)
        return job

    def check(self, taker: int = SCHEMA_VERSION) -> None:
        """
        Refuse what the schema can say but no worker of version `taker` can serve.

        Raises:
            InvalidJob: invalid_job, unsupported_version, invalid_grammar or empty_prompt.
        """
        check_version(self.version, taker)
        options = self.options
        # version 1 had json_schema, as a name without use: null says nothing
        given = [name for name in options.model_fields_set if name != "json_schema" or options.json_schema is not None]
        check_fields(self.version, [*self.model_fields_set, *(f"options.{name}" for name in given)])
        check_grammar(options.json_schema, options.regex, options.choice)
        if self.prompt is not None and len(self.prompt) == 0:
            raise InvalidJob("empty_prompt", "the prompt is empty: give at least one character or token")
        if self.messages is not None and len(self.messages) == 0:
            raise InvalidJob("empty_prompt", "messages is empty: give at least one message")

    def body(self) -> bytes:
        """
        As JSON, without id, version and trace: what makes two jobs the same.

        Raises:
            InvalidJob: invalid_encoding, where a text has lone surrogates.
        """
        try:
            return self.model_dump_json(exclude_unset=True, exclude=_AROUND).encode()
        except ValueError as error:
            raise InvalidJob("invalid_encoding", f"the job cannot be written as UTF-8: {error}") from None

    def payload(self) -> bytes:
        """
        As JSON: what was given, and always the version and the id.

        Raises:
            InvalidJob: payload_too_large or invalid_encoding.
        """
        return self.wrap(self.body())

    def wrap(self, body: bytes, trace: TraceContext | None = None) -> bytes:
        """
        The payload around a body, with `trace` where the job says none.

        Raises:
            InvalidJob: payload_too_large.
        """
        # a body has a prompt or messages, so there is always a field to follow
        trace = TraceContext(self.traceparent, self.tracestate or "") if self.traceparent else trace
        traced = trace.members() if trace and self.version >= TRACED_SINCE else b""
        text = b'{"version":%d,"id":"%b",%b%b' % (self.version, self.id.encode(), traced, body[1:])
        if len(text) > MAX_PAYLOAD_BYTES:
            raise InvalidJob("payload_too_large", _too_large(len(text)))
        return text

    def estimated_tokens(self) -> int:
        """Tokens of KV cache that the job may take; trued up when it finishes."""
        if self.prompt is not None:
            prompt = len(self.prompt) if isinstance(self.prompt, tuple) else _tokens_of(self.prompt)
        else:
            prompt = sum(_tokens_of(message.content) + 8 for message in self.messages or ())
        return prompt + self.options.max_tokens * self.options.n


class Usage(_Wire):
    """
    What one job took; cached_tokens of the prompt were found in the prefix cache.

    `gpu_ms` is the job's share of the engine's time: each step is shared equally by the requests
    in the engine, so that the shares of all jobs add up to the time that it worked.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    gpu_ms: int = 0


class TokenLogprob(_Wire):
    """A token's natural log-probability, and the best tokens at its place."""

    token_id: int
    token: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()


class Completion(_Wire):
    """One answer; finish_reason is "abort" where the job was cancelled or expired meanwhile."""

    index: int
    text: str
    finish_reason: Literal["stop", "length", "abort"]
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None


class Failure(_Wire):
    """Why a job has no answer, in words for whoever submitted it."""

    code: FailureCode
    message: str


ResultStatus = Literal["done", "failed", "cancelled", "expired"]


class Result(_Wire):
    """
    How a job ended. There is exactly one for each accepted job.

    A cancelled or expired job keeps the text that it had. Times are milliseconds of the
    server's clock. `version` is that of its JSON, which may lack what came later.
    """

    version: int = SCHEMA_VERSION
    job_id: str
    status: ResultStatus
    completions: tuple[Completion, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    usage: Usage = Usage()
    failure: Failure | None = None
    model: str | None = None
    worker: str | None = None
    attempt: int = 1
    accepted_ms: int = 0
    started_ms: int = 0
    metadata: dict[str, str] = Field(default_factory=dict)

    @property
    def text(self) -> str:
        """The first answer's text; empty where there is none."""
        return self.completions[0].text if self.completions else ""

    def payload(self) -> bytes:
        """As JSON of its version: what was given and is known there, and always the version."""
        later = {} if self.version >= 2 else {"usage": {"gpu_ms"}}
        # four times as fast as leaving out what equals its default
        text = self.model_dump_json(exclude_unset=True, exclude={"version": True, **later}).encode()
        return b'{"version":%d,%b' % (self.version, text[1:])


def explain(error: ValidationError) -> str:
    """The first faults of a validation: where, what, and the value; short, whatever the job holds."""
    faults = error.errors(include_url=False, include_context=False)
    lines = []
    for fault in faults[:MAX_FAULTS]:
        where = _shorten(".".join(map(str, fault["loc"])) or "job")
        if fault["type"] == "extra_forbidden":
            lines.append(f"{where}: unknown field")
        elif fault["type"] == "missing":
            # the value would be all that is around it
            lines.append(f"{where}: {fault['msg']}")
        else:
            lines.append(f"{where}: {fault['msg']} (got {_show(fault['input'])})")
    if len(faults) > MAX_FAULTS:
        lines.append(f"and {len(faults) - MAX_FAULTS:,} more")
    return "; ".join(lines)


def _version_in(payload: bytes) -> int | None:
    """The version that a payload says, whatever else is in it."""
    try:
        value = from_json(payload)
    except ValueError:
        return None
    version = value.get("version") if isinstance(value, dict) else None
    return version if type(version) is int else None


def _show(value: object) -> str:
    # the whole of a large value is not worth its text
    if isinstance(value, str | bytes):
        return _shorten(repr(value[:81]))
    if isinstance(value, list | tuple | dict) and len(value) > 8:
        return f"{type(value).__name__} of {len(value):,}"
    return _shorten(repr(value))


def _shorten(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def _too_large(num_bytes: int) -> str:
    sizes = f"{num_bytes:,} bytes and the queue takes {MAX_PAYLOAD_BYTES:,}"
    return f"the job has {sizes}: shorten it, or split the document"


def _num_bytes(text: str) -> int:
    return len(text.encode(errors="replace"))


def _tokens_of(text: str) -> int:
    return -(-_num_bytes(text) // 3)
