"""Requests into jobs."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pagemill.errors import InvalidJob
from pagemill.schema import Job, Lane, Options
from producers.openai_api.errors import ApiError, of_code
from producers.openai_api.fields import Sampling
from producers.openai_api.requests import ChatRequest, CompletionRequest

# OpenAI's own default for plain completions
COMPLETION_TOKENS = 16

# an answer's limit where the model's context is not known
UNKNOWN_CONTEXT = 4096

_SPACES = re.compile(r"[ \t]+")
_LINES = re.compile(r" ?(?:\r\n|\r|\n) ?")
_BLANKS = re.compile(r"\n{3,}")


@dataclass(frozen=True, slots=True)
class Terms:
    """
    What the server decides of a job, whatever its request says.

    Args:
        answer_tokens: Most tokens of an answer whose request names no limit; None takes what the context
            leaves.
        max_model_len: Longest prompt plus answer of the model; None where it is not known.
        timeout_s: Seconds after which nobody waits for the answer any more.
        normalise: System messages that differ in white space alone become one text.
        drop_lines: Lines of system messages that match one of these are left out, such as today's date.
    """

    tenant: str = "default"
    lane: Lane = "interactive"
    answer_tokens: int | None = None
    max_model_len: int | None = None
    timeout_s: float | None = None
    result_ttl_s: int = 86400
    idempotency_key: str | None = None
    batch: str | None = None
    normalise: bool = False
    drop_lines: Sequence[re.Pattern[str]] = field(default=())

    def limit(self, asked: int | None) -> int:
        """Most tokens of one answer; the engine ends it where the context does."""
        if asked is not None:
            return max(1, asked)
        room = self.max_model_len or UNKNOWN_CONTEXT
        return min(self.answer_tokens or room, room)


def chat_job(request: ChatRequest, terms: Terms) -> Job:
    """
    The job of a chat; its template is rendered by the worker, once.

    Raises:
        ApiError: the queue's schema refuses it.
    """
    messages = [
        {"role": "system" if turn.role == "developer" else turn.role, "content": turn.text} for turn in request.messages
    ]
    if terms.normalise or terms.drop_lines:
        for turn in messages:
            if turn["role"] == "system":
                turn["content"] = normalised(turn["content"], terms)
    options = _options(request, terms.limit(request.most_tokens), request.num_logprobs)
    return _build(request, terms, terms.idempotency_key, {"messages": messages}, options)


def completion_jobs(request: CompletionRequest, terms: Terms) -> list[Job]:
    """
    One job a prompt, in order.

    Raises:
        ApiError: the queue's schema refuses one.
    """
    asked = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    options = _options(request, terms.limit(asked), request.num_logprobs)
    if request.echo and request.logprobs is not None:
        options["prompt_logprobs"] = request.logprobs
    jobs = []
    for index, prompt in enumerate(request.prompt):
        key = terms.idempotency_key
        if key is not None and len(request.prompt) > 1:
            key = f"{key}:{index}"
        jobs.append(_build(request, terms, key, {"prompt": prompt}, options))
    return jobs


def normalised(text: str, terms: Terms) -> str:
    """A system message without the lines that the terms drop, and with plain white space."""
    if terms.drop_lines:
        lines = text.splitlines()
        text = "\n".join(line for line in lines if not any(one.search(line) for one in terms.drop_lines))
    if terms.normalise:
        text = _BLANKS.sub("\n\n", _LINES.sub("\n", _SPACES.sub(" ", text))).strip()
    return text


# what has the same name and meaning on both sides
_SAME = (
    *("temperature", "top_p", "n", "presence_penalty", "frequency_penalty", "logit_bias", "min_p", "min_tokens"),
    *("repetition_penalty", "ignore_eos", "stop", "stop_token_ids", "include_stop_str_in_output"),
    "skip_special_tokens",
)
_USUAL = Options()


def _options(request: Sampling, max_tokens: int, logprobs: int | None) -> dict[str, Any]:
    """What differs from the queue's own defaults, so that equal requests are equal jobs."""
    values = {name: getattr(request, name) for name in _SAME}
    # -1 is how others say "all"
    values["top_k"] = max(0, request.top_k)
    options: dict[str, Any] = {name: value for name, value in values.items() if value != getattr(_USUAL, name)}
    # OpenAI samples where a request says nothing, and the queue is greedy
    options |= {"temperature": request.temperature, "max_tokens": max_tokens}
    if request.seed is not None:
        options["seed"] = request.seed & (2**63 - 1)
    if logprobs is not None:
        options["logprobs"] = logprobs
    return options | dict(request.shapes.values())


def _build(request: Sampling, terms: Terms, key: str | None, prompt: dict[str, Any], options: dict[str, Any]) -> Job:
    fields: dict[str, Any] = {
        "model": request.model,
        "tenant": terms.tenant,
        "lane": terms.lane,
        "timeout_s": terms.timeout_s,
        "idempotency_key": key,
        "batch": terms.batch,
        "stream": request.stream or None,
        "metadata": request.metadata or None,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        job = Job.build(**given, **prompt, options=options, result_ttl_s=terms.result_ttl_s)
        # a text that cannot be written is this request's fault, and is to be told as such
        job.body()
    except InvalidJob as error:
        raise _refusal(request, error) from None
    return job


def _refusal(request: Sampling, error: InvalidJob) -> ApiError:
    message, param = str(error), None
    if error.code == "invalid_grammar":
        # in the words of the request, which knows no options of jobs
        [(param, (option, _))] = request.shapes.items()
        message = message.replace(f"options.{option}", param, 1)
    return of_code(error.code, message, param)
