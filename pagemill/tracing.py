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
            self._span.set_attribute("messaging.message.id", accepted[0].job_id)
            self._span.set_attribute("messaging.destination.name", queue)
        else:
            self._span.set_attribute("messaging.batch.message_count", len(accepted))
        num_known = sum(one.duplicate for one in accepted)
        if num_known:
            self._span.set_attribute("pagemill.duplicates", num_known)


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
    return TraceContext(carrier["traceparent"], carrier.get("tracestate", "")) if carrier else None


def extracted(carrier: Mapping[str, str]) -> Context:
    """The context in the headers of a request or a message, by the program's propagators (OTEL_PROPAGATORS)."""
    return propagate.extract(carrier)


def of_job(traceparent: str | None, tracestate: str | None) -> Context:
    """The context that a job carries."""
    given = {"traceparent": traceparent, "tracestate": tracestate}
    return _W3C.extract({name: text for name, text in given.items() if text}, context=Context())


def current_trace_id() -> str:
    """The trace that the running code belongs to; empty where there is none."""
    context = trace.get_current_span().get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else ""
