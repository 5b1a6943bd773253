"""
The queue's metrics: read from its server when somebody scrapes, once a second at most.

Whoever exports them says the same of one queue, so sums over exporters mean nothing: take `max by (queue, lane)`.
Where the queue cannot be read they are left out, and `pagemill_source_up` is 0: a zero is a zero.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from pagemill.errors import QueueUnavailable
from pagemill.survey import Survey
from worker.autoscale import Autoscaler, Decision, demand_of, needed_tokens_per_s

READ_EVERY_S = 1.0
# a scrape waits no longer: Prometheus gives up after ten seconds by default
READ_TIMEOUT_S = 3.0

Labels = tuple[str, ...]
Samples = Iterable[tuple[Labels, float]]


class QueueReader:
    """
    The last look at a queue, and what it means for the number of workers.

    Args:
        read: Takes a look.
        clock: Monotonic, in seconds.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[Survey]],
        autoscaler: Autoscaler,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.survey: Survey | None = None
        self.decision = Decision(0, "the queue has not been read yet")
        self.autoscaler = autoscaler
        self._read = read
        self._clock = clock
        self._read_at = -READ_EVERY_S
        self._reading = asyncio.Lock()

    async def refresh(self) -> None:
        """Look again, unless somebody has just done so; a queue that cannot be read leaves `survey` None."""
        async with self._reading:
            if self._clock() - self._read_at < READ_EVERY_S:
                return
            try:
                async with asyncio.timeout(READ_TIMEOUT_S):
                    self.survey = await self._read()
                self.decision = self.autoscaler.follow(self.survey)
            except (QueueUnavailable, TimeoutError) as error:
                self.survey = None
                why = str(error) or f"it did not answer within {READ_TIMEOUT_S:g} s"
                self.decision = Decision(self.decision.desired_workers, f"unchanged, as the queue is not read: {why}")
            self._read_at = self._clock()


@dataclass(frozen=True, slots=True)
class Told:
    """One metric of a queue."""

    name: str
    text: str
    read: Callable[[Survey], Samples]
    labels: Labels = ()
    counts: bool = False


def _one(value: Callable[[Survey], float | None]) -> Callable[[Survey], Samples]:
    def read(survey: Survey) -> Samples:
        number = value(survey)
        return [] if number is None else [((), number)]

    return read


def _each(values: Callable[[Survey], Mapping[str, float]]) -> Callable[[Survey], Samples]:
    return lambda survey: [((name,), value) for name, value in values(survey).items()]


def _totals(**names: str) -> Callable[[Survey], Samples]:
    """Label values, and the queue's counters that they stand for."""
    return _each(lambda survey: {label: survey.stats.totals.get(name, 0) for label, name in names.items()})


def _info(name: str) -> Callable[[Survey], Samples]:
    return _one(lambda survey: float(survey.server[name]) if name in survey.server else None)


def _is(name: str, *good: str) -> Callable[[Survey], Samples]:
    return _one(lambda survey: float(survey.server[name] in good) if name in survey.server else None)


def _cancelled(survey: Survey) -> Mapping[str, float]:
    waiting = survey.cancelled_waiting
    return {"waiting": waiting, "running": max(0, survey.stats.totals.get("cancelled", 0) - waiting)}


def _workers(survey: Survey) -> Mapping[str, float]:
    found = {"running": 0, "draining": 0, "starting": 0}
    for fields in survey.workers.values():
        # one that still loads its model has said no more than its name
        state = fields.get("state", "starting")
        found[state] = found.get(state, 0) + 1
    return found


