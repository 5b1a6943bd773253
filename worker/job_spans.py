"""
The spans of jobs: one for each time that this worker had one, made when the job leaves it.

All is made here, of what the worker knows anyway; the engine knows nothing of it. A worker that is
killed has no time for spans: the next one's say that it was there (attempt, lapses).
"""

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind

from engine.request import RequestTimes
from pagemill import __version__
from pagemill.messages import Outcome
from pagemill.schema import Job, Options, Result
from pagemill.trace_context import is_sampled_out
from pagemill.tracing import SCOPE, Tracer, failed, of_job
from worker.leases import Held
from worker.metrics import is_first

# of each message of a prompt, and each answer, where the operator wants them
CONTENT_CHARS = 1000
_MAX_MESSAGES = 16

_USUAL = Options()

# names of the conventions for what differs from the usual
_OPTIONS = {
    "top_k": "gen_ai.request.top_k",
    "seed": "gen_ai.request.seed",
    "n": "gen_ai.request.choice.count",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
}


class JobSpans:
    """
    Makes the spans; its methods are called on the event loop, and wait for nothing.

    Args:
        tracer: Of the running program.
        model: The name that results carry.
        as_child: In the producer's trace; else linked to that, in a trace of its own.
        with_content: With the beginning of prompt and answers.
    """

    def __init__(
        self, tracer: Tracer, *, queue: str, worker_id: str, model: str, as_child: bool, with_content: bool
    ) -> None:
        self._maker = tracer
        self._tracer = trace.get_tracer(SCOPE, __version__)
        self._name = f"process {queue}"
        self._as_child = as_child
        self._with_content = with_content
        # of the two clocks, as the span that is being made began
        self._offset_ns = 0
        self._common = {
            "messaging.system": "redis",
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.destination.name": queue,
            "messaging.client.id": worker_id,
            "gen_ai.provider.name": "pagemill",
            "gen_ai.response.model": model,
        }

    def begin(self, held: Held) -> None:
        """Have a job's way noted that has been read, where it is to have a span."""
        if held.request is not None and held.request.timed:
            held.marks = []
            held.mark("prepared")
            if resumed := held.request.resumed:
                held.mark("resumed", tokens=sum(len(answer.token_ids) for answer in resumed))

    def settled(self, held: Held, outcome: Outcome, result: Result | None) -> None:
        """A job has ended in this worker; `result` is None where it is a dead letter."""
        how = outcome if outcome in ("fenced", "gone") else result.status if result else "dead_letter"
        if (span := self._start(held, how)) is None:
            return
        if result is None:
            failed(span, "dead_letter")
        else:
            span.set_attributes(dict(_of_result(result)))
            if result.failure is not None:
                failed(span, result.failure.code)
            if self._with_content:
                span.set_attributes(_answers(result))
        self._end(span, held)

    def left(self, held: Held, how: str, fault: str = "") -> None:
        """A job leaves this worker without an end: it was put off, handed back, lost, or is a suspect."""
        if (span := self._start(held, how)) is not None:
            if fault:
                failed(span, fault)
            self._end(span, held)

    def _start(self, held: Held, how: str) -> Span | None:
        """The span of a job, from its pull on; None where it has none."""
        job = held.job
        if job is not None and is_sampled_out(job.traceparent):
            return None
        parent, links = self._place(job)
        self._offset_ns = time.time_ns() - time.monotonic_ns()
        since_ns = self._ns(held.since)
        span = self._tracer.start_span(self._name, parent, SpanKind.CONSUMER, links=links, start_time=since_ns)
        if not span.is_recording():
            return None
        span.set_attributes(self._common | dict(_of_delivery(held)) | {"pagemill.job.outcome": how})
        if job is not None:
            span.set_attributes(dict(_of_job(job, str(self._common["gen_ai.response.model"]))))
            if self._with_content:
                span.set_attributes(_prompt(job))
        return span

    def _place(self, job: Job | None) -> tuple[Context, list[Link]]:
        # never this program's own context
        if job is None or job.traceparent is None:
            return Context(), []
        theirs = of_job(job.traceparent, job.tracestate)
        if self._as_child:
            return theirs, []
        context = trace.get_current_span(theirs).get_span_context()
        return Context(), [Link(context)] if context.is_valid else []

    def _ns(self, at: float) -> int:
        """A time of the monotonic clock, of any process of this host, by the wall clock."""
        return round(at * 1e9) + self._offset_ns

    def _end(self, span: Span, held: Held) -> None:
        for mark in held.marks or ():
            span.add_event(f"pagemill.{mark.name}", mark.attributes, self._ns(mark.at))
        self._add_wait(span, held)
        if held.times is not None:
            self._add_phases(span, held, held.times)
        span.end()

    def _add_wait(self, span: Span, held: Held) -> None:
        delivery = held.delivery
        if is_first(delivery):
            # both by the server's clock, of which only the difference is used
            waited_ns = max(0, delivery.started_ms - delivery.accepted_ms) * 1_000_000
            since_ns = self._ns(held.since)
            self._maker.past("wait", since_ns - waited_ns, since_ns, {}, span)
        else:
            attributes = {"attempt": delivery.attempt, "lapses": delivery.lapses, "faults": delivery.num_faults}
            span.add_event("pagemill.redelivered", attributes, self._ns(held.since))

    def _add_phases(self, span: Span, held: Held, times: RequestTimes) -> None:
        ended = held.left_engine
        span.set_attribute("pagemill.engine.preemptions", held.num_preemptions)
        phases = (
            ("prefill", times.started, times.answered or ended),
            ("decode", times.answered, ended),
        )
        for name, began, over in phases:
            if began is not None:
                self._maker.past(name, self._ns(began), self._ns(max(began, over)), {}, span)


