"""A proxy before the server, and workers and clients behind it."""

from collections.abc import Callable, Iterator

import pytest

from pagemill.client import Client
from tests.support.servers import BlockingConsumer
from tests.support.tcp_proxy import TcpProxy


@pytest.fixture
def proxy(server_url: str) -> Iterator[TcpProxy]:
    with TcpProxy(server_url) as proxy:
        yield proxy


@pytest.fixture
def far_client(proxy: TcpProxy, queue: str) -> Iterator[Client]:
    """A client behind the proxy."""
    with Client(proxy.url, queue=queue) as client:
        yield client


@pytest.fixture
def far_consumer(proxy: TcpProxy, queue: str) -> Iterator[Callable[..., BlockingConsumer]]:
    """Makes consumers behind the proxy."""
    made: list[BlockingConsumer] = []

    def make(**options: object) -> BlockingConsumer:
        made.append(BlockingConsumer(proxy.url, queue, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    proxy.heal()
    for one in made:
        one.close()
