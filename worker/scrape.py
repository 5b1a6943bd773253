"""What the HTTP endpoint of a worker, or of an exporter, answers: its metrics, and how many workers are wanted."""

import json
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector
from redis.asyncio import Redis

from pagemill.keys import QueueKeys
from pagemill.survey import read_survey
from worker.autoscale import Autoscaler, Limits
from worker.endpoint import JSON, Answer, Route, check
from worker.queue_metrics import QueueReader
from worker.settings import MetricsSettings


def queue_reader(settings: MetricsSettings, redis: Redis) -> QueueReader:
    """Looks at the queue of these settings."""
    limits = Limits(settings.autoscale_target_s, settings.autoscale_min_workers, settings.autoscale_max_workers)
    autoscaler = Autoscaler(limits, tokens_per_s=settings.autoscale_tokens_per_s)
    keys = QueueKeys(settings.queue)
    return QueueReader(lambda: read_survey(redis, keys), autoscaler)


class OfQueue(Collector):
    """All that a registry has, with the queue's name: what several queues say can be told apart."""

    def __init__(self, registry: CollectorRegistry, queue: str) -> None:
        self._registry = registry
        self._queue = queue

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            family.samples = [one._replace(labels={"queue": self._queue, **one.labels}) for one in family.samples]
            yield family


def routes(
    settings: MetricsSettings,
    registry: CollectorRegistry,
    reader: QueueReader,
    *,
    healthy: Callable[[], bool],
    ready: Callable[[], bool],
) -> Mapping[str, Route]:
    """All paths of a process that is measured."""
    shown = OfQueue(registry, settings.queue)

    async def metrics() -> Answer:
        await reader.refresh()
        return Answer(generate_latest(shown), kind=CONTENT_TYPE_LATEST)

    async def autoscale() -> Answer:
        await reader.refresh()
        decision = reader.decision
        body = {
            "desired_workers": decision.desired_workers,
            "reason": decision.reason,
            "tokens_per_s_per_worker": reader.autoscaler.tokens_per_s,
            "source_up": reader.survey is not None,
        }
        return Answer(json.dumps(body), "200 OK" if reader.survey else "503 Service Unavailable", JSON)

    return {"/metrics": metrics, "/autoscale": autoscale, "/healthz": check(healthy), "/readyz": check(ready)}
