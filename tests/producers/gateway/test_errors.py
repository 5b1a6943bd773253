"""Every error is in OpenAI's shape; nothing that is sent makes a 5xx."""

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

from tests.support.gateways import RunningGateway, running_gateway
from tests.support.servers import wait_for

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


@pytest.fixture
def web(gateway: RunningGateway) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, timeout=30) as web:
        yield web


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert {"error"} == set(body)
    assert {"message", "type", "param", "code"} == set(body["error"])
    assert isinstance(body["error"]["message"], str)
    found: dict[str, Any] = body["error"]
    return found


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", "invalid_json"),
        (b"", "invalid_json"),
        (b"[1]", "invalid_json"),
        (b'{"model": "\xff"}', "invalid_encoding"),
        (b'{"model": "\\ud800", "messages": []}', "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (json.dumps(CHAT | {"n": "many"}).encode(), "invalid_value"),
        (json.dumps(CHAT | {"tools": [{}]}).encode(), "invalid_value"),
    ],
)
def test_bad_bodies_are_400(web: httpx.Client, body: bytes, code: str) -> None:
    """
    What is no JSON object in UTF-8, and what breaks the schema.
    """
    response = web.post("/v1/chat/completions", content=body)

    assert (400, code) == (response.status_code, error_of(response)["code"])


def test_unknown_models_are_404(web: httpx.Client) -> None:
    """
    Before anything is submitted; the field is named.
    """
    response = web.post("/v1/chat/completions", json=CHAT | {"model": "nope"})

    assert (404, "model", "model_not_found") == (
        response.status_code,
        error_of(response)["param"],
        error_of(response)["code"],
    )


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)])
def test_routes_that_are_not_there(web: httpx.Client, method: str, path: str, status: int) -> None:
    """
    The framework's own answers have the shape too.
    """
    response = web.request(method, path)

    assert status == response.status_code
    error_of(response)


def test_large_bodies_are_413_before_they_are_read(redis_url: str) -> None:
    """
    Told by its length or sent in pieces without one: what is read never passes the limit.
    """
    sent = 0

    def pieces() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(4000):
            sent += 65536
            yield b"x" * 65536

    with running_gateway(redis_url, "q", max_body_bytes=100_000) as gateway, httpx.Client(base_url=gateway.url) as web:
        told = web.post("/v1/chat/completions", content=b"x" * 100_001)
        fits = web.post("/v1/chat/completions", content=b"x" * 100_000)
        try:
            unsaid = web.post("/v1/chat/completions", content=pieces()).status_code
        except httpx.TransportError:
            # the server may close its side while we still send
            unsaid = 413

    assert [413, 400, 413] == [told.status_code, fits.status_code, unsaid]
    assert "request_too_large" == error_of(told)["code"]
    assert sent < 100 * 65536


def test_each_response_names_its_request(web: httpx.Client) -> None:
    """
    An id that the log has too.
    """
    names = {web.get(path).headers["x-request-id"] for path in ("/healthz", "/nothing", "/v1/models")}

    assert 3 == len(names)


def test_health_and_readiness(web: httpx.Client, redis_url: str) -> None:
    """
    A gateway is ready where its queue has a worker, and healthy as long as it answers.
    """
    assert (200, {"status": "ready", "workers": 1}) == (web.get("/readyz").status_code, web.get("/readyz").json())
    # nothing listens at that port
    away = "redis://127.0.0.1:1/0"
    for url, status in ((redis_url.replace("/0", "/5"), "no worker lives"), (away, "the queue cannot be reached")):
        with running_gateway(url, "empty") as other:
            ready = httpx.get(f"{other.url}/readyz", timeout=30)
            assert (503, status) == (ready.status_code, ready.json()["status"])
            assert 200 == httpx.get(f"{other.url}/healthz").status_code


def test_a_server_that_is_away_is_503() -> None:
    """
    Callers are told when to try again, and not where the server is.
    """
    with running_gateway("redis://127.0.0.1:1/0", "q") as gateway:
        response = httpx.post(f"{gateway.url}/v1/chat/completions", json=CHAT, timeout=30)

    assert (503, "unavailable", "5") == (
        response.status_code,
        error_of(response)["code"],
        response.headers["retry-after"],
    )
    assert "127.0.0.1" not in response.text


def test_more_generations_than_the_gateway_takes_are_503(redis_url: str) -> None:
    """
    The one that is too many is told to come back.
    """
    slow = {"model": "fake", "prompt": "x", "max_tokens": 8000, "stream": True}
    with (
        running_gateway(redis_url, "gateway-tests", max_in_flight=1) as gateway,
        httpx.Client(base_url=gateway.url, timeout=30) as web,
    ):
        with web.stream("POST", "/v1/completions", json=slow) as running:
            assert 200 == running.status_code
            refused = web.post("/v1/completions", json=slow)
        wait_for(lambda: gateway.gateway.in_flight == 0)

    assert (503, "1") == (refused.status_code, refused.headers["retry-after"])


def test_no_page_of_another_site_may_call_unless_it_is_told(redis_url: str) -> None:
    """
    CORS is off; with a list of origins these alone are let in.
    """
    ask = {"origin": "https://app.example", "access-control-request-method": "POST"}

    def allowed(**settings: Any) -> str | None:
        with running_gateway(redis_url, "q", **settings) as gateway:
            answer = httpx.options(f"{gateway.url}/v1/chat/completions", headers=ask)
            return answer.headers.get("access-control-allow-origin")

    assert [None, "https://app.example", None] == [
        allowed(),
        allowed(cors_origins=["https://app.example"]),
        allowed(cors_origins=["https://other.example"]),
    ]


def test_metrics_tell_routes_and_codes_and_no_caller(web: httpx.Client) -> None:
    """
    Ids in paths make no new label, and nothing tells one caller from another.
    """
    web.get("/v1/models/some-id-of-mine")
    web.post("/v1/completions", json={"model": "fake", "prompt": "x", "max_tokens": 3})
    web.post("/v1/completions", json={"model": "fake", "prompt": "x", "max_tokens": 3, "stream": True})

    def page() -> str:
        return web.get("/metrics").text

    wait_for(lambda: 'pagemill_gateway_tokens_total{kind="completion"} ' in page())
    assert 'requests_total{code="404",route="GET /v1/models/{name:path}"}' in page()
    assert 'first_token_seconds_count{route="/v1/completions"}' in page()
    assert "some-id-of-mine" not in page()
    assert "tenant" not in page()


def test_schemathesis_finds_no_5xx(gateway: RunningGateway) -> None:
    """
    All routes of the OpenAPI document, with bodies that follow it and bodies that do not.
    """
    schema = schemathesis.openapi.from_url(f"{gateway.url}/openapi.json")
    seen: list[tuple[str, int]] = []
    for operation in (found.ok() for found in schema.get_all_operations()):
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):

            @settings(
                max_examples=8,
                deadline=None,
                database=None,
                derandomize=True,
                suppress_health_check=list(HealthCheck),
                phases=[Phase.generate],
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def check(case: schemathesis.Case) -> None:
                response = case.call()
                seen.append((case.path, response.status_code))
                assert response.status_code < 500 or case.path == "/readyz", response.text

            # a route without parameters can be called in one way alone
            with suppress(Unsatisfiable):
                check()

    assert {"/v1/chat/completions", "/v1/completions", "/v1/models"} <= {path for path, _ in seen}
    assert len(seen) > 50
