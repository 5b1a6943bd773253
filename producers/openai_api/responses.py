"""Results into response bodies."""

from collections.abc import Sequence
from typing import Any

from pagemill.schema import Completion, Result, TokenLogprob, Usage
from producers.openai_api.errors import of_result
from producers.openai_api.requests import ChatRequest, CompletionRequest


def chat_id(job_id: str) -> str:
    return f"chatcmpl-{job_id}"


def completion_id(job_id: str) -> str:
    return f"cmpl-{job_id}"


def chat_body(request: ChatRequest, result: Result) -> dict[str, Any]:
    """
    The response to a chat.

    Raises:
        ApiError: the job has no answer.
    """
    _raise_failure(result)
    choices = [
        {
            "index": answer.index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": chat_logprobs(answer.logprobs),
            "finish_reason": finish_reason(answer),
        }
        for answer in result.completions
    ]
    return _body("chat.completion", chat_id(result.job_id), request.model, result, choices, usage_body([result.usage]))


def completion_body(request: CompletionRequest, results: Sequence[Result]) -> dict[str, Any]:
    """
    The response to a plain completion: the answers to its first prompt, then to its second ...

    Raises:
        ApiError: one of the jobs has no answer.
    """
    choices: list[dict[str, Any]] = []
    for place, (prompt, result) in enumerate(zip(request.prompt, results, strict=True)):
        _raise_failure(result)
        first = place * request.n
        choices += [_choice(request, prompt, result, answer, first + answer.index) for answer in result.completions]
    usage = usage_body([_counted(request, result.usage) for result in results])
    name = completion_id(results[0].job_id)
    return _body("text_completion", name, request.model, results[0], choices, usage)


def _counted(request: CompletionRequest, usage: Usage) -> Usage:
    # of the prompt alone an answer was asked for: the one token that it took is not shown
    return usage.model_copy(update={"completion_tokens": 0}) if request.max_tokens == 0 else usage


def _choice(
    request: CompletionRequest, prompt: str | tuple[int, ...], result: Result, answer: Completion, index: int
) -> dict[str, Any]:
    text, places = answer.text, list(answer.logprobs or ())
    reason = finish_reason(answer)
    if request.max_tokens == 0:
        text, places, reason = "", [], "length"
    before: list[TokenLogprob | None] = list(result.prompt_logprobs or ()) if request.echo else []
    if request.echo:
        text = (prompt if isinstance(prompt, str) else _text_of(before)) + text
    logprobs = None if request.logprobs is None else completion_logprobs([*before, *places])
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _text_of(places: Sequence[TokenLogprob | None]) -> str:
    return "".join(place.token for place in places if place is not None)


def _body(
    kind: str, name: str, model: str, result: Result, choices: list[dict[str, Any]], usage: dict[str, Any]
) -> dict[str, Any]:
    return {
        "id": name,
        "object": kind,
        "created": result.accepted_ms // 1000,
        "model": result.model or model,
        "choices": choices,
        "usage": usage,
    }


def _raise_failure(result: Result) -> None:
    error = of_result(result)
    if error is not None:
        raise error


def finish_reason(answer: Completion) -> str:
    # an answer that was cut off by a deadline has no better word there
    return "length" if answer.finish_reason == "abort" else answer.finish_reason


def usage_body(usages: Sequence[Usage]) -> dict[str, Any]:
    """What some jobs took together."""
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
    }


def chat_logprobs(places: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    """Log-probabilities as chats have them: a list of places, each with its alternatives."""
    if places is None:
        return None
    content = []
    for place in places:
        top = [_token(token, logprob) for _, token, logprob in place.top]
        content.append({**_token(place.token, place.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _token(token: str, logprob: float) -> dict[str, Any]:
    # -9999 is OpenAI's word for "impossible", which JSON has no number for
    return {"token": token, "logprob": max(logprob, -9999.0), "bytes": list(token.encode(errors="replace"))}


def completion_logprobs(places: Sequence[TokenLogprob | None], offset: int = 0) -> dict[str, Any]:
    """
    Log-probabilities as plain completions have them: lists side by side; the first token of a prompt has none.

    Args:
        offset: Characters of the text before the first place.
    """
    tokens, values, tops, offsets = [], [], [], []
    for place in places:
        tokens.append(place.token if place is not None else "")
        values.append(max(place.logprob, -9999.0) if place is not None else None)
        tops.append({token: max(value, -9999.0) for _, token, value in place.top} if place is not None else None)
        offsets.append(offset)
        offset += len(tokens[-1])
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}
