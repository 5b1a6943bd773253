"""The services of docker-compose.yml at work: started in order, used by each kind of producer, stopped in order."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack.__main__ import FOLDERS, run
from tests.stack.native import NativeStack, StackError
from tests.stack.sealed import can_seal, hidden_by
from tests.support import server_box
from tests.support.compose import load

pytestmark = [
    pytest.mark.skipif(
        server_box.find("docker-compose") is None, reason="no docker-compose: see tests.support.server_box"
    ),
    pytest.mark.timeout(300),
]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """One that is not below /tmp, of which each service has its own."""
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    with tempfile.TemporaryDirectory(prefix="pagemill-stack-", dir=FOLDERS) as path:
        yield Path(path)


def test_the_stack_serves_each_producer_and_loses_no_job_with_its_worker(folder: Path) -> None:
    """
    A client, a Celery task, OpenAI's client with a batch, the nightly job into the bucket; a worker that is stopped
    in the middle and started again; then all services end by themselves in the time that they have.
    """
    counts = run(folder, fake=True)

    assert (2, 1, 5, 3) == tuple(counts[name] for name in ("client", "celery", "openai", "bulk"))
    assert counts["stop"]["ended_before"] < counts["stop"]["jobs"]
    assert counts["stop"]["returned"] > 0
    assert counts["read_only"] == can_seal()


def test_with_a_password_redis_lets_nobody_else_in(folder: Path) -> None:
    """
    A variable in `.env` is enough: server, health check and all URLs have it.
    """
    services = load(environ={"REDIS_PASSWORD": "s3cret-1"})
    kept = {name: services[name] for name in ("redis",)}

    with NativeStack(folder, kept) as stack:
        from redis import Redis
        from redis.exceptions import AuthenticationError

        port = stack.port("redis")
        with Redis(port=port) as stranger, pytest.raises(AuthenticationError):
            stranger.ping()
        worker = services["worker-cpu"].environ
        for url in (worker["PAGEMILL_REDIS_URL"], services["ingress"].environ["CELERY_BROKER_URL"]):
            assert url is not None
            with Redis.from_url(url.replace("@redis:6379", f"@127.0.0.1:{port}")) as friend:
                assert friend.ping()


def test_a_service_that_cannot_start_is_named(folder: Path) -> None:
    """
    With what it said last, and nothing that depends on it is started.
    """
    services = load(environ={"OBJECT_STORE": "ftp://nowhere"})
    kept = {name: services[name] for name in ("setup", "s3", "bucket", "redis", "exporter") if name in services}
    stack = NativeStack(folder, kept, hurried=("s3",))

    with pytest.raises(StackError, match=r"bucket ended with 1:\n.*want file:///folder or s3://"):
        stack.__enter__()


def test_secrets_are_drawn_once(folder: Path) -> None:
    """
    A second start leaves them, and shows none; the key itself is in no file.
    """
    setup = {"setup": load()["setup"]}
    seen = []
    for _ in range(2):
        with NativeStack(folder, setup) as stack:
            found = stack.volume("setup", "/secrets")
            seen.append({path.name: path.read_bytes() for path in found.iterdir()})
    log = stack.log("setup")

    assert seen[0] == seen[1]
    assert {"s3.json", "aws_credentials", "grafana_password", "keys.toml"} == seen[0].keys()
    assert 1 == log.count("API key local") == log.count("Grafana, user admin")
    key = log.partition("this once: ")[2].split()[0]
    assert not any(key.encode() in text for text in seen[0].values())
    assert {0o640} == {path.stat().st_mode & 0o777 for path in found.iterdir()}


def test_a_checkout_below_tmp_stays_in_sight() -> None:
    """
    A service that has a /tmp of its own must still find its program.
    """
    assert hidden_by("/tmp", ["/usr/lib", "/tmp/checkout"])
    assert not hidden_by("/tmp", ["/usr/lib", "/tmpfs/checkout"])
