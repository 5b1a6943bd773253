"""Who may call, how often, and that no key is ever written down."""

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import structlog
from redis import Redis
from structlog.contextvars import merge_contextvars

from pagemill.async_client import AsyncClient
from pagemill.errors import SettingsError
from producers.gateway.api_keys import ApiKey, KeyRing, entry, hash_of, new_key
from producers.gateway.limits import KEY, Limiter
from tests.support.gateways import RunningGateway, running_gateway, write_keys
from tests.support.servers import wait_for
from tests.support.services import RunningService

QUEUE = "gateway-tests"
BODY = {"model": "fake", "prompt": "x", "max_tokens": 10}


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.toml"


@pytest.fixture(scope="module")
def keys(keys_file: Path) -> dict[str, str]:
    return write_keys(
        keys_file,
        free={},
        three={"requests_per_minute": 3},
        tokens={"tokens_per_minute": 100},
        day={"tokens_per_day": 25},
    )


@pytest.fixture(scope="module")
def guarded(
    redis_url: str,
    service: RunningService,  # noqa: ARG001  the gateway's worker
    keys: dict[str, str],  # noqa: ARG001  it fills the file
    keys_file: Path,
) -> Iterator[RunningGateway]:
    with running_gateway(redis_url, QUEUE, keys_file=keys_file) as gateway:
        yield gateway


def call(gateway: RunningGateway, key: str | None, **fields: Any) -> httpx.Response:
    headers = {} if key is None else {b"authorization": f"Bearer {key}".encode()}
    return httpx.post(f"{gateway.url}/v1/completions", json=BODY | fields, headers=headers, timeout=30)


def test_only_those_with_a_key_may_call(guarded: RunningGateway, keys: dict[str, str]) -> None:
    """
    No key, a wrong one, one in another form: 401 in OpenAI's shape; the right one is let in.
    """
    assert 200 == call(guarded, keys["free"]).status_code
    for wrong in (None, "pm-wrong", keys["free"] + "x", keys["free"][:-1], "\u00e9"):
        response = call(guarded, wrong)
        assert (401, "authentication_error") == (response.status_code, response.json()["error"]["type"])
    assert 401 == httpx.get(f"{guarded.url}/v1/models").status_code
    assert 200 == httpx.get(f"{guarded.url}/healthz").status_code


def test_the_official_client_knows_a_wrong_key(guarded: RunningGateway) -> None:
    """
    As its own kind of error.
    """
    client = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="pm-wrong", max_retries=0)

    with pytest.raises(openai.AuthenticationError) as caught:
        client.models.list()

    assert "invalid_api_key" == caught.value.code


def test_requests_beyond_the_rate_are_429(guarded: RunningGateway, keys: dict[str, str]) -> None:
    """
    The fourth in a minute is told when to come again; other keys are not held up.
    """
    answers = [call(guarded, keys["three"]) for _ in range(5)]

    assert [200, 200, 200, 429, 429] == [one.status_code for one in answers]
    assert "rate_limit_exceeded" == answers[-1].json()["error"]["code"]
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 21
    assert 200 == call(guarded, keys["free"]).status_code
    page = httpx.get(f"{guarded.url}/metrics").text
    assert 'pagemill_gateway_refused_total{reason="requests_per_minute"} 2.0' in page


def test_tokens_are_charged_as_used(guarded: RunningGateway, keys: dict[str, str], redis_url: str) -> None:
    """
    The estimate is taken at first, and replaced by what the answer took: 5 tokens, not 91.
    """
    with Redis.from_url(redis_url) as redis:

        def level() -> float:
            [name] = redis.keys(f"{KEY}{ApiKey(sha256=hash_of(keys['tokens'])).id}")
            return float(redis.hget(name, "tk") or 0)  # type: ignore[arg-type]

        assert 200 == call(guarded, keys["tokens"], max_tokens=4).status_code
        wait_for(lambda: 90 < level() <= 100)
        answers = [call(guarded, keys["tokens"], max_tokens=90) for _ in range(2)]

    assert [200, 429] == [one.status_code for one in answers]
    assert int(answers[-1].headers["retry-after"]) >= 1


def test_the_days_tokens_end(guarded: RunningGateway, keys: dict[str, str]) -> None:
    """
    Over quota: 429 until midnight in UTC, with a code of its own.
    """
    statuses = [call(guarded, keys["day"], max_tokens=10).status_code for _ in range(4)]
    last = call(guarded, keys["day"])

    assert 200 == statuses[0]
    assert (429, "insufficient_quota") == (last.status_code, last.json()["error"]["code"])
    assert 1 <= int(last.headers["retry-after"]) <= 86400


def test_what_is_left_of_an_estimate_is_given_back_to_its_own_day(redis_url: str) -> None:
    """
    A request that goes on over midnight does not take from what others have used since.
    """
    key = ApiKey(sha256=hash_of(new_key()), tokens_per_day=1000)

    async def scenario() -> None:
        async with AsyncClient(redis_url, queue=QUEUE) as client:
            limiter = Limiter(client)
            today, other = await limiter.take(key, 300), await limiter.take(key, 200)
            await limiter.settle(replace(today, day=today.day - 1), 1)
            assert 500 == used()
            await limiter.settle(other, 10)
            assert 310 == used()

    def used() -> int:
        with Redis.from_url(redis_url) as redis:
            return int(redis.hget(KEY + key.id, "used") or 0)  # type: ignore[arg-type]

    asyncio.run(scenario())


