import json
from typing import Any

import pytest
from openai.types import Completion as OpenAICompletion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from pagemill.errors import (
    Busy,
    Conflict,
    InvalidJob,
    ObjectStoreError,
    PagemillError,
    QueueUnavailable,
    UnknownModel,
    WaitTimeout,
)
from pagemill.messages import TokenDelta
from pagemill.schema import Completion, Failure, Result, TokenLogprob, Usage
from producers.openai_api.batch_lines import BadLine, output_line, read_line
from producers.openai_api.chunks import DONE, ChatChunks, CompletionChunks
from producers.openai_api.errors import ApiError, of_pagemill, of_result
from producers.openai_api.requests import ChatRequest, CompletionRequest, parse
from producers.openai_api.responses import chat_body, completion_body

PLACES = (
    TokenLogprob(token_id=1, token="Hé", logprob=-0.5, top=((1, "Hé", -0.5), (2, "Ho", -1.5))),
    TokenLogprob(token_id=2, token="!", logprob=float("-inf")),
)


def result(**fields: Any) -> Result:
    usual: dict[str, Any] = {
        "job_id": "j1",
        "status": "done",
        "completions": (Completion(index=0, text="Hé!", finish_reason="stop", logprobs=PLACES),),
        "usage": Usage(prompt_tokens=7, completion_tokens=2, cached_tokens=4),
        "model": "served",
        "accepted_ms": 1_700_000_000_123,
    }
    return Result(**usual | fields)


def chat_request(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields)


def events_of(data: bytes) -> list[Any]:
    parts = data.decode().split("\n\n")[:-1]
    return [part if part == "data: [DONE]" else json.loads(part.removeprefix("data: ")) for part in parts]


def test_a_chat_response_is_one_of_the_official_client() -> None:
    """
    It reads all of it back: ids, usage, log-probabilities with bytes.
    """
    read = ChatCompletion.model_validate(chat_body(chat_request(), result()))

    assert ("chatcmpl-j1", "served", 1_700_000_000) == (read.id, read.model, read.created)
    assert ("Hé!", "stop") == (read.choices[0].message.content, read.choices[0].finish_reason)
    assert read.usage is not None
    assert read.usage.prompt_tokens_details is not None
    assert (9, 4) == (read.usage.total_tokens, read.usage.prompt_tokens_details.cached_tokens)
    assert read.choices[0].logprobs is not None
    tokens = read.choices[0].logprobs.content or []
    assert [(-0.5, list("Hé".encode()), 2), (-9999.0, [33], 0)] == [
        (one.logprob, one.bytes, len(one.top_logprobs)) for one in tokens
    ]


def test_a_completion_counts_its_answers_over_all_prompts() -> None:
    """
    The answers to the second prompt follow those to the first.
    """
    request = parse(CompletionRequest, {"model": "m", "prompt": ["a", "b"], "n": 2, "logprobs": 2})
    answers = tuple(Completion(index=index, text="x", finish_reason="length", logprobs=PLACES) for index in (0, 1))

    read = OpenAICompletion.model_validate(completion_body(request, [result(completions=answers)] * 2))

    assert [0, 1, 2, 3] == [choice.index for choice in read.choices]
    assert read.choices[0].logprobs is not None
    assert ([0, 2], ["Hé", "!"]) == (read.choices[0].logprobs.text_offset, read.choices[0].logprobs.tokens)
    assert read.usage is not None
    assert 18 == read.usage.total_tokens


def test_the_events_of_a_chat_add_up_to_it() -> None:
    """
    The role once, the text in pieces, then how it ended with all log-probabilities, the usage, and [DONE].
    """
    request = chat_request(stream=True, stream_options={"include_usage": True})
    chunks = ChatChunks(request, "chatcmpl-j1", 5)

    data = b"".join(chunks.text(0, TokenDelta(0, at, text, 1)) for at, text in ((0, "Hé"), (2, "!")))
    data += b"".join([*chunks.end(0, result()), *chunks.close()])

    *events, last = events_of(data)
    read = [ChatCompletionChunk.model_validate(event) for event in events]
    assert "data: [DONE]" == last
    assert ["assistant", None, None] == [event.choices[0].delta.role for event in read[:3]]
    assert "Hé!" == "".join(event.choices[0].delta.content or "" for event in read[:3])
    assert read[2].choices[0].logprobs is not None
    assert 2 == len(read[2].choices[0].logprobs.content or [])
    assert [None, None, None] == [event["usage"] for event in events[:3]]
    assert 9 == events[3]["usage"]["total_tokens"]
    assert data.endswith(DONE)


