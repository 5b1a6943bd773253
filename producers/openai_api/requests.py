"""
Requests of /v1/chat/completions and /v1/completions, as the official client sends them.

Null counts as not given. What cannot be served is refused by name, unless it says what would happen
anyway: `tools: []`, `modalities: ["text"]`.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import from_json

from producers.openai_api.errors import bad_request, of_validation
from producers.openai_api.fields import Sampling, Taken, TokenId, only, unless_null, wrong

T = TypeVar("T", bound=Taken)

# prompts of one request; each is a job
MAX_PROMPTS = 256


def _text_of(content: Any) -> Any:
    """The text of a message: as it is, or the text parts end to end."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in ("text", "refusal") or not isinstance(text := part.get(kind), str):
            raise wrong(f"has a part of type {str(kind)[:40]!r}: only text parts are supported")
        texts.append(text)
    return "".join(texts)


class ChatMessage(Taken):
    """One turn of a chat; whose `name` it is no template says, so it is left out."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_text_of)] = None
    name: str | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    tool_calls: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only()] = None
    audio: Annotated[Any, only()] = None
    annotations: Annotated[Any, only([])] = None

    @model_validator(mode="after")
    def _says_something(self) -> "ChatMessage":
        if self.content is None and self.refusal is None:
            raise wrong(f"a message of role {self.role} has no content: want a text or text parts")
        return self

    @property
    def text(self) -> str:
        return self.content if self.content is not None else self.refusal or ""


class ChatRequest(Sampling):
    """The body of /v1/chat/completions."""

    messages: Annotated[tuple[ChatMessage, ...], Field(fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**24)] | None = None
    logprobs: Annotated[bool, unless_null(False)] = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    tools: Annotated[Any, only([])] = None
    tool_choice: Annotated[Any, only("none", "auto")] = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only("none", "auto")] = None
    modalities: Annotated[Any, only(["text"])] = None
    audio: Annotated[Any, only()] = None
    prediction: Annotated[Any, only()] = None
    reasoning_effort: Annotated[Any, only("none")] = None
    verbosity: Annotated[Any, only("medium")] = None
    web_search_options: Annotated[Any, only()] = None

    @model_validator(mode="after")
    def _agrees(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise wrong("top_logprobs goes with logprobs: true")
        if self.max_tokens == 0:
            raise wrong("max_tokens is 0: want 1 or more")
        return self

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives at each place of the answer; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


Prompt = str | tuple[int, ...]


def _prompts(value: Any) -> Any:
    """One text, several, the ids of one, or the ids of several: always as several."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise wrong("want a text, a list of texts, a list of token ids, or a list of those")
    if type(value[0]) is int:
        value = [value]
    if len(value) > MAX_PROMPTS:
        raise wrong(f"has {len(value):,} prompts: want no more than {MAX_PROMPTS}; or use a batch")
    return value


PromptIds = Annotated[tuple[Annotated[TokenId, Field(strict=True)], ...], Field(fail_fast=True)]
Prompts = Annotated[tuple[str | PromptIds, ...], Field(fail_fast=True), BeforeValidator(_prompts)]


class CompletionRequest(Sampling):
    """The body of /v1/completions."""

    prompt: Prompts
    echo: Annotated[bool, unless_null(False)] = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    suffix: Annotated[Any, only("")] = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _agrees(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != self.n:
            raise wrong(f"best_of is {self.best_of} and n is {self.n}: only best_of equal to n is supported")
        if self.max_tokens == 0 and not self.echo:
            raise wrong("max_tokens is 0: want 1 or more, or echo: true for the prompt alone")
        if self.echo and self.logprobs is None and any(not isinstance(prompt, str) for prompt in self.prompt):
            raise wrong("echo of token ids goes with logprobs, which have their text")
        if self.echo and self.stream:
            raise wrong("echo does not go with stream")
        return self

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


def read_json(body: bytes) -> dict[str, Any]:
    """
    The object that a request's body is.

    Raises:
        ApiError: 400, it is not UTF-8, not JSON, or another value.
    """
    try:
        body.decode()
    except UnicodeDecodeError as error:
        message = f"the body is not UTF-8: {error.reason} at byte {error.start}"
        raise bad_request(message, code="invalid_encoding") from None
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request("the body is not a JSON object", code="invalid_json")
    return value


def parse(kind: type[T], fields: dict[str, Any]) -> T:
    """
    Validate the fields of a request.

    Raises:
        ApiError: 400, with the first faults and the first one's name.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise of_validation(error) from None