def test_gateways_share_the_limits(
    redis_url: str,
    service: RunningService,  # noqa: ARG001  the gateway's worker
    tmp_path: Path,
) -> None:
    """
    Two processes, one bucket; its key expires.
    """
    path = tmp_path / "keys.toml"
    key = write_keys(path, one={"requests_per_minute": 2})["one"]
    with (
        running_gateway(redis_url, QUEUE, keys_file=path) as first,
        running_gateway(redis_url, QUEUE, keys_file=path) as second,
        Redis.from_url(redis_url) as redis,
    ):
        assert [200, 200, 429, 429] == [call(one, key).status_code for one in (first, second, first, second)]
        assert all(0 < redis.ttl(name) <= 172800 for name in redis.keys(f"{KEY}*"))


def test_tenants_of_the_queue_come_from_the_keys(
    guarded: RunningGateway,
    service: RunningService,  # noqa: ARG001  the gateway's worker
    keys: dict[str, str],
    redis_url: str,
) -> None:
    """
    What a key's jobs took is counted for its tenant.
    """
    call(guarded, keys["free"])

    with Redis.from_url(redis_url) as redis:
        assert int(redis.hget(f"{{pagemill:{QUEUE}}}:st", "tenant_tokens:free") or 0) >= 11  # type: ignore[arg-type]


def test_keys_are_read_again_when_their_file_changes(
    redis_url: str,
    service: RunningService,  # noqa: ARG001  the gateway's worker
    tmp_path: Path,
) -> None:
    """
    A key that was taken out opens nothing any more; a broken file changes nothing.
    """
    path = tmp_path / "keys.toml"
    old = write_keys(path, one={})["one"]
    with running_gateway(redis_url, QUEUE, keys_file=path) as gateway:
        assert 200 == call(gateway, old).status_code
        new = write_keys(path, one={})["one"]
        later(path)
        assert [401, 200] == [call(gateway, key).status_code for key in (old, new)]
        path.write_text("[keys")
        later(path)
        assert 200 == call(gateway, new).status_code


def later(path: Path) -> None:
    """A file's time of change may be too coarse to tell two writes apart."""
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000_000))


@pytest.fixture
def events() -> Iterator[list[str]]:
    """All that the gateway logs meanwhile, with its tracebacks."""
    seen: list[str] = []

    def keep(_logger: Any, _method: str, fields: dict[str, Any]) -> dict[str, Any]:
        seen.append(str(fields))
        raise structlog.DropEvent

    structlog.configure(processors=[merge_contextvars, structlog.processors.format_exc_info, keep])
    yield seen
    structlog.reset_defaults()


def test_no_key_is_written_down(
    guarded: RunningGateway,
    keys: dict[str, str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    events: list[str],
) -> None:
    """
    Neither a right nor a wrong one is in any log or response, also where the gateway fails.
    """
    caplog.set_level(logging.DEBUG)
    wrong = "pm-a-wrong-one-that-must-not-be-seen"

    async def broken(*_: Any) -> None:
        raise RuntimeError("a fault of ours")

    texts = [call(guarded, key).text for key in (keys["free"], wrong)]
    texts += [call(guarded, keys["free"], n="?").text, call(guarded, keys["free"], model=keys["free"][:5]).text]
    monkeypatch.setattr(guarded.gateway.catalogue, "find", broken)
    failed = call(guarded, keys["free"])

    assert (500, "internal_error") == (failed.status_code, failed.json()["error"]["code"])
    others = (str(vars(record)) for record in caplog.records)
    written = "\n".join([*texts, failed.text, caplog.text, *events, *others])
    assert "a fault of ours" in "\n".join(events)
    assert "a fault of ours" not in failed.text
    assert [] == [key for key in (*keys.values(), wrong) if key in written]


def test_without_keys_it_serves_this_machine_alone(tmp_path: Path) -> None:
    """
    It refuses to start where nobody said that no keys are wanted, and at a public address even then.
    """
    empty = tmp_path / "keys.toml"
    empty.write_text("")
    for settings in ({"no_auth": False, "keys_file": None}, {"host": "0.0.0.0"}, {"keys_file": empty}):
        with pytest.raises(SettingsError), running_gateway("redis://127.0.0.1:1/0", "q", **settings):
            pass


def test_a_key_is_made_by_the_command_line(tmp_path: Path) -> None:
    """
    The key on standard error, once, and on standard output the lines for the file, which hold no key.
    """
    start = [sys.executable, "-c", "from pagemill.cli import main; main()"]
    command = [*start, "gateway", "keys", "create", "--name", "alice"]
    done = subprocess.run(
        [*command, "--tokens-per-day", "1000"], capture_output=True, text=True, check=True, timeout=60
    )

    [key] = [word for word in done.stderr.split() if word.startswith("pm-")]
    path = tmp_path / "keys.toml"
    path.write_text(done.stdout)
    found = KeyRing(path).find(key)
    assert found is not None
    assert ("alice", 1000) == (found.tenant, found.tokens_per_day)
    assert key not in done.stdout


def test_a_wrong_file_of_keys_is_told_without_its_contents(tmp_path: Path) -> None:
    """
    Somebody may have put the key itself where its hash belongs.
    """
    path = tmp_path / "keys.toml"
    key = new_key()
    path.write_text(f'[keys.alice]\nsha256 = "{key}"\n')

    with pytest.raises(SettingsError) as caught:
        KeyRing(path)

    assert "keys.alice.sha256" in str(caught.value)
    assert key not in str(caught.value)
    with pytest.raises(SettingsError, match="a b"):
        entry("a b", key)
