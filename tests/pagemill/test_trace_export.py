"""Which spans are made and sent, as the OTEL_* variables have it."""

import subprocess
import sys
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider, sampling
from opentelemetry.sdk.trace.sampling import Sampler
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, TraceFlags, TraceState

from pagemill.client import Client
from pagemill.errors import SettingsError
from pagemill.trace_context import TraceContext, is_sampled_out, trace_id_of
from pagemill.trace_export import FollowingLinks, start_export
from pagemill.tracing import context_of
from tests.support.collector import collecting
from tests.support.services import CHECKOUT

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def link(*, sampled: bool) -> Link:
    return Link(SpanContext(1, 1, is_remote=True, trace_flags=TraceFlags(int(sampled))))


@pytest.mark.parametrize(
    ("sampler", "links", "recorded"),
    [
        (sampling.DEFAULT_OFF, [link(sampled=True)], True),
        (sampling.DEFAULT_ON, [link(sampled=False)], False),
        (sampling.DEFAULT_ON, [], True),
        (sampling.DEFAULT_OFF, [], False),
        (sampling.ALWAYS_OFF, [link(sampled=True)], False),
        (sampling.ALWAYS_ON, [link(sampled=False)], True),
    ],
)
def test_a_linked_span_is_recorded_where_its_producers_is(sampler: Sampler, links: list[Link], recorded: bool) -> None:
    """
    Under a parent-based sampler; any other decides alone.
    """
    tracer = TracerProvider(sampler=FollowingLinks(sampler), shutdown_on_exit=False).get_tracer("test")

    assert recorded == tracer.start_span("x", links=links).is_recording()


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_TRACES_EXPORTER", "zipkin"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")]
)
def test_an_export_that_there_is_not_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """
    With the value, and what is possible.
    """
    monkeypatch.setenv(name, value)

    with pytest.raises(SettingsError, match=f"{value}.*want"):
        start_export("test")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ENDPOINT", "user:hunter2@host"),
        *(
            ("HEADERS", value)
            for value in ("Authorization: Bearer hunter2", "a=b,c=hunter2%0A1", "a=hunter2;", "a=hunter2é")
        ),
    ],
)
def test_what_is_written_wrongly_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """
    The library would log it as it stands, at each try.
    """
    for kind in ("", "TRACES_"):
        with monkeypatch.context() as patch:
            patch.setenv(f"OTEL_EXPORTER_OTLP_{kind}{name}", value)
            with pytest.raises(SettingsError, match=f"OTEL_EXPORTER_OTLP_{kind}{name}.* not ") as caught:
                start_export("test")
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("size", ["100", "many", "0"])
def test_a_queue_that_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    """
    As one that holds fewer spans than are sent at once, in words for the operator.
    """
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", size)

    with pytest.raises(SettingsError, match=r"OTEL_BSP_\* cannot be used: "):
        start_export("test")


def test_another_provider_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Whoever made it, a program that has one exports its spans by itself.
    """
    monkeypatch.setattr(trace, "get_tracer_provider", trace.NoOpTracerProvider)

    assert start_export("test") is None


def test_a_state_that_nobody_has_to_pass_on_is_left_out() -> None:
    """
    Of more than 512 characters; the trace goes on without.
    """
    for length, kept in ((512, True), (513, False)):
        state = TraceState([("a", "x" * 256), ("b", "x" * (length - 261))])
        span = NonRecordingSpan(SpanContext(1, 1, is_remote=False, trace_state=state))
        context = context_of(span)
        assert context is not None
        assert (f"00-{1:032x}-{1:016x}-00", kept) == (context.traceparent, bool(context.tracestate))


@pytest.mark.parametrize(("name", "value"), [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")])
def test_nothing_is_exported_where_the_environment_says_so(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """
    Programs go on without.
    """
    monkeypatch.setenv(name, value)

    assert start_export("test") is None


def test_traces_are_off_and_load_nothing(server_url: str) -> None:
    """
    A client without the setting imports no OpenTelemetry, and needs none.
    """
    code = f"""
import sys
sys.modules["opentelemetry"] = None
from pagemill.client import Client
from pagemill.schema import Job
with Client({server_url!r}, queue="off") as client:
    accepted = client.submit(Job(id="off", prompt="x"))
    client.cancel(accepted.job_id)
    print(accepted.job_id)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=True)

    assert "off" == done.stdout.strip()


def test_traces_without_the_library_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    As all that is missing does.
    """
    monkeypatch.setenv("PAGEMILL_TRACING", "true")
    for module in ("opentelemetry", "pagemill.tracing"):
        monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]

    with pytest.raises(SettingsError, match=r"'\.\[otel\]'"):
        Client("redis://127.0.0.1:1")


EMBEDDED = """
import sys
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from pagemill.client import Client
from pagemill.errors import Conflict
from pagemill.schema import Job

provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
trace.set_tracer_provider(provider)
with Client(sys.argv[1], queue=sys.argv[2]) as client:
    job = Job(prompt="x", id="twice")
    for _ in range(2):
        with trace.get_tracer("service").start_as_current_span("handle order"):
            client.submit(job)
    try:
        client.submit(Job(prompt="y", id="twice"))
    except Conflict:
        client.cancel("twice")
"""


def test_a_program_with_its_own_traces_keeps_them(server_url: str, queue: str) -> None:
    """
    A submit is a span within the program's own; a repeated one, of another trace, is the same job still.
    """
    with collecting() as collector:
        subprocess.run(
            [sys.executable, "-c", EMBEDDED, server_url, queue],
            cwd=CHECKOUT,
            env=collector.environ | {"PATH": "/usr/bin:/bin", "OTEL_SERVICE_NAME": "shop"},
            check=True,
            timeout=60,
        )
        orders, sent = collector.named("handle order"), collector.named(f"send {queue}")

    assert {"shop"} == {span.service for span in collector.spans}
    assert [order.place for order in orders] == [(span.trace_id, span.parent_id) for span in sent[:2]]
    assert [None, 1] == [span.attributes.get("pagemill.duplicates") for span in sent[:2]]
    assert [(False, None), (False, None), (True, "Conflict")] == [
        (span.failed, span.attributes.get("error.type")) for span in sent
    ]


@pytest.mark.parametrize(
    ("text", "trace_id", "sampled_out"),
    [
        (f"00-{TRACE}-{SPAN}-01", TRACE, False),
        (f"00-{TRACE}-{SPAN}-00", TRACE, True),
        (f"00-{TRACE}-{SPAN}-03", TRACE, False),
        (f"cc-{TRACE}-{SPAN}-01-what-comes-later", TRACE, False),
        (f"ff-{TRACE}-{SPAN}-00", "", False),
        (f"00-{'0' * 32}-{SPAN}-00", "", False),
        (f"00-{TRACE.upper()}-{SPAN}-00", "", False),
        (f"00-{TRACE}-{SPAN}-00-more-than-its-version-has", "", False),
        ("", "", False),
        (None, "", False),
        ("garbage", "", False),
    ],
)
def test_a_traceparent_is_read_as_w3c_has_it(text: Any, trace_id: str, sampled_out: bool) -> None:
    """
    What is none is ignored.
    """
    assert (trace_id, sampled_out) == (trace_id_of(text), is_sampled_out(text))


def test_rows_are_told_not_to_be_recorded() -> None:
    """
    The trace and the span stay, the flag goes.
    """
    context = TraceContext(f"00-{TRACE}-{SPAN}-03", "a=b")

    assert TraceContext(f"00-{TRACE}-{SPAN}-02", "a=b") == context.unrecorded()