OF_THE_QUEUE = (
    Told("pagemill_queue_depth", "Jobs that wait.", _each(lambda s: s.stats.queued), ("lane",)),
    Told(
        "pagemill_backlog_tokens",
        "Estimated tokens of the jobs that wait.",
        _each(lambda s: s.stats.queued_tokens),
        ("lane",),
    ),
    Told(
        "pagemill_oldest_age_seconds",
        "How long the job has waited that has waited for longest; 0 where none waits.",
        _each(lambda s: s.oldest_age_s),
        ("lane",),
    ),
    Told("pagemill_inflight_jobs", "Jobs in workers' hands.", _one(lambda s: s.stats.running)),
    Told("pagemill_delayed_jobs", "Jobs put off until later.", _one(lambda s: s.stats.delayed)),
    Told("pagemill_suspect_jobs", "Jobs that wait to run apart from others.", _one(lambda s: s.stats.suspects)),
    Told("pagemill_raw_entries", "Entries of other programs that are no jobs yet.", _one(lambda s: s.stats.raw)),
    Told("pagemill_dlq_depth", "Dead letters.", _one(lambda s: s.stats.dead)),
    Told(
        "pagemill_deadline_seconds",
        "Time to the nearest deadline of jobs that have not ended; left out where none has one.",
        _one(lambda s: s.deadline_s),
    ),
    Told(
        "pagemill_deadline_tokens_per_second",
        "Estimated tokens that have to end in a second, for all deadlines to be met.",
        _one(lambda s: needed_tokens_per_s(demand_of(s))),
    ),
    Told(
        "pagemill_drain_tokens_per_second",
        "Estimated tokens of jobs that ended in the last half minute, a second.",
        _one(lambda s: s.drain_tokens_per_s),
    ),
    Told("pagemill_workers", "Workers whose heartbeat is fresh.", _each(_workers), ("state",)),
    Told(
        "pagemill_queue_jobs",
        "Jobs that were accepted, and how they ended, ever.",
        _totals(accepted="accepted", done="done", failed="failed", cancelled="cancelled", expired="expired"),
        ("event",),
        counts=True,
    ),
    Told(
        "pagemill_queue_tokens",
        "Tokens of jobs that ended, ever.",
        _totals(prompt="prompt_tokens", completion="completion_tokens"),
        ("kind",),
        counts=True,
    ),
    Told(
        "pagemill_queue_gpu_seconds",
        "Engine time of jobs that ended, ever.",
        _one(lambda s: s.stats.totals.get("gpu_ms", 0) / 1000),
        counts=True,
    ),
    Told(
        "pagemill_redeliveries",
        "Jobs that left a worker without an end: crash, they may have ended it; lapse, it fell silent or was "
        "killed; release, it handed them back.",
        _totals(crash="suspected", lapse="reclaimed", release="released"),
        ("cause",),
        counts=True,
    ),
    Told("pagemill_retries", "Jobs put off after a fault.", _each(lambda s: s.retried), ("class",), counts=True),
    Told(
        "pagemill_fenced",
        "Results refused, as the job was another worker's by then.",
        _one(lambda s: s.stats.totals.get("fenced", 0)),
        counts=True,
    ),
    Told("pagemill_buried", "Jobs given up.", _one(lambda s: s.stats.totals.get("buried", 0)), counts=True),
    Told(
        "pagemill_deadline_missed",
        "Jobs that ended as their deadline passed.",
        _one(lambda s: s.stats.totals.get("expired", 0)),
        counts=True,
    ),
    Told("pagemill_cancelled", "Jobs that were cancelled.", _each(_cancelled), ("phase",), counts=True),
)

# INFO names; left out where the server refuses them
OF_THE_SERVER = (
    Told("pagemill_redis_memory_bytes", "Memory in use.", _info("used_memory")),
    Told("pagemill_redis_memory_limit_bytes", "Its maxmemory; 0 for no limit.", _info("maxmemory")),
    Told("pagemill_redis_noeviction", "1 where it never evicts keys.", _is("maxmemory_policy", "noeviction")),
    Told("pagemill_redis_append_only", "1 where it keeps an append-only file.", _is("aof_enabled", "1")),
    Told(
        "pagemill_redis_last_write_ok",
        "1 unless the last write of its append-only file failed.",
        _is("aof_last_write_status", "ok"),
    ),
    Told("pagemill_redis_evicted_keys", "Keys it has evicted since its start.", _info("evicted_keys"), counts=True),
    Told(
        "pagemill_redis_rejected_connections",
        "Connections it has refused since its start.",
        _info("rejected_connections"),
        counts=True,
    ),
)


class QueueCollector(Collector):
    """
    Shows the last look at a queue.

    Args:
        num_tenants: Name so many tenants, those that took most tokens; 0 names none.
    """

    def __init__(self, reader: QueueReader, *, num_tenants: int = 0) -> None:
        self._reader = reader
        self._num_tenants = num_tenants

    def collect(self) -> Iterable[Metric]:
        survey = self._reader.survey
        for told in (*OF_THE_QUEUE, *OF_THE_SERVER):
            yield self._family(told, told.read(survey) if survey else ())
        if self._num_tenants:
            yield self._family(TENANTS, self._most(survey) if survey else ())
        yield from self._autoscale(survey)
        up = Told("pagemill_source_up", "1 where the queue could be read for this scrape.", lambda _: ())
        yield self._family(up, [((), float(survey is not None))])

    def _most(self, survey: Survey) -> Iterator[tuple[Labels, float]]:
        most = sorted(survey.tenant_tokens.items(), key=lambda one: (-one[1], one[0]))
        return (((tenant,), tokens) for tenant, tokens in most[: self._num_tenants])

    def _autoscale(self, survey: Survey | None) -> Iterator[Metric]:
        desired = Told("pagemill_autoscale_desired_workers", "Workers that the queue wants.", lambda _: ())
        yield self._family(desired, [((), self._reader.decision.desired_workers)] if survey else [])
        rate = self._reader.autoscaler.tokens_per_s
        learned = Told("pagemill_autoscale_tokens_per_second", "Estimated tokens that a worker does.", lambda _: ())
        yield self._family(learned, [((), rate)] if rate else [])

    def _family(self, told: Told, samples: Samples) -> Metric:
        kind = CounterMetricFamily if told.counts else GaugeMetricFamily
        family = kind(told.name, told.text, labels=told.labels)
        for labels, value in samples:
            family.add_metric(labels, float(value))
        return family


TENANTS = Told(
    "pagemill_tenant_tokens",
    "Tokens that jobs of a tenant took, ever; of those that took most, where the operator wants to see them.",
    _each(lambda survey: survey.tenant_tokens),
    ("tenant",),
    counts=True,
)
