"""A few answers over HTTP."""

import asyncio
import socket
import urllib.error
import urllib.request

import pytest

from pagemill.errors import SettingsError
from worker.endpoint import JSON, Answer, check, listening, serve_http

HOST = "127.0.0.1"


async def fetch(port: int, path: str, method: str = "GET") -> tuple[int, str, bytes]:
    """Status, media type and body."""

    def ask() -> tuple[int, str, bytes]:
        request = urllib.request.Request(f"http://{HOST}:{port}{path}", method=method)
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return answer.status, answer.headers["Content-Type"], answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers["Content-Type"], error.read()

    return await asyncio.to_thread(ask)


async def some_json() -> Answer:
    return Answer('{"a": "ü"}', kind=JSON)


def test_each_path_has_its_answer() -> None:
    """
    Queries are ignored; HEAD has the headers alone; what is not there is 404 and says what is.
    """

    async def ask() -> list[tuple[int, str, bytes]]:
        routes = {"/yes": check(lambda: True), "/no": check(lambda: False), "/json": some_json}
        async with serve_http(HOST, 0, routes) as port:
            return [
                await fetch(port, "/yes?x=1"),
                await fetch(port, "/no"),
                await fetch(port, "/json"),
                await fetch(port, "/json", "HEAD"),
                await fetch(port, "/other"),
                await fetch(port, "/yes", "POST"),
            ]

    text = "text/plain; charset=utf-8"
    assert [
        (200, text, b"ok"),
        (503, text, b"no"),
        (200, "application/json", '{"a": "ü"}'.encode()),
        (200, "application/json", b""),
        (404, text, b"try /yes, /no, /json"),
        (405, text, b"GET alone"),
    ] == asyncio.run(ask())


@pytest.mark.parametrize("data", [b"", b"\r\n\r\n", b"GET\r\n\r\n", b"\xff\xfe\x00\r\n\r\n", b"x" * 100_000])
def test_any_bytes_leave_it_alive(data: bytes) -> None:
    """
    What is no request ends that connection and nothing else.
    """

    async def ask() -> tuple[int, str, bytes]:
        async with serve_http(HOST, 0, {"/yes": check(lambda: True)}) as port:
            _, writer = await asyncio.open_connection(HOST, port)
            writer.write(data)
            writer.write_eof()
            writer.close()
            return await fetch(port, "/yes")

    assert 200 == asyncio.run(ask())[0]


def test_a_fault_of_an_answer_ends_nothing() -> None:
    """
    It is told as such; the loop hears nothing of it, and the next answer comes.
    """
    errors: list[object] = []

    async def broken() -> Answer:
        raise ZeroDivisionError

    async def ask() -> list[int]:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        async with serve_http(HOST, 0, {"/broken": broken, "/yes": check(lambda: True)}) as port:
            return [(await fetch(port, path))[0] for path in ("/broken", "/yes")]

    assert [500, 200] == asyncio.run(ask())
    assert [] == errors


def test_an_address_in_use_names_the_settings() -> None:
    """
    The error says which two to change.
    """

    async def listen(port: int) -> None:
        async with listening("metrics", HOST, port, {}):
            pass

    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=rf"{HOST}:{port}.*--metrics-host or --metrics-port"):
            asyncio.run(listen(port))
