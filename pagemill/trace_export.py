"""
Where the spans of our own programs go: to a collector by OTLP over HTTP, as the OTEL_* variables say.

Nobody waits for it. Spans wait in a bounded queue, a thread sends them, and those that find no room or
no collector are counted and dropped; that a collector is away is said once.
"""

import logging
import os
import re
import threading
from collections.abc import Sequence
from urllib.parse import unquote

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler, SamplingResult
from opentelemetry.trace import get_current_span

from pagemill import __version__
from pagemill.errors import SettingsError
from pagemill.traces import OnSpans, SpanOutcome

log = logging.getLogger("pagemill.traces")

_QUEUE_SIZE = 2048

# as the library takes them: what it does not take it shows, in the log
_HEADER = re.compile(r"[\w!#$%&'*+.^`|~-]+\s*=[\x20\x21\x23-\x2b\x2d-\x3a\x3c-\x5b\x5d-\x7e]*", re.ASCII)


class Export:
    """
    The export of one program.

    Args:
        on_spans: Told what became of spans, on any thread.
    """

    def __init__(self, service: str, instance: str, on_spans: OnSpans) -> None:
        self._exporter = _Watched(OTLPSpanExporter(), on_spans)
        self._provider = TracerProvider(resource=_resource(service, instance), shutdown_on_exit=False)
        self._provider.sampler = FollowingLinks(self._provider.sampler)
        self._provider.add_span_processor(_Bounded(self._exporter, on_spans))
        trace.set_tracer_provider(self._provider)

    def stop(self, timeout_s: float) -> None:
        """Send what waits, for so long at most; later spans are lost."""
        flush = threading.Thread(target=self._provider.shutdown, name="traces-flush", daemon=True)
        flush.start()
        flush.join(timeout_s)
        if flush.is_alive():
            # breaks off a try that goes on
            self._exporter.shutdown()


def start_export(service: str, *, instance: str = "", on_spans: OnSpans | None = None) -> Export | None:
    """
    Have spans of this process exported; None where the environment says that none are, or who else does it.

    Args:
        service: Its name, unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES say another.
        instance: Tells processes of one service apart.

    Raises:
        SettingsError: the environment asks for an exporter that there is not, for queues that cannot be, or for
            a place or headers that are none.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        # as under opentelemetry-instrument, or with another vendor's library; what stands for none is a proxy
        return None
    wanted = os.environ.get("OTEL_TRACES_EXPORTER", "otlp")
    if wanted == "none":
        return None
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    if wanted != "otlp":
        raise SettingsError(f"OTEL_TRACES_EXPORTER is {wanted!r}: want otlp or none")
    if protocol != "http/protobuf":
        raise SettingsError(f"the protocol of OTLP is {protocol!r}: want http/protobuf, usually at port 4318")
    _check_variables()
    try:
        return Export(service, instance, on_spans or _count_nothing)
    except ValueError as error:
        raise SettingsError(f"the variables OTEL_BSP_* cannot be used: {error}") from None


def _check_variables() -> None:
    """Refuse what the exporter would complain of by showing it: logins stand in URLs, and tokens in headers."""
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        if not (os.environ.get(name) or "http://").startswith(("http://", "https://")):
            raise SettingsError(f"{name} does not begin with http:// or https://")
    for name in ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"):
        given = [part.strip() for part in os.environ.get(name, "").split(",") if part.strip()]
        for number, header in enumerate(given, 1):
            if not _HEADER.fullmatch(header) or not unquote(header).isprintable():
                raise SettingsError(f"{name}: header {number} is not name=value, with special characters as %xx")


class FollowingLinks(Sampler):
    """
    Has a span without a parent that is linked to another follow that one: a worker's span is recorded where its
    producer's was. A sampler that is not parent-based decides alone.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._follows = isinstance(sampler, ParentBased)

    def should_sample(self, parent_context, trace_id, name, kind=None, attributes=None, links=None, trace_state=None):  # type: ignore[no-untyped-def]
        sampler = self._sampler
        if self._follows and links and not get_current_span(parent_context).get_span_context().is_valid:
            sampled = any(link.context.trace_flags.sampled for link in links)
            sampler = ALWAYS_ON if sampled else ALWAYS_OFF
        result: SamplingResult = sampler.should_sample(
            parent_context, trace_id, name, kind, attributes, links, trace_state
        )
        return result

    def get_description(self) -> str:
        return f"FollowingLinks({self._sampler.get_description()})"


class _Watched(SpanExporter):
    """An exporter whose results are counted, and told of when they change."""

    def __init__(self, exporter: SpanExporter, on_spans: OnSpans) -> None:
        self._exporter = exporter
        self._on_spans = on_spans
        self._reasons = _Reasons()
        self._is_failing = False
        self.num_taken = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_taken += len(spans)
        result = self._exporter.export(spans)
        fails = result is not SpanExportResult.SUCCESS
        self._on_spans("failed" if fails else "exported", len(spans))
        if fails and not self._is_failing:
            log.warning("traces.not_exported", extra={"fields": {"spans": len(spans), "reason": self._reasons.last}})
        elif self._is_failing and not fails:
            log.warning("traces.exported_again")
        self._is_failing = fails
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class _Reasons(logging.Handler):
    """Keeps what the exporter says of its last failure, which it would tell with each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.last = ""
        exporters = logging.getLogger("opentelemetry.exporter")
        exporters.handlers, exporters.propagate = [self], False

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()


class _Bounded(BatchSpanProcessor):
    """Drops what does not fit and counts that; the library's own makes room at the other end, and logs each time."""

    def __init__(self, exporter: _Watched, on_spans: OnSpans) -> None:
        super().__init__(exporter)
        self._watched = exporter
        self._on_spans = on_spans
        self._most = int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", _QUEUE_SIZE))
        self._lock = threading.Lock()
        self._start_count()
        # a child's queue is empty
        os.register_at_fork(after_in_child=self._start_count)

    def _start_count(self) -> None:
        self._lock = threading.Lock()
        self._num_put = self._watched.num_taken

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is None or not span.context.trace_flags.sampled:
            return
        with self._lock:
            has_room = self._num_put - self._watched.num_taken < self._most
            self._num_put += has_room
        if has_room:
            super().on_end(span)
        else:
            self._on_spans("dropped", 1)


def _count_nothing(outcome: SpanOutcome, count: int) -> None:
    """For programs without metrics."""


def _resource(service: str, instance: str) -> Resource:
    given = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    ours = {"service.version": __version__, "service.instance.id": instance}
    if not given:
        ours["service.name"] = service
    return Resource.create({name: value for name, value in ours.items() if value})
