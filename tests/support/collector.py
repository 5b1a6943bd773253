"""A collector of traces: a real HTTP server that takes OTLP and keeps what it got."""

import gzip
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1 import trace_pb2

from tests.support.servers import wait_for


@dataclass(frozen=True, slots=True)
class Seen:
    """A span as it came."""

    service: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    # trace and span
    links: list[tuple[str, str]]
    attributes: dict[str, Any]
    events: dict[str, dict[str, Any]]
    failed: bool
    began_ns: int
    ended_ns: int

    @property
    def place(self) -> tuple[str, str]:
        return self.trace_id, self.span_id


@dataclass(slots=True)
class Collector:
    """
    Args:
        status: What it answers with.
        delay_s: How long it takes for that.
    """

    status: int = 200
    delay_s: float = 0.0
    port: int = 0
    bodies: list[bytes] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)

    @property
    def environ(self) -> dict[str, str]:
        """What leads a program's spans here."""
        return {
            "PAGEMILL_TRACING": "true",
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.port}",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }

    @property
    def spans(self) -> list[Seen]:
        return [span for body in list(self.bodies) for span in _spans_of(body)]

    def named(self, name: str, **attributes: Any) -> list[Seen]:
        """Those of a name, with such values at keys whose dots are written as two underscores."""
        wanted = {key.replace("__", "."): value for key, value in attributes.items()}
        return [span for span in self.spans if span.name == name and wanted.items() <= span.attributes.items()]

    def one(self, name: str, **attributes: Any) -> Seen:
        """The one of that kind; waits for it."""
        wait_for(lambda: self.named(name, **attributes), 15)
        (span,) = self.named(name, **attributes)
        return span

    def of_job(self, job_id: str, number: int = 1) -> list[Seen]:
        """A worker's spans of a job, the first one first; waits for so many."""
        name = "messaging.message.id"

        def found() -> list[Seen]:
            return [span for span in self.spans if span.kind == "CONSUMER" and span.attributes.get(name) == job_id]

        wait_for(lambda: len(found()) >= number, 20)
        return sorted(found(), key=lambda span: span.began_ns)

    def within(self, span: Seen) -> dict[str, Seen]:
        """Its children, by name."""
        return {one.name: one for one in self.spans if one.trace_id == span.trace_id and one.parent_id == span.span_id}


@contextmanager
def collecting(status: int = 200, delay_s: float = 0.0) -> Iterator[Collector]:
    """A collector that listens meanwhile."""
    collector = Collector(status, delay_s)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(collector))
    collector.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        collector.closing.set()
        server.shutdown()
        server.server_close()
        thread.join(10)


def _handler(collector: Collector) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            collector.closing.wait(collector.delay_s)
            if collector.status == 200 and self.path == "/v1/traces":
                collector.bodies.append(body)
            try:
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()
            except OSError:
                # whoever sent it has left
                return

        def log_message(self, *_: object) -> None:
            """Nothing."""

    return Handler


def _spans_of(body: bytes) -> Iterator[Seen]:
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        service = _values(resource.resource.attributes)["service.name"]
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Seen(
                    service=service,
                    name=span.name,
                    kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
                    attributes=_values(span.attributes),
                    events={event.name: _values(event.attributes) for event in span.events},
                    failed=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
                    began_ns=span.start_time_unix_nano,
                    ended_ns=span.end_time_unix_nano,
                )


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind) if kind else None


def took_s(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began
