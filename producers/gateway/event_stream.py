"""Responses of server-sent events, and what ends when their client has left."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from producers.gateway.callers import ClientGone

T = TypeVar("T")

HEADERS = {
    "cache-control": "no-cache",
    # proxies must pass each event on as it comes
    "x-accel-buffering": "no",
}


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T], most_s: float | None = None) -> T:
    """
    The outcome of some work, which is cut off when the client leaves. The request's body has been read.

    Args:
        most_s: How long the work may take; None leaves that to it.

    Raises:
        ClientGone: it left, or has held up the work for so long.
    """
    task = asyncio.create_task(work)
    leaving = asyncio.create_task(_leaves(receive))
    try:
        await asyncio.wait({task, leaving}, timeout=most_s, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for one in (task, leaving):
            one.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """
    Sends events as they come, until they end or the client leaves.

    Args:
        most_s: A client that has not read all by then counts as gone.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        *,
        most_s: float,
        on_close: Callable[[], None],
        on_gone: Callable[[], None],
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events, self._most_s = events, most_s
        self._on_close, self._on_gone = on_close, on_gone
        self.init_headers(HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await unless_gone(receive, self._send(send), self._most_s)
        except (ClientGone, OSError):
            self._on_gone()
        finally:
            self._on_close()

    async def _send(self, send: Send) -> None:
        async for part in self._events:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
