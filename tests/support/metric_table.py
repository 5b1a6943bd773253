"""
The metrics that there are, as docs/metrics.md lists them.

    python -m tests.support.metric_table

writes the tables of that page anew; all else in it is left as it is.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client.registry import Collector

from worker.autoscale import Autoscaler, Limits
from worker.monitor import Monitor
from worker.queue_metrics import QueueReader
from worker.settings import WorkerSettings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"

# sections of the page, and the names that they have; of several that fit the first one has it
SECTIONS = {
    "jobs": r"pagemill_(job|deadline_slack|results|leases)",
    "pull": r"pagemill_(pull|held|unwritten)",
    "worker": r"pagemill_worker_|process_",
    "engine": r"pagemill_engine_",
    "gpu": r"pagemill_gpu_",
    "traces": r"pagemill_trace_",
    "servers": r"pagemill_(redis|store)_",
    "autoscale": r"pagemill_autoscale_",
    "vllm": r"vllm:",
    "queue": r"pagemill_",
}

Row = tuple[str, str, tuple[str, ...], str]


def rows() -> Iterator[Row]:
    """Name as in a query, kind, labels and meaning of each metric; `queue` stands at all of them."""
    settings = WorkerSettings(metrics_tenants=1, vllm_metrics=True)
    monitor = Monitor(settings)

    async def never() -> Any:
        raise NotImplementedError

    reader = QueueReader(never, Autoscaler(Limits()))
    monitor.metrics.add(*monitor.collectors(reader))
    for collector in tuple(monitor.metrics.registry._collector_to_names):
        yield from _rows_of(collector)


def _rows_of(collector: Collector) -> Iterator[Row]:
    for family in collector.collect():
        # a metric knows its labels, a collector's families theirs
        labels = getattr(family, "_labelnames", getattr(collector, "_labelnames", ()))
        name = f"{family.name}_total" if family.type == "counter" else family.name
        yield name, family.type, tuple(labels), family.documentation


def section_of(name: str) -> str:
    return next(section for section, pattern in SECTIONS.items() if re.match(pattern, name))


def tables() -> dict[str, str]:
    """The text of each table, by section."""
    found: dict[str, list[str]] = {section: [] for section in SECTIONS}
    for name, kind, labels, text in sorted(rows()):
        shown = ", ".join(f"`{label}`" for label in labels)
        found[section_of(name)].append(f"| `{name}` | {kind} | {shown} | {text} |")
    head = "| name | kind | labels | meaning |\n|---|---|---|---|\n"
    return {section: head + "\n".join(lines) + "\n" for section, lines in found.items()}


def with_tables(page: str) -> str:
    """A page whose tables are those of the code."""
    for section, table in tables().items():
        marked = re.compile(rf"(<!-- {section} -->\n)(?:\|[^\n]*\n)*")
        page = marked.sub(lambda match, table=table: match.group(1) + table, page)  # type: ignore[misc]
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
