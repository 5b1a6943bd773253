"""
The outermost layer: a request's id, what is counted and logged of it, and an answer whatever fails.

A plain ASGI middleware: the framework's own wraps streams, which then know nothing of a client that left.
"""

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bound_contextvars

from pagemill.ids import uuid7
from producers.gateway.metrics import Metrics
from producers.openai_api.errors import ApiError

if TYPE_CHECKING:
    from pagemill.tracing import Tracer

log = structlog.get_logger(__name__)

UNEXPECTED = ApiError(500, "the gateway failed; its log says why, under the request's id", code="internal_error")


# asked by machines, or by the script of an open page, every few seconds
PROBES = frozenset({"/healthz", "/readyz", "/metrics", "/status/parts"})


class Edge:
    """
    Args:
        metrics: Asked for each time, as it is made when the gateway starts.
        tracer: Makes a span of each request; None where traces are off.
    """

    def __init__(self, app: ASGIApp, metrics: Callable[[], Metrics], tracer: "Tracer | None" = None) -> None:
        self._app = app
        self._metrics = metrics
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif self._tracer is None or scope["path"] in PROBES:
            with bound_contextvars(request_id=_new_name(scope)):
                await self._serve(scope, receive, send)
        else:
            await self._serve_traced(self._tracer, scope, receive, send)

    async def _serve_traced(self, tracer: "Tracer", scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        with tracer.serving(scope["method"], headers) as serving:
            with bound_contextvars(request_id=_new_name(scope), trace_id=serving.trace_id):
                status = await self._serve(scope, receive, send)
            serving.served(_route(scope), status, scope["state"]["request_id"])

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Serve a request; its status."""
        name = scope["state"]["request_id"]
        status = 0

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message.setdefault("headers", []).append((b"x-request-id", name.encode()))
            await send(message)

        try:
            await self._app(scope, receive, note)
        except Exception:
            log.exception("request.crashed", route=_route(scope))
            if status == 0:
                await _answer(UNEXPECTED, note)
        finally:
            # 499: the client left before there was a status
            status = status or 499
            self._count(scope, status, time.monotonic() - scope["state"]["began"])
        return status

    def _count(self, scope: Scope, status: int, elapsed_s: float) -> None:
        route = _route(scope)
        metrics = self._metrics()
        metrics.requests.labels(route, status).inc()
        metrics.latency.labels(route).observe(elapsed_s)
        # never the query nor a header: a key may stand there
        fields = {"route": route, "status": status, "ms": round(elapsed_s * 1000, 1)}
        if status >= 500:
            # by another name: a flood of those that went well takes no line from these
            log.warning("request.failed", **fields)
        elif scope["path"] in PROBES:
            log.debug("request.probe", **fields)
        else:
            log.info("request", **fields)


def _new_name(scope: Scope) -> str:
    name = f"req-{uuid7()}"
    scope.setdefault("state", {}).update(request_id=name, began=time.monotonic())
    return name


def _route(scope: Scope) -> str:
    """The path as routes write it, so that ids in paths, and methods that callers make up, are no new label."""
    route: Any = scope.get("route")
    known = route is not None and scope["method"] in (route.methods or ())
    return f"{scope['method']} {route.path}" if known else "unknown"


async def _answer(error: ApiError, send: Send) -> None:
    body = json.dumps(error.body()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
