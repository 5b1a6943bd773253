"""The fields that chat and plain completions share, and what may stand in them."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from pagemill.schema import MAX_FIELDS, Metadata


def wrong(message: str) -> PydanticCustomError:
    """What a validator raises, with a text of our own."""
    # the text may have braces, which the error would fill in
    return PydanticCustomError("not_supported", "{message}", {"message": message})


def only(*harmless: Any) -> Any:
    """What a field must be that is taken where it says what happens anyway, and refused otherwise."""
    shown = ", ".join("null" if value is None else repr(value) for value in (None, *harmless))

    def check(value: Any) -> Any:
        if value is None or any(value == one and type(value) is type(one) for one in harmless):
            return value
        raise wrong(f"is not supported: leave it out, or want one of {shown}")

    return AfterValidator(check)


def unless_null(default: Any) -> Any:
    """Null counts as not given, as clients send it for what their caller left out."""
    return BeforeValidator(lambda value: default if value is None else value)


def _stops(value: Any) -> Any:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else value


Stops = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    Field(fail_fast=True),
    Field(max_length=16),
    BeforeValidator(_stops),
]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[int, Field(ge=0, le=2**24)]
Bias = Annotated[float, Field(ge=-100, le=100)]


def few(value: Any) -> Any:
    """Refuse an object of very many fields before each of them is looked at: each may be a fault."""
    if isinstance(value, dict) and len(value) > MAX_FIELDS:
        raise wrong(f"has {len(value):,} fields: want no more than {MAX_FIELDS:,}")
    return value


class Taken(BaseModel):
    """Base of all parts of a request: a field that nobody knows is an error, and no silent default."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: Any) -> Any:
        return few(value)


class StreamOptions(Taken):
    """What a stream sends besides the text."""

    include_usage: Annotated[bool, unless_null(False)] = False
    include_obfuscation: Annotated[Any, only(False)] = None


class JsonSchema(Taken):
    """A schema that the answer follows; it is always followed, whatever `strict` says."""

    name: Annotated[str, Field(max_length=256)] = "schema"
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Taken):
    """Text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise wrong("type json_schema goes with a json_schema: {name, schema}")
        return self

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """None where any text will do."""
        if self.type == "json_object":
            return {"type": "object"}
        return self.json_schema.schema_ if self.json_schema is not None and self.type == "json_schema" else None


class Sampling(Taken):
    """
    How an answer is sampled and when it ends, as OpenAI names it, and what other engines add to that.
    """

    model: Annotated[str, Field(min_length=1, max_length=512)]
    max_tokens: Tokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2), unless_null(1.0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1), unless_null(1.0)] = 1.0
    n: Annotated[int, Field(ge=1, le=128), unless_null(1)] = 1
    stop: Stops = ()
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2), unless_null(0.0)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2), unless_null(0.0)] = 0.0
    logit_bias: Annotated[dict[TokenId, Bias], BeforeValidator(few), unless_null({})] = Field(default_factory=dict)
    response_format: ResponseFormat | None = None
    stream: Annotated[bool, unless_null(False)] = False
    stream_options: StreamOptions | None = None
    metadata: Annotated[Metadata, unless_null({})] = Field(default_factory=dict)

    # read by nobody here
    user: str | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    # what other engines add
    top_k: Annotated[int, Field(ge=-1, lt=2**31), unless_null(0)] = 0
    min_p: Annotated[float, Field(ge=0, le=1), unless_null(0.0)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=100), unless_null(1.0)] = 1.0
    min_tokens: Annotated[Tokens, unless_null(0)] = 0
    ignore_eos: Annotated[bool, unless_null(False)] = False
    stop_token_ids: Annotated[tuple[TokenId, ...], Field(fail_fast=True), Field(max_length=64), unless_null(())] = ()
    include_stop_str_in_output: Annotated[bool, unless_null(False)] = False
    skip_special_tokens: Annotated[bool, unless_null(True)] = True
    guided_json: dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[tuple[str, ...], Field(fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _has_one_shape(self) -> Self:
        if len(self.shapes) > 1:
            raise wrong(f"{' and '.join(self.shapes)} are given: want one of them")
        return self

    @property
    def shapes(self) -> dict[str, tuple[str, Any]]:
        """What the answer must look like: by the request's field, the job's option and its value."""
        wanted = self.response_format.schema_of_answer if self.response_format is not None else None
        given = {
            "response_format": ("json_schema", wanted),
            "guided_json": ("json_schema", self.guided_json),
            "guided_regex": ("regex", self.guided_regex),
            "guided_choice": ("choice", self.guided_choice),
        }
        return {name: (option, value) for name, (option, value) in given.items() if value is not None}

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with what it took."""
        return self.stream_options is not None and self.stream_options.include_usage
