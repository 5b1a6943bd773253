"""Lines of OpenAI's batch files: requests in, responses and errors out."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from pagemill.schema import Job, Result
from producers.openai_api.errors import ApiError, bad_request, of_result, of_validation
from producers.openai_api.fields import Taken
from producers.openai_api.jobs import Terms, chat_job, completion_jobs
from producers.openai_api.requests import ChatRequest, CompletionRequest, parse, read_json
from producers.openai_api.responses import chat_body, completion_body

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]
ENDPOINTS: tuple[Endpoint, ...] = ("/v1/chat/completions", "/v1/completions")


class _Line(Taken):
    custom_id: Annotated[str, Field(min_length=1, max_length=512)]
    method: Literal["POST"] = "POST"
    url: Endpoint
    body: dict[str, Any]


class BadLine(ApiError):
    """Raised for a line that is no request; `custom_id` is empty where even that cannot be read."""

    def __init__(self, custom_id: str, error: ApiError) -> None:
        super().__init__(error.status, error.message, kind=error.kind, param=error.param, code=error.code)
        self.custom_id = custom_id


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line: a request under the caller's own name for it."""

    custom_id: str
    request: ChatRequest | CompletionRequest

    def jobs(self, terms: Terms) -> list[Job]:
        """
        Its jobs: one for a chat, one a prompt for a plain completion.

        Raises:
            ApiError: the queue's schema refuses one.
        """
        if isinstance(self.request, ChatRequest):
            return [chat_job(self.request, terms)]
        return completion_jobs(self.request, terms)

    def body(self, results: Sequence[Result]) -> dict[str, Any]:
        """
        The response's body, from the results of its jobs, in order.

        Raises:
            ApiError: one of them has no answer.
        """
        if isinstance(self.request, ChatRequest):
            return chat_body(self.request, results[0])
        return completion_body(self.request, results)


def read_line(line: bytes, endpoint: str | None = None) -> BatchRequest:
    """
    Read one line of an input file.

    Args:
        endpoint: The one that all lines must name, as a batch has one.

    Raises:
        BadLine: it is no request, or one of another endpoint, or streams.
    """
    custom_id = ""
    try:
        fields = read_json(line.removeprefix(b"\xef\xbb\xbf"))
        if isinstance(name := fields.get("custom_id"), str):
            custom_id = name[:512]
        try:
            read = _Line.model_validate(fields)
        except ValidationError as error:
            raise of_validation(error) from None
        if endpoint is not None and read.url != endpoint:
            raise bad_request(
                f"the url is {read.url}: the batch's endpoint is {endpoint}", "url", "mismatched_endpoint"
            )
        request = parse_for(read.url, read.body)
        if request.stream:
            raise bad_request("stream is true: a batch's answers are written when they are complete", "body.stream")
    except ApiError as error:
        raise BadLine(custom_id, error) from None
    return BatchRequest(custom_id, request)


def parse_for(endpoint: Endpoint, body: dict[str, Any]) -> ChatRequest | CompletionRequest:
    """
    The request that a body is, by where it goes.

    Raises:
        ApiError: 400.
    """
    if endpoint == "/v1/chat/completions":
        return parse(ChatRequest, body)
    return parse(CompletionRequest, body)


def output_line(request: BatchRequest, results: Sequence[Result]) -> tuple[bytes, bool]:
    """
    The line of a request that has ended, and whether it belongs into the output file; else into that of errors.
    """
    name = results[0].job_id
    late = next((one for one in results if one.status in ("expired", "cancelled")), None)
    if late is not None:
        error = of_result(late)
        assert error is not None
        return error_line(request.custom_id, name, error, answered=False), False
    try:
        body = request.body(results)
    except ApiError as error:
        return error_line(request.custom_id, name, error), False
    return _line(request.custom_id, name, {"status_code": 200, "request_id": name, "body": body}, None), True


def error_line(custom_id: str, name: str, error: ApiError, *, answered: bool = True) -> bytes:
    """
    The line of a request that has no answer.

    Args:
        name: What makes the line's id: its job, or its place in the input.
        answered: It got an error for a response; else it never ran to its end.
    """
    if not answered:
        code = "batch_expired" if error.code == "deadline_passed" else "batch_cancelled"
        return _line(custom_id, name, None, {"code": code, "message": error.message})
    return _line(custom_id, name, {"status_code": error.status, "request_id": name, "body": error.body()}, None)


def _line(custom_id: str, name: str, response: dict[str, Any] | None, error: dict[str, str] | None) -> bytes:
    fields = {"id": f"batch_req_{name}", "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode(errors="replace") + b"\n"
