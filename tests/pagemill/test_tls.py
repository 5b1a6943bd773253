"""Servers that speak TLS and ask for a client's certificate."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pagemill.async_client import AsyncClient
from pagemill.client import Client
from pagemill.connection import connect_briefly
from pagemill.errors import QueueUnavailable
from pagemill.ids import uuid7
from pagemill.scripts import translated
from tests.support.certificates import Certificates, find_tls_server, make_certificates
from tests.support.servers import a_job
from tests.support.services import RunningService
from tests.support.topologies import Cluster, Node, SentinelTrio

pytestmark = pytest.mark.skipif(find_tls_server() is None, reason="no server here was built with TLS")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def secure(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    node = Node(tmp_path_factory.mktemp("secure"), program=find_tls_server(), certificates=certificates)
    with closing(node):
        yield node.start()


def serve_and_ask(url: str) -> list[str]:
    """The states of a job of each client, served by a worker of the same URL."""
    queue = f"test-{uuid7()}"

    async def ask() -> str:
        async with AsyncClient(url, queue=queue) as client:
            return (await client.result((await client.submit(a_job("a"))).job_id, wait_s=20)).status

    with RunningService(url, queue), Client(url, queue=queue) as client:
        return [client.result(client.submit(a_job("b")).job_id, wait_s=20).status, asyncio.run(ask())]


def test_a_server_and_a_client_that_know_each_other(secure: Node, certificates: Certificates) -> None:
    """
    With the authority's certificate, and one's own, all works as without TLS.
    """
    assert ["done", "done"] == serve_and_ask(f"rediss://{secure.address}/0?{certificates.query}")


def test_the_name_is_checked_unless_told_otherwise(secure: Node, certificates: Certificates) -> None:
    """
    A certificate for other hosts is refused; `ssl_check_hostname=false` takes it.
    """
    elsewhere = f"rediss://127.0.0.2:{secure.port}/0?{certificates.query}"
    secure.client.config_set("bind", "127.0.0.1 127.0.0.2")

    with Client(elsewhere) as client, pytest.raises(QueueUnavailable, match=r"do not trust.*ssl_ca_certs"):
        client.stats()
    with Client(f"{elsewhere}&ssl_check_hostname=false") as client:
        assert {} == client.stats().totals


def test_an_unknown_authority_is_refused(secure: Node, tmp_path: Path) -> None:
    """
    A server that another authority speaks for may be anybody's.
    """
    others = make_certificates(tmp_path)
    with (
        Client(f"rediss://{secure.address}/0?{others.query}") as client,
        pytest.raises(QueueUnavailable, match=r"do not trust"),
    ):
        client.stats()


def test_a_client_without_a_certificate_is_refused(secure: Node, certificates: Certificates) -> None:
    """
    The server asks for one; the client says that it was refused.
    """
    url = f"rediss://{secure.address}/0?ssl_ca_certs={certificates.folder}/ca.pem"
    with (
        connect_briefly(url) as redis,
        pytest.raises(QueueUnavailable, match=r"certificate|closed|reset|EOF"),
        translated(),
    ):
        redis.execute_command("PING")


@pytest.mark.slow
def test_a_cluster_with_tls(certificates: Certificates, tmp_path: Path) -> None:
    """
    All nodes are spoken to with TLS, those too that the URL does not name.
    """
    with Cluster(tmp_path, certificates=certificates) as cluster:
        one_node = cluster.url.replace(f",{cluster.nodes[1].address},{cluster.nodes[2].address}", "")
        assert ["done", "done"] == serve_and_ask(one_node)


@pytest.mark.slow
def test_sentinels_with_tls(certificates: Certificates, tmp_path: Path) -> None:
    """
    The sentinels and the master are spoken to with TLS.
    """
    with SentinelTrio(tmp_path, certificates=certificates) as trio:
        assert ["done", "done"] == serve_and_ask(trio.url)