def _of_delivery(held: Held) -> Iterator[tuple[str, Any]]:
    delivery = held.delivery
    yield "messaging.message.id", delivery.job_id
    yield "pagemill.job.lane", delivery.lane
    yield "pagemill.job.tenant", delivery.tenant
    yield "pagemill.job.attempt", delivery.attempt
    if delivery.lapses:
        yield "pagemill.job.lapses", delivery.lapses
    if delivery.num_faults:
        yield "pagemill.job.faults", delivery.num_faults


def _of_job(job: Job, model: str) -> Iterator[tuple[str, Any]]:
    options = job.options
    yield "gen_ai.operation.name", "text_completion" if job.messages is None else "chat"
    yield "gen_ai.request.model", job.model or model
    yield "gen_ai.request.max_tokens", options.max_tokens
    yield "gen_ai.request.temperature", options.temperature
    yield "gen_ai.request.top_p", options.top_p
    yield "gen_ai.output.type", "text" if options.json_schema is None else "json"
    for option, name in _OPTIONS.items():
        if (value := getattr(options, option)) != getattr(_USUAL, option):
            yield name, value
    if job.batch is not None:
        yield "pagemill.job.batch", job.batch


def _of_result(result: Result) -> Iterator[tuple[str, Any]]:
    usage = result.usage
    yield "gen_ai.response.id", result.job_id
    yield "gen_ai.usage.input_tokens", usage.prompt_tokens
    yield "gen_ai.usage.output_tokens", usage.completion_tokens
    if usage.cached_tokens:
        yield "gen_ai.usage.cache_read.input_tokens", usage.cached_tokens
    yield "pagemill.usage.gpu_ms", usage.gpu_ms
    if result.completions:
        yield "gen_ai.response.finish_reasons", [one.finish_reason for one in result.completions]


def _prompt(job: Job) -> Mapping[str, str]:
    if job.messages is not None:
        turns = [_message(turn.role, turn.content) for turn in job.messages[:_MAX_MESSAGES]]
    elif isinstance(job.prompt, str):
        turns = [_message("user", job.prompt)]
    else:
        return {}
    return {"gen_ai.input.messages": json.dumps(turns)}


def _answers(result: Result) -> Mapping[str, str]:
    answers = [_message("assistant", one.text, one.finish_reason) for one in result.completions[:_MAX_MESSAGES]]
    return {"gen_ai.output.messages": json.dumps(answers)} if answers else {}


def _message(role: str, text: str, finish_reason: str | None = None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": role, "parts": [{"type": "text", "content": text[:CONTENT_CHARS]}]}
    return message if finish_reason is None else message | {"finish_reason": finish_reason}
