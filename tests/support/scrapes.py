"""What a process exports, as Prometheus would see it."""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from producers.gateway.metrics import Metrics

# what Prometheus makes of a metric, by its kind
SUFFIXES: Mapping[str, tuple[str, ...]] = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
}


@dataclass(frozen=True)
class Scrape:
    """One scrape, parsed."""

    text: str

    @cached_property
    def families(self) -> list[Metric]:
        return list(text_string_to_metric_families(self.text))

    @property
    def names(self) -> set[str]:
        """Names that a query may use; also of metrics that have no value at the moment."""
        return {family.name + suffix for family in self.families for suffix in SUFFIXES[family.type]}

    def value(self, name: str, **labels: str) -> float | None:
        """The value of the one sample with these labels, and perhaps others; None where there is none."""
        found = [
            sample.value
            for family in self.families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert len(found) <= 1, f"{name} {labels} is {len(found)} samples"
        return found[0] if found else None


def gateway_scrape() -> Scrape:
    """What a gateway exports that has done nothing yet."""
    return Scrape(Metrics().page().decode())


@dataclass(frozen=True)
class Watched:
    """A worker that has done something, where it exports, and what it said there."""

    port: int
    scrape: Scrape


def scrape(port: int) -> Scrape:
    status, text = get(port, "/metrics")
    assert 200 == status
    return Scrape(text)


def get(port: int, path: str) -> tuple[int, str]:
    """Status and body."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def get_json(port: int, path: str) -> tuple[int, Any]:
    status, text = get(port, path)
    return status, json.loads(text)
