import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.schema import Job, Options
from producers.openai_api.errors import ApiError
from producers.openai_api.jobs import Terms, chat_job, completion_jobs
from producers.openai_api.requests import ChatRequest, CompletionRequest, parse, read_json

HI = [{"role": "user", "content": "hi"}]


def chat(terms: Terms | None = None, **fields: Any) -> Job:
    return chat_job(parse(ChatRequest, {"model": "m", "messages": HI} | fields), terms or Terms())


def completions(terms: Terms | None = None, **fields: Any) -> list[Job]:
    return completion_jobs(parse(CompletionRequest, {"model": "m", "prompt": "x"} | fields), terms or Terms())


def refused(make: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        make(**fields)
    return caught.value


def error_of(make: Callable[[], Any]) -> ApiError | None:
    try:
        make()
    except ApiError as error:
        return error
    return None


def test_chat_becomes_a_job_of_its_messages() -> None:
    """
    Roles and texts are passed on, text parts end to end; "developer" is the newer word for "system".
    """
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts, "name": "kim"}]

    job = chat(messages=messages)

    assert [("system", "be brief"), ("user", "ab")] == [(turn.role, turn.content) for turn in job.messages or ()]
    assert ("m", "interactive", False) == (job.model, job.lane, job.stream)


def test_options_are_passed_on_under_the_queues_names() -> None:
    """
    What OpenAI and other engines name, the queue has too.
    """
    job = chat(
        temperature=0.5,
        top_p=0.9,
        n=3,
        stop="END",
        seed=7,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"5": 3},
        logprobs=True,
        top_logprobs=4,
        max_completion_tokens=9,
        top_k=11,
        min_p=0.1,
        repetition_penalty=1.1,
        min_tokens=2,
        ignore_eos=True,
        stream=True,
    )

    expected = Options(
        temperature=0.5,
        top_p=0.9,
        n=3,
        stop=("END",),
        seed=7,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={5: 3.0},
        logprobs=4,
        max_tokens=9,
        top_k=11,
        min_p=0.1,
        repetition_penalty=1.1,
        min_tokens=2,
        ignore_eos=True,
    )
    assert expected == job.options
    assert job.stream


def test_defaults_are_openais() -> None:
    """
    A request that says nothing samples at temperature 1; a plain completion has 16 tokens.
    """
    assert 1.0 == chat().options.temperature
    assert 16 == completions()[0].options.max_tokens


@pytest.mark.parametrize(
    ("terms", "expected"),
    [
        (Terms(max_model_len=2048), 2048),
        (Terms(max_model_len=2048, answer_tokens=500), 500),
        (Terms(max_model_len=2048, answer_tokens=5000), 2048),
        (Terms(), 4096),
    ],
)
def test_chat_without_a_limit_takes_what_the_context_leaves(terms: Terms, expected: int) -> None:
    """
    The engine ends an answer where the context does; a setting may be smaller.
    """
    assert expected == chat(terms).options.max_tokens
    assert 77 == chat(terms, max_tokens=77).options.max_tokens


@pytest.mark.parametrize("name", ["temperature", "top_p", "n", "stop", "logit_bias", "metadata", "max_tokens", "seed"])
def test_null_counts_as_not_given(name: str) -> None:
    """
    Clients send null for what their caller left out.
    """
    assert chat().body() == chat(**{name: None}).body()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("functions", [{"name": "f"}]),
        ("audio", {"voice": "alloy", "format": "mp3"}),
        ("modalities", ["text", "audio"]),
        ("prediction", {"type": "content", "content": "x"}),
        ("reasoning_effort", "high"),
        ("web_search_options", {}),
        ("temperature", 2.5),
        ("temperature", "NaN"),
        ("top_logprobs", 21),
        ("n", 0),
        ("n", 129),
        ("max_completion_tokens", 0),
        ("response_format", {"type": "json_schema"}),
        ("temprature", 0.5),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(field: str, value: Any) -> None:
    """
    A misspelt or unsupported field is a 400 that names it, and no silent default.
    """
    error = refused(chat, **{field: value})

    assert (400, field) == (error.status, (error.param or "").partition(".")[0])
    assert {"message", "type", "param", "code"} == set(error.body()["error"])
    assert "invalid_request_error" == error.kind