def test_an_answer_without_text_still_has_its_role() -> None:
    """
    As where it ended at once.
    """
    chunks = ChatChunks(chat_request(stream=True), "x", 5)

    [end] = chunks.end(0, result(completions=(Completion(index=0, text="", finish_reason="stop"),)))

    assert {"role": "assistant"} == events_of(end)[0]["choices"][0]["delta"]


def test_events_of_several_prompts_have_their_own_places() -> None:
    """
    Answer 1 of prompt 2 is the fourth of all, with n = 2.
    """
    request = parse(CompletionRequest, {"model": "m", "prompt": ["a", "b"], "n": 2, "stream": True})

    [event] = events_of(CompletionChunks(request, "x", 5).text(1, TokenDelta(1, 0, "t", 1)))

    assert (3, "t") == (event["choices"][0]["index"], event["choices"][0]["text"])


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidJob("prompt_too_long", "x"), 400, "context_length_exceeded"),
        (InvalidJob("payload_too_large", "x"), 413, "request_too_large"),
        (InvalidJob("something_new", "x"), 400, "something_new"),
        (UnknownModel("x"), 404, "model_not_found"),
        (Conflict("j", "x"), 422, "idempotency_key_reused"),
        (Busy("x", reason="tenant", retry_after_s=3), 429, "rate_limit_exceeded"),
        (Busy("x", reason="memory", retry_after_s=3), 503, "overloaded"),
        (QueueUnavailable("redis at 10.0.0.1"), 503, "unavailable"),
        (ObjectStoreError("s3://secret"), 503, "unavailable"),
        (WaitTimeout("x"), 504, "deadline_passed"),
        (PagemillError("x"), 500, "internal_error"),
    ],
)
def test_what_the_queue_raises_has_a_status(error: PagemillError, status: int, code: str) -> None:
    """
    By who must act; what servers say of themselves is not passed on.
    """
    made = of_pagemill(error)

    assert (status, code) == (made.status, made.code)
    assert "10.0.0.1" not in made.message
    assert "secret" not in made.message
    assert (made.retry_after_s is not None) == (status in (429, 503))


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"status": "failed", "failure": Failure(code="engine_error", message="x")}, 500),
        ({"status": "failed", "failure": Failure(code="poison", message="x")}, 500),
        ({"status": "failed", "failure": Failure(code="not_supported", message="x")}, 400),
        ({"status": "expired"}, 504),
        ({"status": "cancelled"}, 410),
    ],
)
def test_jobs_without_an_answer_are_errors(fields: dict[str, Any], status: int) -> None:
    """
    In a response as in a stream.
    """
    error = of_result(result(**fields))
    assert error is not None
    assert status == error.status
    with pytest.raises(ApiError):
        chat_body(chat_request(), result(**fields))
    with pytest.raises(ApiError):
        list(ChatChunks(chat_request(), "x", 5).end(0, result(**fields)))


LINE: dict[str, Any] = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
}


def test_a_batch_line_and_its_answer() -> None:
    """
    What the API would respond stands in the output line; a job that was cut off belongs among the errors.
    """
    request = read_line(json.dumps(LINE).encode(), "/v1/chat/completions")

    line, is_good = output_line(request, [result()])
    late, is_late_good = output_line(request, [result(status="expired")])
    failed, _ = output_line(request, [result(status="failed", failure=Failure(code="engine_error", message="x"))])

    assert (True, False) == (is_good, is_late_good)
    read = json.loads(line)
    assert ("a", 200, None) == (read["custom_id"], read["response"]["status_code"], read["error"])
    assert chat_body(chat_request(), result()) == read["response"]["body"]
    assert (None, "batch_expired") == (json.loads(late)["response"], json.loads(late)["error"]["code"])
    assert 500 == json.loads(failed)["response"]["status_code"]
    assert [1, 1, 1] == [one.count(b"\n") for one in (line, late, failed)]


@pytest.mark.parametrize(
    ("line", "custom_id"),
    [
        (b"", ""),
        (b"nonsense", ""),
        (json.dumps(LINE | {"url": "/v1/embeddings"}).encode(), "a"),
        (json.dumps(LINE | {"url": "/v1/completions"}).encode(), "a"),
        (json.dumps(LINE | {"method": "GET"}).encode(), "a"),
        (json.dumps(LINE | {"body": LINE["body"] | {"n": "x"}}).encode(), "a"),
        (json.dumps(LINE | {"body": LINE["body"] | {"stream": True}}).encode(), "a"),
        (json.dumps({"custom_id": 5}).encode(), ""),
    ],
)
def test_lines_that_are_no_requests_are_told_by_their_id(line: bytes, custom_id: str) -> None:
    """
    As far as it can be read.
    """
    with pytest.raises(BadLine) as caught:
        read_line(line, "/v1/chat/completions")

    assert (custom_id, 400) == (caught.value.custom_id, caught.value.status)
