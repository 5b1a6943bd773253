"""Token deltas and ends of jobs into the events of a stream."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from pagemill.messages import TokenDelta
from pagemill.schema import Completion, Result, Usage
from producers.openai_api.errors import ApiError, of_result
from producers.openai_api.requests import ChatRequest, CompletionRequest
from producers.openai_api.responses import chat_logprobs, completion_logprobs, finish_reason, usage_body

DONE = b"data: [DONE]\n\n"


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def error_event(error: ApiError) -> bytes:
    """What a stream ends with that goes wrong after its beginning; no [DONE] follows."""
    return event(error.body())


class Chunks(ABC):
    """
    The events of one stream.

    Log-probabilities come with the end of an answer, all at once: the queue's token stream has text alone.

    Args:
        created: Seconds since 1970.
        include_usage: The last event says what the stream took.
    """

    def __init__(self, *, kind: str, name: str, created: int, model: str, include_usage: bool) -> None:
        self._head = {"id": name, "object": kind, "created": created, "model": model}
        self._include_usage = include_usage
        self._usages: list[Usage] = []

    def text(self, place: int, delta: TokenDelta) -> bytes:
        """New text of an answer to the prompt in that place."""
        return self._chunk(self._text_choice(place, delta))

    def end(self, place: int, result: Result) -> Iterator[bytes]:
        """
        How the answers to that prompt ended.

        Raises:
            ApiError: the job failed, and the stream with it.
        """
        error = of_result(result)
        if error is not None:
            raise error
        self._usages.append(result.usage)
        for answer in result.completions:
            yield self._chunk(self._end_choice(place, answer))

    def close(self) -> Iterator[bytes]:
        """What follows the last answer."""
        if self._include_usage:
            yield event({**self._head, "choices": [], "usage": usage_body(self._usages)})
        yield DONE

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        body = {**self._head, "choices": [choice]}
        # null in all others where the last one has it, as OpenAI does
        return event(body | {"usage": None} if self._include_usage else body)

    @abstractmethod
    def _text_choice(self, place: int, delta: TokenDelta) -> dict[str, Any]: ...

    @abstractmethod
    def _end_choice(self, place: int, answer: Completion) -> dict[str, Any]: ...


class ChatChunks(Chunks):
    """Events of /v1/chat/completions; the first of each answer says whose turn it is."""

    def __init__(self, request: ChatRequest, name: str, created: int) -> None:
        super().__init__(
            kind="chat.completion.chunk",
            name=name,
            created=created,
            model=request.model,
            include_usage=request.include_usage,
        )
        self._begun: set[int] = set()

    def _role(self, index: int) -> dict[str, str]:
        if index in self._begun:
            return {}
        self._begun.add(index)
        return {"role": "assistant"}

    def _text_choice(self, place: int, delta: TokenDelta) -> dict[str, Any]:  # noqa: ARG002  a chat is one prompt
        content = {**self._role(delta.index), "content": delta.text}
        return {"index": delta.index, "delta": content, "logprobs": None, "finish_reason": None}

    def _end_choice(self, place: int, answer: Completion) -> dict[str, Any]:  # noqa: ARG002
        return {
            "index": answer.index,
            "delta": self._role(answer.index),
            "logprobs": chat_logprobs(answer.logprobs),
            "finish_reason": finish_reason(answer),
        }


class CompletionChunks(Chunks):
    """Events of /v1/completions."""

    def __init__(self, request: CompletionRequest, name: str, created: int) -> None:
        super().__init__(
            kind="text_completion",
            name=name,
            created=created,
            model=request.model,
            include_usage=request.include_usage,
        )
        self._n = request.n

    def _text_choice(self, place: int, delta: TokenDelta) -> dict[str, Any]:
        index = place * self._n + delta.index
        return {"index": index, "text": delta.text, "logprobs": None, "finish_reason": None}

    def _end_choice(self, place: int, answer: Completion) -> dict[str, Any]:
        logprobs = None if answer.logprobs is None else completion_logprobs(answer.logprobs)
        index = place * self._n + answer.index
        return {"index": index, "text": "", "logprobs": logprobs, "finish_reason": finish_reason(answer)}
