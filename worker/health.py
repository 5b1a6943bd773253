"""
Two answers over HTTP for whoever supervises the process: /healthz and /readyz.

/healthz is 200 while the engine lives and its steps end; /readyz is 200 while the worker pulls jobs.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

REQUEST_TIMEOUT_S = 5.0


@contextlib.asynccontextmanager
async def health_endpoint(
    host: str, port: int, *, healthy: Callable[[], bool], ready: Callable[[], bool]
) -> AsyncIterator[int]:
    """
    Serve while the context is open; gives the port, chosen by the system where 0 was asked.

    Raises:
        OSError: when the port is in use.
    """
    checks = {"/healthz": healthy, "/readyz": ready}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(_response(head, checks))
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, host, port)
    async with server:
        yield server.sockets[0].getsockname()[1]


def _response(head: bytes, checks: dict[str, Callable[[], bool]]) -> bytes:
    parts = head.split(b" ", 2)
    path = parts[1].decode("latin-1").partition("?")[0] if len(parts) == 3 else ""
    if path not in checks:
        status, body = "404 Not Found", "try /healthz or /readyz"
    elif checks[path]():
        status, body = "200 OK", "ok"
    else:
        status, body = "503 Service Unavailable", "no"
    head_lines = (f"HTTP/1.1 {status}", "Content-Type: text/plain", f"Content-Length: {len(body)}", "Connection: close")
    return ("\r\n".join(head_lines) + f"\r\n\r\n{body}").encode()
