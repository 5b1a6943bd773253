"""The application: routes, and every error in OpenAI's shape."""

import ipaddress
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

import pagemill
from pagemill.errors import PagemillError, SettingsError
from pagemill.settings import ClientSettings
from pagemill.traces import SpanOutcome, tracer_for
from producers.gateway import batches, files, generate, health, models, schemas
from producers.gateway.api_keys import KeyRing
from producers.gateway.callers import ClientGone
from producers.gateway.edge import Edge
from producers.gateway.settings import GatewaySettings
from producers.gateway.state import open_gateway
from producers.gateway.status import routes
from producers.openai_api.errors import ApiError, bad_request, of_pagemill


def create_app(settings: GatewaySettings, queue: ClientSettings | None = None) -> FastAPI:
    """
    The gateway; it connects when it starts.

    Args:
        queue: Where the queue is; None takes PAGEMILL_* and pagemill.toml.

    Raises:
        SettingsError: there are no keys, and nobody said that none are wanted.
    """
    keys = _keys_for(settings)
    place = queue or ClientSettings.load(strict=False)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with open_gateway(settings, place, keys) as gateway:
            app.state.gateway = gateway
            yield

    app = FastAPI(
        title="Pagemill gateway",
        description="OpenAI's API in front of a queue.",
        version=pagemill.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        # its own spans and records have messages of errors, which quote what was wrong; Edge makes ours
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    for room in (generate, models, files, batches, health):
        app.include_router(room.router)
    if not settings.no_status_page:
        app.include_router(routes.router)
    app.openapi = lambda: schemas.document(app)  # type: ignore[method-assign]
    _add_handlers(app)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["*"], allow_headers=["*"]
        )
    # the last added is the outermost
    app.add_middleware(Edge, metrics=lambda: app.state.gateway.metrics, tracer=tracer_for(place.tracing))
    return app


def spans_of(app: FastAPI, outcome: SpanOutcome, count: int) -> None:
    """Count what became of spans; from any thread."""
    app.state.gateway.metrics.spans.labels(outcome).inc(count)


def _keys_for(settings: GatewaySettings) -> KeyRing | None:
    if settings.no_auth:
        if not _is_loopback(settings.host):
            raise SettingsError(
                f"no_auth at {settings.host}: anybody who reaches that address could call; "
                "listen at 127.0.0.1, or set keys_file"
            )
        return None
    if settings.keys_file is None:
        raise SettingsError(
            "the gateway has no API keys: make one with `pagemill gateway keys create --name NAME`, put its lines "
            "into a file and name that by --keys-file; or serve this machine alone with --no-auth"
        )
    keys = KeyRing(settings.keys_file)
    if not len(keys):
        raise SettingsError(f"the keys' file {settings.keys_file} has no keys")
    return keys


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def response_of(error: ApiError) -> JSONResponse:
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status == 413:
        # the rest of the body is not read
        headers["connection"] = "close"
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error.body(), error.status, headers)


def _add_handlers(app: FastAPI) -> None:
    async def on_api_error(request: Request, error: Any) -> Response:  # noqa: ARG001  handlers take both
        return response_of(error)

    async def on_pagemill_error(request: Request, error: Any) -> Response:  # noqa: ARG001
        return response_of(of_pagemill(error))

    async def on_validation(request: Request, error: Any) -> Response:  # noqa: ARG001
        fault = error.errors()[0]
        where = ".".join(str(part) for part in fault["loc"][1:])
        return response_of(bad_request(f"{where}: {fault['msg']}", where or None, "invalid_value"))

    async def on_http(request: Request, error: Any) -> Response:
        what = f"there is no route {request.method} {request.url.path[:200]}"
        response = response_of(ApiError(error.status_code, what if error.status_code in (404, 405) else error.detail))
        response.headers.update(error.headers or {})
        return response

    async def on_gone(request: Request, error: Any) -> Response:  # noqa: ARG001
        request.app.state.gateway.metrics.gone.inc()
        # nobody reads it
        return Response(status_code=499)

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(PagemillError, on_pagemill_error)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(ClientGone, on_gone)
