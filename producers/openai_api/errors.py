"""
What goes wrong, in OpenAI's words: a status, and a body {"error": {message, type, param, code}}.

Whatever a request holds, this folder raises ApiError and nothing else.
"""

from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from pagemill.errors import (
    BatchClosed,
    BatchNotFound,
    Busy,
    Conflict,
    InvalidJob,
    JobNotFound,
    ObjectStoreError,
    PagemillError,
    QueueUnavailable,
    UnknownModel,
    WaitTimeout,
)
from pagemill.schema import Result, explain

# a server that is away, or whose memory is full, is asked again after so long
RETRY_S = 5.0


class ApiError(Exception):
    """
    Raised for a request that gets an error instead of an answer.

    Args:
        status: The HTTP status.
        kind: OpenAI's `type`; by the status where it is not given.
        param: The field that is wrong.
        code: A word for programs.
        retry_after_s: When to try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind or _kind_of(status)
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def _kind_of(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 403:
        return "permission_error"
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def of_validation(error: ValidationError) -> ApiError:
    """A request that breaks its schema; `param` is the first field that does."""
    where = error.errors(include_url=False, include_context=False, include_input=False)[0]["loc"]
    return bad_request(explain(error), ".".join(map(str, where))[:200] or None, "invalid_value")


# of a job's failure: status and code; `type` follows from the status
_FAILURES: dict[str, tuple[int, str]] = {
    "invalid_job": (400, "invalid_value"),
    "empty_prompt": (400, "invalid_value"),
    "prompt_too_long": (400, "context_length_exceeded"),
    "payload_too_large": (413, "request_too_large"),
    "invalid_encoding": (400, "invalid_encoding"),
    "unknown_model": (404, "model_not_found"),
    "unsupported_version": (500, "unsupported_version"),
    "not_supported": (400, "unsupported_value"),
    "deadline_passed": (504, "deadline_passed"),
    "lost_payload": (500, "lost_payload"),
    "engine_error": (500, "engine_error"),
    "poison": (500, "engine_error"),
}


def of_code(code: str, message: str, param: str | None = None) -> ApiError:
    """A job's failure, or the code of an InvalidJob."""
    status, word = _FAILURES.get(code, (400, code))
    return ApiError(status, message, param=param, code=word)


def of_result(result: Result) -> ApiError | None:
    """Why a job has no answer; None where it has one."""
    if result.status == "done":
        return None
    if result.failure is not None:
        return of_code(result.failure.code, result.failure.message)
    if result.status == "expired":
        return ApiError(504, "the request's deadline passed before its answer was complete", code="deadline_passed")
    if result.status == "cancelled":
        return ApiError(410, "the request was cancelled", code="request_cancelled")
    return ApiError(500, "the request failed", code="engine_error")


def of_pagemill(error: PagemillError) -> ApiError:
    """What the queue's client raised."""
    if isinstance(error, InvalidJob):
        return of_code(error.code, str(error))
    for kind, make in _BY_KIND:
        if isinstance(error, kind):
            return make(error)
    return ApiError(500, "the request cannot be served", code="internal_error")


def _of_busy(error: Any) -> ApiError:
    # what is full belongs to the caller, or to the service as a whole
    status, code = (429, "rate_limit_exceeded") if error.reason == "tenant" else (503, "overloaded")
    return ApiError(status, str(error), code=code, retry_after_s=error.retry_after_s)


def _unknown_model(error: Any) -> ApiError:
    return ApiError(404, str(error), param="model", code="model_not_found")


def _away(error: Any) -> ApiError:  # noqa: ARG001  what a server says is for its operator, not for callers
    return ApiError(503, "the queue cannot be reached now: try again", code="unavailable", retry_after_s=RETRY_S)


_BY_KIND: list[tuple[type[PagemillError], Callable[[Any], ApiError]]] = [
    (Busy, _of_busy),
    (UnknownModel, _unknown_model),
    (Conflict, lambda error: ApiError(422, str(error), code="idempotency_key_reused")),
    (QueueUnavailable, _away),
    (ObjectStoreError, _away),
    (WaitTimeout, lambda error: ApiError(504, str(error), code="deadline_passed")),
    (JobNotFound, lambda error: ApiError(500, str(error), code="lost_result")),
    (BatchNotFound, lambda error: ApiError(404, str(error), code="not_found")),
    (BatchClosed, lambda error: ApiError(409, str(error), code="batch_closed")),
]
