"""A broker and a backend beside the queue, and what completes tasks between them."""

import gc
from collections.abc import Iterator

import pytest
from celery import Celery
from celery._state import _set_task_join_will_block
from redis import Redis

from pagemill.client import Client
from producers.tasks.completion import Completion
from producers.tasks.config import make_app
from producers.tasks.settings import CelerySettings


@pytest.fixture(scope="session")
def settings(newest_server: str) -> CelerySettings:
    base = newest_server[: newest_server.rindex("/")]
    urls = {"celery_broker_url": f"{base}/1", "celery_result_backend": f"{base}/2"}
    return CelerySettings.load(strict=False, redis_url=newest_server, celery_callback_queue="foreign", **urls)


@pytest.fixture(scope="session")
def completers_app(settings: CelerySettings) -> Iterator[Celery]:
    """One for all tests: it keeps connections open in many places."""
    with make_app(settings) as app:
        yield app
        backend = app.backend
        # a result that is collected later would connect again to unsubscribe
        gc.collect()
        backend.result_consumer.stop()
        backend.result_consumer._pubsub = None
        backend.client.connection_pool.disconnect()
        app.amqp.producer_pool.force_close_all()
        app.pool.force_close_all()


@pytest.fixture
def app(completers_app: Celery) -> Iterator[Celery]:
    """The completer's app; as in a completer, who sends a task does not subscribe to its result."""
    _set_task_join_will_block(True)
    yield completers_app
    _set_task_join_will_block(False)
    completers_app.backend.client.flushdb()


@pytest.fixture
def broker(settings: CelerySettings) -> Iterator[Redis]:
    with Redis.from_url(settings.celery_broker_url, protocol=2) as client:
        yield client
        client.flushdb()


@pytest.fixture
def completion(app: Celery, client: Client) -> Completion:
    return Completion(app, client)
