"""What the HTTP endpoint of a worker, or of an exporter, answers: its metrics, and how many workers are wanted."""

import json
from collections.abc import Callable, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from redis.asyncio import Redis

from pagemill.keys import QueueKeys
from pagemill.survey import read_survey
from worker.autoscale import Autoscaler, Limits
from worker.endpoint import JSON, Answer, Route, check
from worker.queue_metrics import QueueCollector, QueueReader
from worker.settings import MetricsSettings


def queue_reader(settings: MetricsSettings, redis: Redis) -> QueueReader:
    """Looks at the queue of these settings."""
    limits = Limits(settings.autoscale_target_s, settings.autoscale_min_workers, settings.autoscale_max_workers)
    autoscaler = Autoscaler(limits, tokens_per_s=settings.autoscale_tokens_per_s)
    keys = QueueKeys(settings.queue)
    return QueueReader(lambda: read_survey(redis, keys), autoscaler)


def queue_collector(settings: MetricsSettings, reader: QueueReader) -> QueueCollector:
    """Shows what it has seen."""
    return QueueCollector(settings.queue, reader, num_tenants=settings.metrics_tenants)


def routes(
    registry: CollectorRegistry, reader: QueueReader, *, healthy: Callable[[], bool], ready: Callable[[], bool]
) -> Mapping[str, Route]:
    """All paths of a process that is measured."""

    async def metrics() -> Answer:
        await reader.refresh()
        return Answer(generate_latest(registry), kind=CONTENT_TYPE_LATEST)

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
