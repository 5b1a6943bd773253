"""How often a command is tried."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from redis.exceptions import TimeoutError as RedisTimeoutError

from pagemill.connection import RETRIES, connect, connect_async
from tests.support.redis_process import RedisProcess

# the last one is greeted with words that it does not answer either
SILENT = ["redis://127.0.0.1:{port}/0", "redis://user:password@127.0.0.1:{port}/3"]


@contextmanager
def silent_server() -> Iterator[tuple[int, list[socket.socket]]]:
    """A server that takes connections and never answers: its port, and what has come so far."""
    taken: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def take() -> None:
            while True:
                try:
                    taken.append(server.accept()[0])
                except OSError:
                    return

        thread = threading.Thread(target=take)
        thread.start()
        try:
            yield server.getsockname()[1], taken
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for one in taken:
                one.close()


@pytest.mark.parametrize("url", SILENT, ids=["bare", "with login"])
def test_a_silent_server_is_tried_so_often_and_no_more(url: str) -> None:
    """
    Connecting is part of a try: it is not tried as often again.
    """
    with silent_server() as (port, taken), connect(url.format(port=port), timeout_s=0.05) as redis:
        with pytest.raises(RedisTimeoutError):
            redis.get("key")

        assert 1 + RETRIES == len(taken)


@pytest.mark.parametrize("url", SILENT, ids=["bare", "with login"])
def test_on_asyncio_too(url: str) -> None:
    """
    As for threads.
    """

    async def ask(port: int) -> None:
        async with connect_async(url.format(port=port), timeout_s=0.05) as redis:
            with pytest.raises(RedisTimeoutError):
                await redis.get("key")

    with silent_server() as (port, taken):
        asyncio.run(ask(port))

        assert 1 + RETRIES == len(taken)


def test_a_server_that_comes_back_is_found(tmp_path: Path) -> None:
    """
    A connection that was there, and one that is new, are tried until the server answers.
    """
    with RedisProcess(tmp_path) as server, connect(server.url) as known:
        known.set("key", "value")
        server.kill()
        back = threading.Timer(0.5, server.start)
        back.start()
        with connect(server.url) as new:
            assert [b"value", b"value"] == [new.get("key"), known.get("key")]
        back.join()
