"""What can be seen of a worker from outside: that it lives, that it works, and how much."""

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator

import structlog
from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pagemill import __version__
from pagemill.connection import connect_async
from pagemill.keys import QueueKeys
from worker.endpoint import check, listening
from worker.engine_metrics import EngineCollector, VllmCollector
from worker.engine_port import EngineDoor
from worker.gpu_metrics import GpuCollector
from worker.leases import Held
from worker.metrics import WorkerMetrics
from worker.queue_metrics import READ_TIMEOUT_S, QueueCollector, QueueReader
from worker.scrape import queue_reader, routes
from worker.service import Service
from worker.settings import WorkerSettings

log = structlog.get_logger("worker")


class Monitor:
    """
    A worker's metrics and its endpoints; there before the worker is.

    While the model is loaded the worker counts as healthy and not ready.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self.metrics = WorkerMetrics()
        self._settings = settings

        # known when the engine is ready
        self._service: Service | None = None
        self._engine: EngineDoor | None = None
        self._model = ""

    def watch(self, service: Service, engine: EngineDoor, *, model: str) -> None:
        """Show these from now on; `model` is the name that results carry."""
        self._service, self._engine, self._model = service, engine, model

    @property
    def healthy(self) -> bool:
        return self._service is None or self._service.healthy

    @property
    def ready(self) -> bool:
        return self._service is not None and self._service.ready

    @contextlib.asynccontextmanager
    async def endpoints(self) -> AsyncIterator[None]:
        """
        Answer while the context is open, where ports are set.

        Raises:
            SettingsError: an address cannot be listened at.
        """
        settings = self._settings
        async with contextlib.AsyncExitStack() as stack:
            if settings.metrics_port is not None:
                await self._measure(stack, settings.metrics_port)
            # /metrics answers these too
            if settings.health_port is not None and (not settings.health_port or not self._has_all_on_one_port):
                paths = {"/healthz": check(lambda: self.healthy), "/readyz": check(lambda: self.ready)}
                health = listening("health", settings.health_host, settings.health_port, paths)
                port = await stack.enter_async_context(health)
                log.info("health.listening", host=settings.health_host, port=port)
            yield

    @property
    def _has_all_on_one_port(self) -> bool:
        settings = self._settings
        return (settings.health_host, settings.health_port) == (settings.metrics_host, settings.metrics_port)

    async def _measure(self, stack: contextlib.AsyncExitStack, wanted_port: int) -> None:
        settings = self._settings
        # a connection of its own: whoever scrapes a slow server holds up no job
        redis = connect_async(settings.redis_url, key=QueueKeys(settings.queue).base, timeout_s=READ_TIMEOUT_S)
        stack.push_async_callback(redis.aclose)
        reader = queue_reader(settings, redis)
        self.metrics.add(*self.collectors(reader))
        paths = routes(settings, self.metrics.registry, reader, healthy=lambda: self.healthy, ready=lambda: self.ready)
        port = await stack.enter_async_context(listening("metrics", settings.metrics_host, wanted_port, paths))
        log.info("metrics.listening", host=settings.metrics_host, port=port)

    def collectors(self, reader: QueueReader) -> Iterator[Collector]:
        """What shows the worker, its engine, its GPU and its queue."""
        yield WorkerCollector(self, engine=self._settings.engine)
        yield EngineCollector(lambda: self._engine)
        yield GpuCollector(lambda: self._engine.facts.gpu if self._engine else "")
        yield QueueCollector(reader, num_tenants=self._settings.metrics_tenants)
        if self._settings.vllm_metrics:
            yield VllmCollector(lambda: self._engine, self.metrics, lambda: self._model)

    @property
    def model(self) -> str:
        return self._model

    @property
    def service(self) -> Service | None:
        return self._service


class WorkerCollector(Collector):
    """Shows what a worker is, and what it has in hand."""

    def __init__(self, monitor: Monitor, *, engine: str) -> None:
        self._monitor = monitor
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        service = self._monitor.service
        info = GaugeMetricFamily("pagemill_worker_info", "What this worker is.", labels=("version", "model", "engine"))
        info.add_metric((__version__, self._monitor.model, self._engine), 1.0)
        yield info
        yield GaugeMetricFamily("pagemill_worker_ready", "1 while the worker pulls jobs.", float(self._monitor.ready))
        held = GaugeMetricFamily(
            "pagemill_held_jobs",
            "Jobs under lease: intake, being read; engine, given to it, the look-ahead too; ended, not written yet.",
            labels=("phase",),
        )
        phases = Counter(map(_phase, service.held)) if service else Counter[str]()
        for phase in ("intake", "engine", "ended"):
            held.add_metric((phase,), float(phases[phase]))
        yield held
        yield GaugeMetricFamily(
            "pagemill_unwritten_results",
            "Results that wait to be written, and payloads to be deleted.",
            float(service.num_unwritten) if service else 0.0,
        )


def _phase(held: Held) -> str:
    if held.settled:
        return "ended"
    return "engine" if held.request else "intake"
