"""A proxy before the server, and workers and clients behind it."""

from collections.abc import Iterator
from importlib.resources import files

import pytest
from redis import Redis

from pagemill.client import Client
from pagemill.scripts import SHARED, load
from tests.support.servers import BlockingConsumer, MakeConsumer
from tests.support.tcp_proxy import TcpProxy


def script_names() -> list[str]:
    """All scripts, by the names of their files."""
    names = [path.name.removesuffix(".lua") for path in (files("pagemill") / "lua").iterdir()]
    return sorted(set(names).difference(SHARED))


@pytest.fixture
def known_scripts(redis: Redis) -> list[str]:
    """The server knows all scripts: a call by hash is carried out, and not answered with NOSCRIPT."""
    for name in script_names():
        redis.script_load(load(name).source)
    return script_names()


@pytest.fixture
def proxy(server_url: str) -> Iterator[TcpProxy]:
    """Before the server; the test fails where a reply arrived that it wanted lost."""
    with TcpProxy(server_url) as proxy:
        yield proxy
        assert proxy.all_lost


@pytest.fixture
def far_client(proxy: TcpProxy, queue: str) -> Iterator[Client]:
    """A client behind the proxy."""
    with Client(proxy.url, queue=queue) as client:
        yield client


@pytest.fixture
def far_consumer(proxy: TcpProxy, queue: str) -> Iterator[MakeConsumer]:
    """Makes consumers behind the proxy."""
    made: list[BlockingConsumer] = []

    def make(**options: object) -> BlockingConsumer:
        made.append(BlockingConsumer(proxy.url, queue, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    proxy.heal()
    for one in made:
        one.close()
