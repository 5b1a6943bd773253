"""Answers bound to a schema, a regex or a choice: the official client, the gateway, and a real engine."""

import datetime
import enum
import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.producers.gateway.conftest import is_ready
from tests.support.gateways import RunningGateway, running_gateway
from tests.support.models import real_model
from tests.support.servers import wait_for
from tests.support.services import worker_process
from tests.support.tiny_models import save_tiny_writer

QUEUE = "gateway-structured"
ASK: list[Any] = [{"role": "user", "content": "Tell me about Paris."}]
Short = Annotated[str, Field(max_length=8)]


class Kind(enum.Enum):
    CITY = "city"
    PERSON = "person"


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid")

    country: Short = Field(description="Where it is.")
    famous: bool


class Subject(BaseModel):
    """What services ask for: optionals, enums, definitions, lists, dates, literals, unions, descriptions."""

    model_config = ConfigDict(extra="forbid")

    name: Short = Field(description="What it is called.", examples=["Paris"])
    kind: Kind
    place: Place = Field(description="A reference with a remark beside it.")
    nickname: Short | None = None
    founded: datetime.date
    size: Literal["small", "large"]
    population: Annotated[int, Field(ge=0, le=10**8)] | Literal["unknown"]
    tags: list[Short] = Field(min_length=1, max_length=2)
    twins: list[Place] = Field(default_factory=list, max_length=1)
    score: float = Field(ge=0, le=1)


@pytest.fixture(scope="module", params=["tiny", pytest.param("smollm2", marks=pytest.mark.slow)])
def served(
    redis_url: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[RunningGateway]:
    """Served by a tiny model of random weights, which writes anything that its grammar lets it, or by SmolLM2."""
    folder = real_model() if request.param == "smollm2" else tmp_path_factory.mktemp("tiny")
    if request.param == "tiny":
        save_tiny_writer(folder)
        (folder / "chat_template.jinja").write_text("{% for turn in messages %}{{ turn['content'] }} {% endfor %}")
    log = tmp_path_factory.mktemp("worker") / "log"
    flags = ("--model", str(folder), "--dtype", "float32", "--max-model-len", "2048", "--kv-cache-bytes", "256MiB")
    with (
        worker_process(log, "--redis-url", redis_url, "--queue", QUEUE, *flags),
        running_gateway(redis_url, QUEUE) as gateway,
    ):
        wait_for(lambda: is_ready(gateway), 60)
        yield gateway


@pytest.fixture
def client(served: RunningGateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    [model] = client.models.list()
    return model.id


def chat(client: openai.OpenAI, model: str, **fields: Any) -> Any:
    return client.chat.completions.create(
        **{"model": model, "messages": ASK, "max_tokens": 1000, "temperature": 0, **fields}
    ).choices[0]


def named(schema: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "subject", "schema": schema, **fields}}


@pytest.mark.timeout(300)
def test_the_official_client_parses_a_model(client: openai.OpenAI, model: str) -> None:
    """
    `parse` gives an object of the class; it sends the class as a strict schema.
    """
    made = client.chat.completions.parse(model=model, messages=ASK, response_format=Subject, max_tokens=1000, seed=1)

    assert "stop" == made.choices[0].finish_reason
    assert isinstance(made.choices[0].message.parsed, Subject)


def test_what_is_cut_is_told_by_the_official_client(client: openai.OpenAI, model: str) -> None:
    """
    Its own error for an answer that `max_tokens` ended.
    """
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=model, messages=ASK, response_format=Subject, max_tokens=5)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("strict", [True, False, None])
def test_a_schema_as_pydantic_writes_it_is_followed(client: openai.OpenAI, model: str, strict: bool | None) -> None:
    """
    Whatever `strict` says, which makes nothing looser here; as a stream, too.
    """
    schema = Subject.model_json_schema()

    answer = chat(client, model, response_format=named(schema, strict=strict), temperature=0.7, seed=3)
    with client.chat.completions.stream(
        model=model, messages=ASK, response_format=Place, max_tokens=400, temperature=0
    ) as stream:
        streamed = stream.get_final_completion().choices[0].message

    assert "stop" == answer.finish_reason
    jsonschema.Draft202012Validator(schema).validate(json.loads(answer.message.content))
    Subject.model_validate_json(answer.message.content)
    assert isinstance(streamed.parsed, Place)


def test_any_object_a_regex_and_a_choice(client: openai.OpenAI, model: str) -> None:
    """
    OpenAI's json_object, and what other engines have.
    """
    loose = chat(client, model, response_format={"type": "json_object"}, max_tokens=200)
    date = chat(client, model, extra_body={"guided_regex": r"\d{4}-\d{2}-\d{2}"})
    choice = chat(client, model, extra_body={"guided_choice": ["a city", "a person"]})
    number = chat(client, model, extra_body={"guided_json": {"type": "integer", "minimum": 1, "maximum": 99}}, n=2)
    plain = client.completions.create(
        model=model, prompt="Paris is", max_tokens=20, extra_body={"guided_choice": [" big", " small"]}
    )

    assert loose.message.content.startswith("{")
    assert loose.finish_reason == "length" or isinstance(json.loads(loose.message.content), dict)
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", date.message.content)
    assert choice.message.content in ("a city", "a person")
    assert 1 <= int(number.message.content) <= 99
    assert plain.choices[0].text in (" big", " small")
    assert ["stop"] * 4 == [one.finish_reason for one in (date, choice, number, plain.choices[0])]


UNSUPPORTED = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": named(UNSUPPORTED)}, "response_format", "#/properties/a: uniqueItems is not supported"),
        ({"extra_body": {"guided_json": UNSUPPORTED}}, "guided_json", "uniqueItems"),
        ({"extra_body": {"guided_regex": "(?=a)"}}, "guided_regex", "look-around"),
        ({"extra_body": {"guided_choice": []}}, "guided_choice", "0 texts"),
        # this one only the worker can see
        ({"extra_body": {"guided_regex": "()"}}, None, "no text"),
    ],
)
def test_a_schema_that_is_refused_is_a_400(
    client: openai.OpenAI, model: str, fields: dict[str, Any], param: str | None, words: str, stream: bool
) -> None:
    """
    In OpenAI's shape, with the field and the place in it; also of a stream, which has not begun.
    """
    with pytest.raises(openai.BadRequestError, match=re.escape(words)) as caught:
        chat(client, model, stream=stream, **fields)

    assert ("invalid_grammar", param) == (caught.value.code, caught.value.param)
    assert "invalid_request_error" == caught.value.type


def test_two_shapes_at_a_time_are_a_400(client: openai.OpenAI, model: str) -> None:
    """
    None of them is silently left out.
    """
    for extra in ({"guided_json": {"type": "integer"}}, {"guided_regex": "a"}):
        with pytest.raises(openai.BadRequestError, match="want one of"):
            chat(client, model, response_format={"type": "json_object"}, extra_body=extra)
