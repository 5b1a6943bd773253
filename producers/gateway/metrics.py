"""What the gateway counts, in a registry of its own; no label tells a tenant, a key or a request apart."""

from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from pagemill.traces import SpanOutcome

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

# a series more for each counter, of no use to Prometheus
disable_created_metrics()


class Metrics:
    """Counters of one gateway process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "pagemill_gateway_requests", "Requests that were answered.", ["route", "code"], registry=self.registry
        )
        self.latency = Histogram(
            "pagemill_gateway_request_seconds",
            "From a request's first byte to the last of its response.",
            ["route"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.first_token = Histogram(
            "pagemill_gateway_first_token_seconds",
            "From a streaming request's first byte to the first text of its response.",
            ["route"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.tokens = Counter(
            "pagemill_gateway_tokens", "Tokens of answered requests.", ["kind"], registry=self.registry
        )
        self.in_flight = Gauge("pagemill_gateway_in_flight", "Generations that are under way.", registry=self.registry)
        self.refused = Counter(
            "pagemill_gateway_refused",
            "Requests that were refused before they were a job.",
            ["reason"],
            registry=self.registry,
        )
        self.gone = Counter(
            "pagemill_gateway_client_gone", "Requests whose client left before the end.", registry=self.registry
        )
        self.spans = Counter(
            "pagemill_trace_spans",
            "Spans that were exported, that no collector took (failed), and that found no room in the queue (dropped).",
            ["outcome"],
            registry=self.registry,
        )
        for outcome in get_args(SpanOutcome):
            self.spans.labels(outcome)

    def page(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self.registry)
