"""The status page over HTTP: who may see it, how it is cached, and how it stays when the queue's server goes."""

import asyncio
import base64
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import openai
import pytest
from redis import Redis

from pagemill.async_client import AsyncClient
from pagemill.client import Client
from pagemill.errors import ObjectStoreError
from pagemill.keys import MODELS, QueueKeys
from producers.batch_file.records import BatchRecord
from producers.gateway.__main__ import create_key
from producers.gateway.api_keys import KeyRing, entry, new_key
from producers.gateway.status import board
from producers.gateway.status.board import READ_EVERY_S, Board, Sight
from producers.gateway.status.pages import KINDS, static_url
from producers.local_redis import local_redis
from tests.support.gateways import RunningGateway, running_gateway
from tests.support.servers import a_job, wait_for
from tests.support.tcp_proxy import BOTH, TcpProxy

QUEUE = "gateway-tests"
BROWSER = {"accept": "text/html,application/xhtml+xml"}


def basic(key: str) -> dict[str, str]:
    """As a browser sends a name and a password."""
    return {"authorization": "Basic " + base64.b64encode(f"me:{key}".encode()).decode()}


def test_the_page_shows_the_queue(gateway: RunningGateway, redis_url: str) -> None:
    """
    Its worker, and a job that has ended, in the page and in the part that its script fetches.
    """
    with Client(redis_url, queue=QUEUE) as client:
        client.text(client.submit(a_job()).job_id, wait_s=20)

        def shows_it() -> bool:
            return "in-process-" in httpx.get(f"{gateway.url}/status/parts").text

        wait_for(shows_it)

    whole = httpx.get(f"{gateway.url}/status")
    assert (200, "text/html; charset=utf-8") == (whole.status_code, whole.headers["content-type"])
    assert whole.text.startswith("<!doctype html>")
    assert "<noscript><meta http-equiv" in whole.text
    assert "in-process-" in whole.text


