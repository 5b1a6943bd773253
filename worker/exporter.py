"""
Exports the metrics of one queue, and how many workers it wants, from a process of its own.

    python -m worker.exporter --redis-url redis://localhost:6379/0 --queue default --metrics-port 9464

Workers export the same; this is for queues whose workers may all be gone, as when they scale to none.
It needs neither a model nor torch.
"""

import asyncio
import signal
import sys

import structlog
from prometheus_client import CollectorRegistry, ProcessCollector

from pagemill.connection import connect_async
from pagemill.errors import PagemillError, SettingsError
from pagemill.keys import QueueKeys
from pagemill.logs import configure_logging
from worker import exits
from worker.endpoint import listening
from worker.queue_metrics import READ_TIMEOUT_S, QueueCollector
from worker.scrape import queue_reader, routes
from worker.settings import MetricsSettings, WorkerSettings

log = structlog.get_logger(__name__)

DEFAULT_PORT = 9464


def main() -> int:
    try:
        settings = MetricsSettings.read(sys.argv[1:], also=[WorkerSettings])
        configure_logging(settings, queue=settings.queue)
        return asyncio.run(serve(settings))
    except SettingsError as error:
        print(f"pagemill exporter: {error}", file=sys.stderr)
        return exits.SETTINGS
    except PagemillError as error:
        print(f"pagemill exporter: {error}", file=sys.stderr)
        return exits.STARTUP


async def serve(settings: MetricsSettings) -> int:
    """
    Answer until SIGTERM or Ctrl-C; a queue that cannot be read is told, not died of.

    Raises:
        SettingsError: the address cannot be listened at.
    """
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    redis = connect_async(settings.redis_url, key=QueueKeys(settings.queue).base, timeout_s=READ_TIMEOUT_S)
    reader = queue_reader(settings, redis)
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(QueueCollector(reader, num_tenants=settings.metrics_tenants))
    paths = routes(settings, registry, reader, healthy=lambda: True, ready=lambda: not stopping.is_set())
    try:
        wanted = DEFAULT_PORT if settings.metrics_port is None else settings.metrics_port
        async with listening("metrics", settings.metrics_host, wanted, paths) as port:
            log.info("exporter.listening", url=f"http://{settings.metrics_host}:{port}/metrics")
            await stopping.wait()
    finally:
        await redis.aclose()
    return exits.DRAINED


if __name__ == "__main__":
    sys.exit(main())
