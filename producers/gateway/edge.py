"""
The outermost layer: a request's id, what is counted and logged of it, and an answer whatever fails.

A plain ASGI middleware: the framework's own wraps streams, which then know nothing of a client that left.
"""

import json
import logging
import time
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagemill.ids import uuid7
from producers.gateway.metrics import Metrics
from producers.openai_api.errors import ApiError

log = logging.getLogger("pagemill.gateway")

UNEXPECTED = ApiError(500, "the gateway failed; its log says why, under the request's id", code="internal_error")


class Edge:
    """
    Args:
        metrics: Asked for each time, as it is made when the gateway starts.
    """

    def __init__(self, app: ASGIApp, metrics: Callable[[], Metrics]) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        name = f"req-{uuid7()}"
        scope.setdefault("state", {}).update(request_id=name, began=began)
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
            log.exception("request failed: id=%s route=%s", name, _route(scope))
            if status == 0:
                await _answer(UNEXPECTED, note)
        finally:
            self._count(scope, status, time.monotonic() - began, name)

    def _count(self, scope: Scope, status: int, elapsed_s: float, name: str) -> None:
        route = _route(scope)
        metrics = self._metrics()
        # 499: the client left before there was a status
        metrics.requests.labels(route, status or 499).inc()
        metrics.latency.labels(route).observe(elapsed_s)
        # never the query nor a header: a key may stand there
        log.info("request: id=%s route=%s status=%d ms=%.1f", name, route, status or 499, elapsed_s * 1000)


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
