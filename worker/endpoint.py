"""A few answers over HTTP, for those who supervise and measure a process; no framework, GET alone."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass

import structlog

from pagemill.errors import SettingsError

log = structlog.get_logger(__name__)

REQUEST_TIMEOUT_S = 10.0

TEXT = "text/plain; charset=utf-8"
JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Answer:
    """What is sent back; `kind` is the media type."""

    body: str | bytes
    status: str = "200 OK"
    kind: str = TEXT


Route = Callable[[], Awaitable[Answer]]


def check(condition: Callable[[], bool]) -> Route:
    """A route that says 200 while a condition holds, and 503 while it does not."""

    async def answer() -> Answer:
        return Answer("ok") if condition() else Answer("no", "503 Service Unavailable")

    return answer


@contextlib.asynccontextmanager
async def serve_http(host: str, port: int, routes: Mapping[str, Route]) -> AsyncIterator[int]:
    """
    Serve paths while the context is open; gives the port, chosen by the system where 0 was asked.

    Raises:
        OSError: when the port is in use.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        broken = (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)
        with contextlib.suppress(*broken):
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(await _response(head, routes))
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, host, port)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def _ask(route: Route, path: str) -> Answer:
    try:
        return await route()
    except Exception:
        # whoever looks must not end the process that is looked at: its loop takes such an error for one of its own
        log.exception("endpoint.failed", path=path)
        return Answer("this is a fault of the program: its log has it", "500 Internal Server Error")


async def _response(head: bytes, routes: Mapping[str, Route]) -> bytes:
    method, _, rest = head.partition(b" ")
    path = rest.split(b" ", 1)[0].decode("latin-1").partition("?")[0]
    if path not in routes:
        answer = Answer(f"try {', '.join(routes)}", "404 Not Found")
    elif method not in (b"GET", b"HEAD"):
        answer = Answer("GET alone", "405 Method Not Allowed")
    else:
        answer = await _ask(routes[path], path)
    body = answer.body.encode() if isinstance(answer.body, str) else answer.body
    lines = (
        f"HTTP/1.1 {answer.status}",
        f"Content-Type: {answer.kind}",
        f"Content-Length: {len(body)}",
        "Connection: close",
    )
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + (b"" if method == b"HEAD" else body)


@contextlib.asynccontextmanager
async def listening(what: str, host: str, port: int, routes: Mapping[str, Route]) -> AsyncIterator[int]:
    """
    As `serve_http`, for what an operator has set.

    Args:
        what: The settings `<what>_host` and `<what>_port` are those to change.

    Raises:
        SettingsError: the address cannot be listened at.
    """
    async with contextlib.AsyncExitStack() as stack:
        try:
            bound = await stack.enter_async_context(serve_http(host, port, routes))
        except OSError as error:
            message = (
                f"the {what} endpoint cannot listen at {host}:{port} ({error.strerror}): "
                f"choose another --{what}-host or --{what}-port"
            )
            raise SettingsError(message) from None
        yield bound
