"""A gateway at a queue that a fake engine serves; one for each module, as they keep nothing between tests."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from producers.local_redis import local_redis
from tests.support.gateways import RunningGateway, running_gateway
from tests.support.servers import is_routed, wait_for
from tests.support.services import RunningService
from worker.fake_engine import FakeEngine

QUEUE = "gateway-tests"


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with local_redis() as url:
        yield url


@pytest.fixture(scope="module")
def service(redis_url: str) -> Iterator[RunningService]:
    with RunningService(redis_url, QUEUE, lease_s=1.0, engine=FakeEngine(tokens_per_s=4000)) as service:
        wait_for(lambda: is_routed(redis_url))
        yield service


@pytest.fixture(scope="module")
def gateway(
    redis_url: str,
    service: RunningService,  # noqa: ARG001  the gateway's worker
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[RunningGateway]:
    store: Path = tmp_path_factory.mktemp("objects")
    # a process beside it, for those modules that have batches
    max_batches = getattr(request.module, "MAX_BATCHES", 0)
    with running_gateway(redis_url, QUEUE, object_store=store.as_uri(), max_batches=max_batches) as gateway:
        wait_for(lambda: is_ready(gateway))
        yield gateway


@pytest.fixture
def client(gateway: RunningGateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="nobody checks", max_retries=0) as client:
        yield client


def is_ready(gateway: RunningGateway) -> bool:
    return httpx.get(f"{gateway.url}/readyz").status_code == 200
