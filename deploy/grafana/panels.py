"""What panels are made of, and the expressions that several of them share."""

from dataclasses import dataclass
from typing import Any

# whoever exports a queue says the same of it
QUEUE = 'queue=~"$queue"'
RATE = "[$__rate_interval]"


@dataclass(frozen=True)
class Panel:
    """
    One picture.

    Args:
        queries: An expression and its legend each.
        unit: As Grafana names it.
        kind: "timeseries", "stat", "table" or "heatmap".
        steps: Values from which on a figure is yellow, and red; from high to low where the first is larger.
    """

    title: str
    text: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    height: int = 8
    steps: tuple[float, float] | None = None
    stacked: bool = False


Rows = tuple[tuple[str, tuple[Panel, ...]], ...]


def of_queue(metric: str, by: str = "queue", extra: str = "") -> str:
    """A metric that all exporters say alike."""
    return f"max by ({by}) ({metric}{{{QUEUE}{extra}}})"


def grows(metric: str, by: str = "queue", extra: str = "", window: str = RATE) -> str:
    """How fast a counter of the queue grows, that all exporters say alike."""
    return f"max by ({by}) (rate({metric}{{{QUEUE}{extra}}}{window}))"


def rate(metric: str, by: str = "queue", extra: str = "", window: str = RATE) -> str:
    """How fast a counter of the workers grows, over all of them."""
    return f"sum by ({by}) (rate({metric}{{{QUEUE}{extra}}}{window}))"


def quantile(share: float, metric: str, extra: str = "", by: str = "queue, lane") -> str:
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', f'{by}, le', extra)})"


def gateway_quantile(metric: str, share: float = 0.99) -> str:
    """Of all gateways, which have no queue's label."""
    return f"histogram_quantile({share}, sum by (route, le) (rate({metric}_bucket{RATE})))"


def stat(title: str, text: str, query: str, **options: Any) -> Panel:
    return Panel(title, text, ((query, "{{queue}}"),), kind="stat", width=4, height=5, **options)


BACKLOG = f"sum by (queue) ({of_queue('pagemill_backlog_tokens', 'queue, lane')})"
WAITING = f"sum by (queue) ({of_queue('pagemill_queue_depth', 'queue, lane')})"
DRAIN = of_queue("pagemill_drain_tokens_per_second")
GENERATED = rate("pagemill_engine_generated_tokens_total")
DONE = grows("pagemill_queue_jobs_total", extra=', event="done"')
FAILED = grows("pagemill_queue_jobs_total", extra=', event="failed"')
READY = f"sum by (queue) (pagemill_worker_ready{{{QUEUE}}})"
