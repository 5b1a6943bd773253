"""
Spans of producers by OpenTelemetry. Imported only where traces are wanted: `tracer_for` in client_base.py.

The spans go to whatever tracer provider the program has. Our own programs set one up (trace_export.py);
another program does that as its libraries need it. Nothing of a prompt stands in them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pagemill import __version__
from pagemill.messages import Accepted
from pagemill.trace_context import TraceContext

# jobs carry W3C's headers, whatever a program's other messages carry
_W3C = TraceContextTextMapPropagator()

SCOPE = "pagemill"

# as much as W3C has everybody pass on; a job with far more would be refused
_MAX_STATE = 512

_METHODS = frozenset({"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "QUERY", "TRACE"})


class Sending:
    """A producer span that is open; the jobs that are sent within it carry its context."""

    def __init__(self, span: Span) -> None:
        self._span = span

    @property
    def context(self) -> TraceContext | None:
        """What the jobs carry; None where there is no trace."""
        return context_of(self._span)

    def sent(self, accepted: Sequence[Accepted], queue: str | None = None) -> None:
        """Note what became of the jobs."""
        if not self._span.is_recording():
            return
        if queue is not None:
            self._span.set_attribute("messaging.destination.name", queue)
        if len(accepted) == 1:
            self._span.set_attribute("messaging.message.id", accepted[0].job_id)
        else:
            self._span.set_attribute("messaging.batch.message_count", len(accepted))
        num_known = sum(one.duplicate for one in accepted)
        if num_known:
            self._span.set_attribute("pagemill.duplicates", num_known)


class Serving:
    """The span of a request over HTTP."""

    def __init__(self, span: Span, method: str) -> None:
        self._span = span
        self._method = method

    @property
    def trace_id(self) -> str:
        return f"{self._span.get_span_context().trace_id:032x}"

    def served(self, route: str, status: int, request_id: str) -> None:
        """Note how it ended; `route` is a method and a path as routes write it, or "unknown"."""
        path = route.partition(" ")[2]
        self._span.update_name(route if path else self._method)
        if path:
            self._span.set_attribute("http.route", path)
        self._span.set_attribute("http.response.status_code", status)
        self._span.set_attribute("pagemill.request.id", request_id)
        if status >= 500:
            failed(self._span, str(status))


class Tracer:
    """Makes spans in the running program."""

    def __init__(self) -> None:
        self._tracer = trace.get_tracer(SCOPE, __version__)

    @contextmanager
    def sending(self, queue: str) -> Iterator[Sending]:
        """A span around the submit of one job or of many."""
        attributes = {
            "messaging.system": "redis",
            "messaging.operation.name": "send",
            "messaging.operation.type": "send",
            "messaging.destination.name": queue,
        }
        with self.span(f"send {queue}", kind=SpanKind.PRODUCER, attributes=attributes) as span:
            yield Sending(span)

    @contextmanager
    def serving(self, method: str, headers: Mapping[str, str]) -> Iterator[Serving]:
        """A span around a request over HTTP, which continues the trace in its headers."""
        # methods that callers make up are no names
        known = method if method in _METHODS else "_OTHER"
        attributes = {"http.request.method": known}
        with self.span(known, kind=SpanKind.SERVER, attributes=attributes, carrier=headers) as span:
            yield Serving(span, known)

    @contextmanager
    def processing(self, task: str, task_id: str, headers: Mapping[str, str]) -> Iterator[Span]:
        """A span around a Celery task, which continues the trace in its message's headers."""
        attributes = {
            "messaging.system": "celery",
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.message.id": task_id,
            "celery.task_name": task,
        }
        with self.span(f"process {task}", kind=SpanKind.CONSUMER, attributes=attributes, carrier=headers) as span:
            yield span

    @contextmanager
    def span(
        self,
        name: str,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Mapping[str, Any] | None = None,
        carrier: Mapping[str, str] | None = None,
    ) -> Iterator[Span]:
        """
        A span that is the current one meanwhile; it ends as failed where something is raised.

        Args:
            carrier: Headers of the request or message that caused it; None continues the current trace.
        """
        context = None if carrier is None else extracted(carrier)
        # messages of errors may quote a prompt: their kind is enough
        with self._tracer.start_as_current_span(
            name, context, kind, attributes, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield span
            except Exception as error:
                failed(span, type(error).__name__)
                raise

    def past(self, name: str, began_ns: int, ended_ns: int, attributes: Mapping[str, Any], within: Span) -> None:
        """A span of something that has ended."""
        context = trace.set_span_in_context(within)
        self._tracer.start_span(name, context, attributes=attributes, start_time=began_ns).end(ended_ns)


def failed(span: Span, kind: str) -> None:
    """Mark a span as failed, with the kind of fault and none of its words."""
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR))


def context_of(span: Span) -> TraceContext | None:
    """As it travels with a job; None where the span belongs to no trace."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, trace.set_span_in_context(span))
    state = carrier.get("tracestate", "")
    return TraceContext(carrier["traceparent"], state if len(state) <= _MAX_STATE else "") if carrier else None


def extracted(carrier: Mapping[str, str]) -> Context:
    """The context in the headers of a request or a message, by the program's propagators (OTEL_PROPAGATORS)."""
    return propagate.extract(carrier)


def of_job(traceparent: str | None, tracestate: str | None) -> Context:
    """The context that a job carries."""
    given = {"traceparent": traceparent, "tracestate": tracestate}
    return _W3C.extract({name: text for name, text in given.items() if text}, context=Context())