@pytest.mark.parametrize(
    "harmless",
    [
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"functions": [], "function_call": "none"},
        {"modalities": ["text"], "verbosity": "medium", "store": True, "service_tier": "auto"},
        {"user": "u", "prompt_cache_key": "k", "safety_identifier": "s", "response_format": {"type": "text"}},
    ],
)
def test_what_changes_nothing_is_taken(harmless: dict[str, Any]) -> None:
    """
    A field that says what happens anyway is no reason to refuse.
    """
    assert chat().options == chat(**harmless).options


def test_parts_that_are_no_text_are_refused() -> None:
    """
    An image is told by the place of its message.
    """
    image = [{"type": "image_url", "image_url": {"url": "data:"}}]

    error = refused(chat, messages=[*HI, {"role": "user", "content": image}])

    assert "messages.1.content" == error.param
    assert "image_url" in error.message


@pytest.mark.parametrize("messages", [[], [{"role": "assistant", "content": None}], [{"role": "x", "content": "a"}]])
def test_chats_that_say_nothing_are_refused(messages: list[Any]) -> None:
    """
    No message, one without a text, or one of an unknown role.
    """
    assert 400 == refused(chat, messages=messages).status


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [(1, 2)]), ([[1, 2], [3]], [(1, 2), (3,)])],
)
def test_each_prompt_is_a_job(prompt: Any, expected: list[Any]) -> None:
    """
    A text, texts, token ids, or lists of these.
    """
    assert expected == [job.prompt for job in completions(prompt=prompt)]


@pytest.mark.parametrize("prompt", [None, 3, "", [], [[]], [True], [1, "a"], [[1.5]], [-1], ["a"] * 257, {"a": 1}])
def test_other_prompts_are_refused(prompt: Any) -> None:
    """
    Nothing, mixtures, what is no token id, and more prompts than one request may have.
    """
    assert 400 == refused(completions, prompt=prompt).status


@pytest.mark.parametrize(
    "fields", [{"suffix": "end"}, {"best_of": 2}, {"max_tokens": 0}, {"echo": True, "stream": True}]
)
def test_completions_refuse_what_they_cannot_do(fields: dict[str, Any]) -> None:
    """
    Text after the answer, a choice among more answers than are returned, no token at all.
    """
    assert 400 == refused(completions, **fields).status


def test_keys_of_several_prompts_differ() -> None:
    """
    One request's key names each of its jobs, so that a repeated request finds all of them.
    """
    keyed = Terms(idempotency_key="k")

    assert ["k"] == [job.idempotency_key for job in completions(keyed)]
    assert ["k:0", "k:1"] == [job.idempotency_key for job in completions(keyed, prompt=["a", "b"])]


def test_equal_requests_are_equal_jobs() -> None:
    """
    A retry under the same key is no conflict.
    """
    assert chat(Terms(idempotency_key="k")).body() == chat(Terms(idempotency_key="k")).body()


@pytest.mark.parametrize(
    ("body", "code"),
    [(b"\xff{}", "invalid_encoding"), (b"{", "invalid_json"), (b"[]", "invalid_json"), (b'{"a": NaN}', "invalid_json")],
)
def test_bodies_that_are_no_json_objects_are_told_apart(body: bytes, code: str) -> None:
    """
    Bytes that are no UTF-8, text that is no JSON, values that are no object.
    """
    error = refused(lambda: read_json(body))

    assert (400, code) == (error.status, error.code)


def test_very_many_fields_are_one_fault() -> None:
    """
    What a fault costs must not be multiplied by whoever sends them.
    """
    many = dict.fromkeys(map(str, range(2000)), 1)

    for fields in (many, {"logit_bias": many}, {"messages": [many]}):
        assert len(refused(chat, **fields).message) < 1000


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
NAMES = st.sampled_from(sorted(set(ChatRequest.model_fields) | set(CompletionRequest.model_fields))) | st.text(
    max_size=8
)


@settings(max_examples=300, deadline=None)
@given(fields=st.dictionaries(NAMES, VALUES, max_size=6), body=st.binary(max_size=40))
def test_garbage_is_a_typed_error(fields: dict[str, Any], body: bytes) -> None:
    """
    Whatever a request holds, it becomes jobs or an ApiError of a status below 500.
    """
    for read in (
        lambda: chat(**fields),
        lambda: completions(**fields),
        lambda: read_json(body),
        lambda: read_json(json.dumps(fields).encode()),
    ):
        error = error_of(read)
        assert error is None or 400 <= error.status < 500
        json.dumps(error and error.body())
