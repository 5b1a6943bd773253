"""
What a worker counts of its jobs, its pulls and its servers; docs/metrics.md has all names.

Each worker has a registry of its own. No label names a job or a tenant: there are too many of both.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.registry import Collector

from pagemill.messages import Delivery, Outcome, Room
from pagemill.schema import LANES, Result
from pagemill.traces import SpanOutcome

JOB_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 900, 3600, 14400, 86400)
SLACK_BOUNDS = (-3600, -60, -10, 0, 1, 5, 15, 60, 300, 900, 3600, 14400, 86400)
OP_BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5)

# why a look at the queue brought nothing
EMPTY = ("no_jobs", "no_blocks", "solo", "unwritten", "draining")

# a series more for each counter, of no use to Prometheus
disable_created_metrics()


class WorkerMetrics:
    """
    Takes what happens in a worker; its methods cost a few microseconds.

    Args:
        clock: Monotonic, in seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # the server's clock less ours, as of the job that was pulled last
        self._offset_s = time.time() - clock()
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._declare_jobs()
        self._declare_pulls()
        self._declare_servers()

    def add(self, *collectors: Collector) -> None:
        """Show what these collect, too."""
        for collector in collectors:
            self.registry.register(collector)

    def asked(self, rooms: Sequence[Room]) -> None:
        """Note what the next pull may claim."""
        for (jobs, tokens), room in zip(self._budgets, rooms, strict=True):
            jobs.set(room.max_jobs)
            tokens.set(room.max_tokens)

    def pulled_nothing(self, why: str) -> None:
        """Note a look at the queue that brought nothing; `why` is one of EMPTY."""
        self._empty.labels(why).inc()

    def pulled(self, deliveries: Iterable[Delivery]) -> None:
        """Note what came from the queue; how long a job waited is noted when it is taken for the first time."""
        now = self._clock()
        for delivery in deliveries:
            self._claimed.labels(delivery.lane).inc()
            if is_first(delivery):
                self._offset_s = delivery.started_ms / 1000 - now
                self.wait_seconds.labels(delivery.lane).observe((delivery.started_ms - delivery.accepted_ms) / 1000)

    def lost(self, num_leases: int) -> None:
        """Note leases that ran out, so that other workers have the jobs."""
        self._leases_lost.inc(num_leases)

    def settled(self, delivery: Delivery, since: float, outcome: Outcome, result: Result | None) -> None:
        """
        Note the end of a job in this worker's hands.

        Args:
            since: When it was pulled, by the clock.
            result: None where it was given up, as a dead letter.
        """
        if outcome != "done":
            self._dropped.labels(outcome).inc()
            return
        now, lane = self._clock(), delivery.lane
        server_s = now + self._offset_s
        self.jobs.labels(lane, result.status if result else "failed", _reason(result)).inc()
        self.run_seconds.labels(lane).observe(max(0.0, now - since))
        self._e2e_seconds.labels(lane).observe(max(0.0, server_s - delivery.accepted_ms / 1000))
        if delivery.deadline_ms:
            self._slack_seconds.labels(lane).observe(delivery.deadline_ms / 1000 - server_s)

    def redis_call(self, name: str, took_s: float, failed: bool) -> None:
        """Note a call of a script: its name, how long it took, whether it failed."""
        self._redis_seconds.labels(name).observe(took_s)
        if failed:
            self._redis_errors.labels(name).inc()

    def store_call(self, name: str, took_s: float, error: str | None) -> None:
        """Note a call of the object store; `error` is what kind, where it failed."""
        self._store_seconds.labels(name).observe(took_s)
        if error is not None:
            self._store_errors.labels(name, error).inc()

    def spans(self, outcome: SpanOutcome, count: int) -> None:
        """Note what became of spans; from any thread."""
        self._spans.labels(outcome).inc(count)

    def moved(self, direction: str, num_bytes: int) -> None:
        """Note bytes that went "in" from the object store, or "out" to it."""
        self._store_bytes.labels(direction).inc(num_bytes)

    def _declare_jobs(self) -> None:
        self.jobs = self._counter(
            "pagemill_jobs", "Jobs whose result this worker has published.", ("lane", "outcome", "reason")
        )
        for lane in LANES:
            self.jobs.labels(lane, "done", "stop")
        self.wait_seconds = self._by_lane(
            "pagemill_job_wait_seconds", "From a job's acceptance to the first worker that took it.", JOB_BOUNDS
        )
        self.run_seconds = self._by_lane(
            "pagemill_job_run_seconds", "From this worker's pull of a job to its published result.", JOB_BOUNDS
        )
        self._e2e_seconds = self._by_lane(
            "pagemill_job_e2e_seconds", "From a job's acceptance to its published result.", JOB_BOUNDS
        )
        self._slack_seconds = self._by_lane(
            "pagemill_deadline_slack_seconds",
            "What was left until the deadline when a job that has one ended; below 0 where it had passed.",
            SLACK_BOUNDS,
        )
        self._dropped = self._counter(
            "pagemill_results_dropped",
            "Results that were not published: fenced, another worker's job; gone, forgotten; duplicate, ended already.",
            ("why",),
            ("fenced", "gone", "duplicate"),
        )
        self._leases_lost = self._counter("pagemill_leases_lost", "Leases that ran out in this worker's hands.")

    def _declare_pulls(self) -> None:
        jobs = self._gauge("pagemill_pull_budget_jobs", "Jobs that the next pull may claim.")
        tokens = self._gauge(
            "pagemill_pull_budget_tokens", "Tokens of KV cache that the jobs of the next pull may need."
        )
        # set at every look at the queue: the way by the labels costs more than the rest
        self._budgets = [(jobs.labels(lane), tokens.labels(lane)) for lane in LANES]
        self._claimed = self._counter("pagemill_pull_claimed", "Jobs that were pulled.", ("lane",), LANES)
        self._empty = self._counter(
            "pagemill_pull_empty",
            "Looks at the queue that brought nothing: no_jobs, none waits; no_blocks, the engine has no room; "
            "solo, suspects run alone or are waited for; unwritten, too many results wait for a server; "
            "draining, the worker stops.",
            ("why",),
            EMPTY,
        )

    def _declare_servers(self) -> None:
        self._redis_seconds = self._histogram(
            "pagemill_redis_op_seconds", "Round trips of the queue's scripts.", OP_BOUNDS, "op"
        )
        self._redis_errors = self._counter("pagemill_redis_errors", "Calls of scripts that failed.", ("op",), ("pull",))
        self._store_seconds = self._histogram(
            "pagemill_store_op_seconds", "Calls of the object store.", OP_BOUNDS, "op"
        )
        self._store_errors = self._counter(
            "pagemill_store_errors",
            "Calls of the object store that failed: away, refused, or missing where the object is not there.",
            ("op", "error"),
        )
        for op in ("put", "get_range"):
            self._store_errors.labels(op, "away")
        self._store_bytes = self._counter(
            "pagemill_store_bytes",
            "Bytes of payloads that were read, in, and of results that were too large for Redis, out.",
            ("direction",),
            ("in", "out"),
        )

        self._spans = self._counter(
            "pagemill_trace_spans",
            "Spans that were exported, that no collector took (failed), and that found no room in the queue (dropped).",
            ("outcome",),
            get_args(SpanOutcome),
        )

    def _counter(self, name: str, text: str, labels: Sequence[str] = (), known: Sequence[str] = ()) -> Counter:
        made = Counter(name, text, labels, registry=self.registry)
        # a series that begins at 0 shows its first increase
        for value in known:
            made.labels(value)
        return made

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ("lane",), registry=self.registry)

    def _by_lane(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        made = self._histogram(name, text, bounds, "lane")
        for lane in LANES:
            made.labels(lane)
        return made

    def _histogram(self, name: str, text: str, bounds: Sequence[float], label: str) -> Histogram:
        return Histogram(name, text, (label,), buckets=bounds, registry=self.registry)


def is_first(delivery: Delivery) -> bool:
    """Whether no worker has had the job before: what came back to its lane is in a stream of its own."""
    returned = delivery.stream.endswith(":!returned")
    return delivery.attempt == 1 and not (returned or delivery.lapses or delivery.num_faults)


def _reason(result: Result | None) -> str:
    """Why a job has ended: its answers' finish reason, the code of its failure, or what the status says already."""
    if result is None:
        return "dead_letter"
    if result.failure is not None:
        return result.failure.code
    if result.status == "done" and result.completions:
        return result.completions[0].finish_reason
    return result.status
