"""Real servers, one of each kind a session, and a queue of its own for each test."""

import logging
import sys
import threading
from collections.abc import Iterator

import pytest
import structlog
from redis import Redis

from pagemill.client import Client
from pagemill.ids import uuid7
from pagemill.logs import FromLibraries
from producers.child import Child
from producers.local_redis import local_redis
from tests.support.seaweed import Seaweed
from tests.support.servers import BlockingConsumer, MakeConsumer, leaked_keys, oldest_redis


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """A test that runs a program of ours here leaves its logging to no other test."""
    hooks = sys.excepthook, threading.excepthook
    yield
    if structlog.is_configured():
        structlog.reset_defaults()
        sys.excepthook, threading.excepthook = hooks
        root = logging.getLogger()
        root.handlers = [handler for handler in root.handlers if not isinstance(handler, FromLibraries)]
        logging.captureWarnings(False)


@pytest.fixture(scope="session")
def newest_server() -> Iterator[str]:
    with local_redis() as url:
        yield url


@pytest.fixture(scope="session")
def oldest_server() -> Iterator[str]:
    with local_redis(binary=oldest_redis()) as url:
        yield url


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    """An S3 server with a bucket; what tests of one session write lies side by side."""
    with Seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def bucket(seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch) -> Seaweed:
    """The S3 server, with its credentials in the environment and retries that do not wait."""
    seaweed.lend_credentials(monkeypatch)
    return seaweed


@pytest.fixture(scope="module")
def served_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server whose default queue a worker with the fake engine serves."""
    log = tmp_path_factory.mktemp("served") / "worker.log"
    with (
        local_redis() as url,
        Child([sys.executable, "-m", "worker", "--redis-url", url, "--engine", "fake"], log=log),
    ):
        yield url


@pytest.fixture
def server_url(newest_server: str) -> str:
    return newest_server


@pytest.fixture
def redis(server_url: str) -> Iterator[Redis]:
    with Redis.from_url(server_url, protocol=2) as client:
        yield client


@pytest.fixture
def queue(redis: Redis) -> Iterator[str]:
    """A queue's name; the test fails if it leaves a key that would stay for ever."""
    name = f"test-{uuid7()}"
    yield name
    leaked = leaked_keys(redis, name)
    redis.flushdb()
    assert [] == leaked


@pytest.fixture
def client(server_url: str, queue: str) -> Iterator[Client]:
    with Client(server_url, queue=queue) as client:
        yield client


@pytest.fixture
def consumer(server_url: str, queue: str) -> Iterator[MakeConsumer]:
    """Makes consumers of the test's queue."""
    made: list[BlockingConsumer] = []

    def make(**options: object) -> BlockingConsumer:
        made.append(BlockingConsumer(server_url, queue, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()
