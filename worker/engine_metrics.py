"""The engine's metrics, read from what its process has said last; and the same under vLLM's names."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import isfinite

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from pagemill.schema import LANES
from worker.engine_port import EngineDoor
from worker.metrics import WorkerMetrics
from worker.timings import Histogram

Reading = Callable[[EngineDoor], float]

GAUGES: tuple[tuple[str, str, Reading], ...] = (
    ("up", "1 while the engine's process works.", lambda door: door.alive),
    ("running", "Sequences in the batch.", lambda door: door.stats.num_running),
    ("waiting", "Sequences that wait inside the engine.", lambda door: door.stats.num_waiting),
    ("swapped", "Sequences whose blocks are in host memory.", lambda door: door.stats.num_swapped),
    ("max_running", "Most sequences that run at once.", lambda door: door.facts.max_num_seqs),
    ("max_step_tokens", "Token budget of one step.", lambda door: door.facts.max_num_batched_tokens),
    ("kv_usage_ratio", "KV blocks in use, of all.", lambda door: door.stats.kv_usage),
    ("kv_tokens", "Size of the KV cache in tokens.", lambda door: door.facts.kv_tokens),
    ("kv_free_tokens", "Tokens of KV cache that a new job could have.", lambda door: door.capacity.free_tokens),
    ("step_age_seconds", "For how long the engine has been at its present step; 0 while idle.", lambda d: d.step_age_s),
)

COUNTERS: tuple[tuple[str, str, Reading], ...] = (
    ("steps", "Steps that were launched.", lambda door: door.stats.num_steps),
    ("prompt_tokens", "Tokens of prompts that came into the engine.", lambda door: door.stats.prompt_tokens),
    ("generated_tokens", "Tokens that were generated.", lambda door: door.stats.generated_tokens),
    ("preemptions", "Sequences that had to give their blocks up.", lambda door: door.stats.num_preemptions),
    ("sheds", "Times that the device was out of memory.", lambda door: door.stats.num_sheds),
    ("prefix_query_tokens", "Prompt tokens looked up in the prefix cache.", lambda d: d.stats.prefix_query_tokens),
    ("prefix_hit_tokens", "Prompt tokens found in the prefix cache.", lambda door: door.stats.prefix_hit_tokens),
)

QUEUED = "From a request's coming into the engine to the first step with it."
FIRST_TOKEN = "From a request's coming into the engine to its first token."


class EngineCollector(Collector):
    """
    Shows an engine, once there is one.

    Args:
        door: Gives the engine; None while it is loaded.
    """

    def __init__(self, door: Callable[[], EngineDoor | None]) -> None:
        self._door = door

    def collect(self) -> Iterable[Metric]:
        door = self._door()
        for name, text, reading in GAUGES:
            yield GaugeMetricFamily(f"pagemill_engine_{name}", text, None if door is None else float(reading(door)))
        for name, text, reading in COUNTERS:
            yield CounterMetricFamily(f"pagemill_engine_{name}", text, None if door is None else float(reading(door)))
        steps = HistogramMetricFamily("pagemill_engine_step_seconds", "How long the engine's turns last.", labels=())
        queued = HistogramMetricFamily("pagemill_engine_queue_seconds", QUEUED, labels=("lane",))
        first = HistogramMetricFamily("pagemill_engine_first_token_seconds", FIRST_TOKEN, labels=("lane",))
        if door is not None:
            steps.add_metric((), *cumulative(door.timings.steps))
            for family, parts in ((queued, door.timings.queued), (first, door.timings.first_tokens)):
                for lane, part in zip(LANES, parts, strict=True):
                    family.add_metric((lane,), *cumulative(part))
        yield from (steps, queued, first)


class VllmCollector(Collector):
    """
    The same for dashboards that were made for vLLM; `request_queue_time` is of the engine, without the queue.

    Args:
        model: The name that results carry.
    """

    def __init__(self, door: Callable[[], EngineDoor | None], metrics: WorkerMetrics, model: Callable[[], str]) -> None:
        self._door = door
        self._metrics = metrics
        self._model = model

    def collect(self) -> Iterable[Metric]:
        door = self._door()
        labels = {"model_name": self._model(), "engine": "0"}
        for vllm_name, (text, reading) in VLLM_GAUGES.items():
            gauge = GaugeMetricFamily(vllm_name, text, labels=tuple(labels))
            if door is not None:
                gauge.add_metric(tuple(labels.values()), float(reading(door)))
            yield gauge
        for vllm_name, (text, reading) in VLLM_COUNTERS.items():
            counter = CounterMetricFamily(vllm_name, text, labels=tuple(labels))
            if door is not None:
                counter.add_metric(tuple(labels.values()), float(reading(door)))
            yield counter
        yield self._successes(labels)
        yield from self._histograms(door, labels)

    def _successes(self, labels: Mapping[str, str]) -> Metric:
        family = CounterMetricFamily("vllm:request_success", "Jobs done.", labels=(*labels, "finished_reason"))
        sums: dict[str, float] = {}
        for sample in self._samples(self._metrics.jobs, "_total"):
            if sample.labels["outcome"] == "done":
                sums[sample.labels["reason"]] = sums.get(sample.labels["reason"], 0.0) + sample.value
        for reason, value in sums.items():
            family.add_metric((*labels.values(), reason), value)
        return family

    def _histograms(self, door: EngineDoor | None, labels: Mapping[str, str]) -> Iterator[Metric]:
        names, values = tuple(labels), tuple(labels.values())
        queued = HistogramMetricFamily("vllm:request_queue_time_seconds", QUEUED, labels=names)
        first = HistogramMetricFamily("vllm:time_to_first_token_seconds", FIRST_TOKEN, labels=names)
        latency = HistogramMetricFamily("vllm:e2e_request_latency_seconds", "From pull to result.", labels=names)
        if door is not None:
            queued.add_metric(values, *cumulative(_sum(door.timings.queued)))
            first.add_metric(values, *cumulative(_sum(door.timings.first_tokens)))
            buckets: dict[str, float] = {}
            for sample in self._samples(self._metrics.run_seconds, "_bucket"):
                buckets[sample.labels["le"]] = buckets.get(sample.labels["le"], 0.0) + sample.value
            total = sum(sample.value for sample in self._samples(self._metrics.run_seconds, "_sum"))
            latency.add_metric(values, list(buckets.items()), total)
        yield from (queued, first, latency)

    @staticmethod
    def _samples(metric: Collector, suffix: str) -> list[Sample]:
        return [sample for family in metric.collect() for sample in family.samples if sample.name.endswith(suffix)]


VLLM_GAUGES: dict[str, tuple[str, Reading]] = {
    "vllm:num_requests_running": ("As pagemill_engine_running.", lambda door: door.stats.num_running),
    "vllm:num_requests_waiting": ("As pagemill_engine_waiting.", lambda door: door.stats.num_waiting),
    "vllm:kv_cache_usage_perc": ("As pagemill_engine_kv_usage_ratio.", lambda door: door.stats.kv_usage),
}

VLLM_COUNTERS: dict[str, tuple[str, Reading]] = {
    "vllm:num_preemptions": ("As pagemill_engine_preemptions_total.", lambda door: door.stats.num_preemptions),
    "vllm:prompt_tokens": ("As pagemill_engine_prompt_tokens_total.", lambda door: door.stats.prompt_tokens),
    "vllm:generation_tokens": ("As pagemill_engine_generated_tokens_total.", lambda door: door.stats.generated_tokens),
    "vllm:prefix_cache_queries": (
        "As pagemill_engine_prefix_query_tokens_total.",
        lambda door: door.stats.prefix_query_tokens,
    ),
    "vllm:prefix_cache_hits": (
        "As pagemill_engine_prefix_hit_tokens_total.",
        lambda door: door.stats.prefix_hit_tokens,
    ),
}


def cumulative(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    """Buckets as Prometheus has them, each with all below it; and the sum."""
    found, so_far = [], 0
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        so_far += count
        found.append((f"{bound}" if isfinite(bound) else "+Inf", float(so_far)))
    return found, histogram.total


def _sum(histograms: Iterable[Histogram]) -> Histogram:
    first, *others = histograms
    counts = tuple(map(sum, zip(first.counts, *(one.counts for one in others), strict=True)))
    return Histogram(first.bounds, counts, first.total + sum(one.total for one in others))