def test_nobody_else_may_use_the_page(gateway: RunningGateway) -> None:
    """
    It is kept by nobody, framed by nobody, and runs nothing but its own files.
    """
    for path in ("/status", "/status/parts"):
        headers = httpx.get(f"{gateway.url}{path}").headers
        policy = headers["content-security-policy"]
        assert "no-store" == headers["cache-control"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert ("nosniff", "DENY", "no-referrer") == tuple(
            headers[name] for name in ("x-content-type-options", "x-frame-options", "referrer-policy")
        )


def test_its_files_may_be_kept(gateway: RunningGateway) -> None:
    """
    Each is asked for by a name that changes with its content; others are not served.
    """
    for name, kind in KINDS.items():
        answer = httpx.get(f"{gateway.url}/{static_url(name)}")
        assert (200, kind) == (answer.status_code, answer.headers["content-type"])
        assert "immutable" in answer.headers["cache-control"]
    for name in ("page.html", "..%2Ftemplates%2Fpage.html", "nothing"):
        assert 404 == httpx.get(f"{gateway.url}/status/static/{name}").status_code


def test_browsers_are_led_to_it(gateway: RunningGateway) -> None:
    """
    From the root; programs get the API's error there, as before.
    """
    led = httpx.get(f"{gateway.url}/", headers=BROWSER)
    assert (307, "status") == (led.status_code, led.headers["location"])
    told = httpx.get(f"{gateway.url}/", headers={"accept": "*/*"})
    assert (404, "there is no route GET /") == (told.status_code, told.json()["error"]["message"])


def test_the_api_does_not_list_it(gateway: RunningGateway) -> None:
    """
    It is for people: the document of the API is as it was.
    """
    assert [] == [path for path in httpx.get(f"{gateway.url}/openapi.json").json()["paths"] if "status" in path]


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.toml"


@pytest.fixture(scope="module")
def keys(keys_file: Path) -> dict[str, str]:
    """A tenant's key, and an operator's."""
    made = {"alice": new_key(), "root": new_key()}
    tables = [entry("alice", made["alice"]), entry("root", made["root"], operator=True)]
    keys_file.write_text("\n\n".join(tables))
    return made


@pytest.fixture(scope="module")
def guarded(redis_url: str, keys: dict[str, str], keys_file: Path) -> Iterator[RunningGateway]:  # noqa: ARG001
    with running_gateway(redis_url, QUEUE, keys_file=keys_file) as gateway:
        yield gateway


@pytest.mark.parametrize("path", ["/status", "/status/parts"])
def test_an_operators_key_lets_in(guarded: RunningGateway, keys: dict[str, str], path: str) -> None:
    """
    As a browser's password, or as in the API.
    """
    for headers in (basic(keys["root"]), {"authorization": f"Bearer {keys['root']}"}):
        answer = httpx.get(f"{guarded.url}{path}", headers=headers)
        assert 200 == answer.status_code
        assert "Dead letters" in answer.text


@pytest.mark.parametrize("path", ["/status", "/status/parts"])
def test_others_see_nothing(guarded: RunningGateway, keys: dict[str, str], path: str) -> None:
    """
    No key or a wrong one makes a browser ask; a tenant's own is not enough, as all tenants are shown.
    """
    wrong = [{}, basic("pm-wrong"), basic(""), {"authorization": "Basic !"}, {"authorization": "Bearer pm-wrong"}]
    for headers in wrong:
        answer = httpx.get(f"{guarded.url}{path}", headers=headers)
        assert 401 == answer.status_code
        assert answer.headers["www-authenticate"].startswith("Basic realm=")
        assert "Workers" not in answer.text
    tenant = httpx.get(f"{guarded.url}{path}", headers=basic(keys["alice"]))
    assert 403 == tenant.status_code
    assert "Workers" not in tenant.text
    page = httpx.get(f"{guarded.url}/metrics").text
    assert 'pagemill_gateway_refused_total{reason="no_operator"}' in page


def test_the_key_of_an_operator_is_one_of_the_api_too(guarded: RunningGateway, keys: dict[str, str]) -> None:
    """
    It is a key with one right more.
    """
    answer = httpx.get(f"{guarded.url}/v1/models", headers={"authorization": f"Bearer {keys['root']}"})

    assert 200 == answer.status_code


def test_an_operators_key_is_made_by_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """
    With one flag; without it a key is no operator's.
    """
    path = tmp_path / "keys.toml"
    for flags, expected in (([], False), (["--operator"], True)):
        assert 0 == create_key(["create", "--name", "ops", *flags])
        printed = capsys.readouterr()
        path.write_text(printed.out)
        found = KeyRing(path).find(next(word for word in printed.err.split() if word.startswith("pm-")))
        assert found is not None
        assert expected == found.operator


def test_it_can_be_turned_off(redis_url: str) -> None:
    """
    Then there is nothing at its place, and browsers are not led to it.
    """
    with running_gateway(redis_url, QUEUE, no_status_page=True) as gateway:
        for path in ("/status", "/status/parts", "/", f"/{static_url('status.css')}"):
            assert 404 == httpx.get(f"{gateway.url}{path}", headers=BROWSER).status_code


def test_all_who_watch_share_a_look(gateway: RunningGateway) -> None:
    """
    Fifty at once, and again within two seconds, ask the queue once.
    """
    board = gateway.gateway.pages._board

    async def watch() -> None:
        async with httpx.AsyncClient() as client:
            answers = await asyncio.gather(*(client.get(f"{gateway.url}/status/parts") for _ in range(50)))
        assert {200} == {answer.status_code for answer in answers}

    time.sleep(READ_EVERY_S)
    before, began = board.num_looks, time.monotonic()
    asyncio.run(watch())
    asyncio.run(watch())
    took = time.monotonic() - began

    assert 1 <= board.num_looks - before <= 1 + took / READ_EVERY_S


def test_all_queues_that_workers_registered_are_shown() -> None:
    """
    The gateway's own too, although nobody serves it.
    """
    with local_redis() as url, Redis.from_url(url) as redis, running_gateway(url, "own") as gateway:
        redis.hset(MODELS, mapping={"large": "chat", "larger": "chat", "small": "night"})
        sight = asyncio.run(look(url, "own"))
        page = httpx.get(f"{gateway.url}/status").text

    assert ["chat", "night", "own"] == [one.queue for one in sight.queues]
    assert ("large", "larger") == sight.queues[0].models
    assert all(f"<h3>{name}" in page for name in ("chat", "night", "own"))


async def look(url: str, queue: str, batches: Any = None) -> Sight:
    async with AsyncClient(url, queue=queue) as client:
        return await Board(client, batches).sight()


def test_batches_of_files_are_shown(redis_url: str, tmp_path: Path) -> None:
    """
    Of any tenant, as long as they have not ended; nobody runs them here.
    """
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "fake", "prompt": "a"}}
    with (
        running_gateway(redis_url, QUEUE, object_store=tmp_path.as_uri(), max_batches=0) as gateway,
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused") as client,
    ):
        file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
        made = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        page = httpx.get(f"{gateway.url}/status").text

    assert made.id in page
    assert "validating" in page


def test_a_store_that_fails_takes_nothing_else_along(redis_url: str) -> None:
    """
    The queue's figures are shown, and why the others are not.
    """

    class Failing:
        def running(self, *, limit: int) -> object:
            raise ObjectStoreError(f"no {limit} objects")

    sight = asyncio.run(look(redis_url, QUEUE, Failing()))

    assert "no 100 objects" == sight.files.error
    assert all(one.overview is not None and not one.error for one in sight.queues)


def test_a_record_that_cannot_be_read_is_told(redis_url: str) -> None:
    """
    As one that another version has written.
    """

    class Newer:
        def running(self, *, limit: int) -> object:
            return BatchRecord.model_validate({"limit": limit})

    sight = asyncio.run(look(redis_url, QUEUE, Newer()))

    assert "BatchRecord" in sight.files.error
    assert all(one.overview is not None and not one.error for one in sight.queues)


def test_a_store_that_hangs_is_asked_once(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    However often somebody looks: each look would else keep one more of the threads that requests need. When it answers
    at last, that is shown.
    """
    monkeypatch.setattr(board, "FILES_TIMEOUT_S", 0.2)
    monkeypatch.setattr(board, "FILES_EVERY_S", 0.0)
    monkeypatch.setattr(board, "READ_EVERY_S", 0.0)
    monkeypatch.setattr(board, "READ_TIMEOUT_S", 0.4)
    answer = threading.Event()
    asked = []

    class Hanging:
        def running(self, *, limit: int) -> object:
            asked.append(limit)
            answer.wait(30)
            return (), 7

    async def watch() -> tuple[list[str], Sight]:
        async with AsyncClient(redis_url, queue=QUEUE) as client:
            watched = Board(client, cast(Any, Hanging()))
            errors = [(await watched.sight()).files.error for _ in range(4)]
            num_asked.append(len(asked))
            answer.set()
            # its thread has to come to its turn
            while (last := await watched.sight()).files.error:
                pass
            return errors, last

    num_asked: list[int] = []
    try:
        errors, last = asyncio.run(watch())
    finally:
        answer.set()

    assert [1] == num_asked
    assert "no answer within 0.2 s" == errors[-1]
    assert ("", 7) == (last.files.error, last.files.num_batches)


def test_a_server_that_is_away_is_told_with_the_last_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    The page stays, says since when, and recovers by itself; before anything was read it says that.
    """
    monkeypatch.setattr("producers.gateway.status.board.READ_TIMEOUT_S", 1.0)
    with local_redis() as url, Redis.from_url(url) as redis, TcpProxy(url) as proxy:
        redis.hset(QueueKeys("q").stats, "queued:bulk", 77)
        with running_gateway(proxy.url, "q") as gateway:

            def page() -> str:
                answer = httpx.get(f"{gateway.url}/status", timeout=20)
                assert 200 == answer.status_code
                return answer.text

            proxy.hold(*BOTH)
            assert "Nothing has been read yet." in page()
            assert "The queue cannot be read" in page()
            proxy.heal()
            wait_for(lambda: "77" in page(), 20)
            proxy.hold(*BOTH)
            wait_for(lambda: "these are its last figures" in page(), 20)
            wait_for(lambda: "Last read" in page(), 20)
            assert "77" in page()
            proxy.heal()
            wait_for(lambda: "cannot be read" not in page(), 20)
