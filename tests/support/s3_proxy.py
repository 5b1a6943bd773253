"""A proxy before an S3 server that refuses requests, and cuts answers, as it is told."""

import http.client
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import urlsplit

from tests.support.scripted_s3 import Answer

# they are of one connection
_HOP = frozenset({"connection", "transfer-encoding", "keep-alive"})


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it came; the body apart."""

    method: str
    path: str
    headers: Mapping[str, str]


@dataclass(slots=True, eq=False)
class _Fault:
    """What happens to the next so many requests of a kind."""

    matches: Callable[[Request], bool]
    times: int
    answer: Answer | None = None
    cut_after: int | None = None
    lose_reply: bool = False
    then: Callable[[], None] = field(default=lambda: None)


class S3Proxy:
    """
    Passes requests on, with the host that they were signed for; entered, it runs.
    """

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        assert parts.hostname is not None
        assert parts.port is not None
        self._target = (parts.hostname, parts.port)
        self._lock = threading.Lock()
        self._faults: list[_Fault] = []
        self.requests: list[Request] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), name="s3-proxy", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def refuse(
        self,
        code: str,
        status: int,
        matches: Callable[[Request], bool],
        *,
        times: int = 1,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Answer matching requests with an error, without asking the server; `then` is called each time."""
        self._faults.append(_Fault(matches, times, answer=Answer(status, code=code), then=then))

    def cut(self, after: int, matches: Callable[[Request], bool], *, times: int = 1) -> None:
        """Hang up in the middle of answers, after so many bytes of their bodies."""
        self._faults.append(_Fault(matches, times, cut_after=after))

    def lose_reply(self, matches: Callable[[Request], bool]) -> None:
        """Let the server carry out one request, and hang up instead of answering."""
        self._faults.append(_Fault(matches, 1, lose_reply=True))

    @property
    def num_faults_left(self) -> int:
        return sum(fault.times for fault in self._faults)

    def _fault_for(self, request: Request) -> _Fault | None:
        with self._lock:
            self.requests.append(request)
            for fault in self._faults:
                if fault.times and fault.matches(request):
                    fault.times -= 1
                    return fault
        return None

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                request = Request(self.command, self.path, dict(self.headers))
                fault = proxy._fault_for(request)
                if fault is not None and fault.answer is not None:
                    fault.then()
                    error = f"<Error><Code>{fault.answer.code}</Code></Error>".encode()
                    self._answer(fault.answer.status, {}, error, None)
                    return
                server = http.client.HTTPConnection(*proxy._target, timeout=30)
                try:
                    server.request(self.command, self.path, body, dict(self.headers))
                    reply = server.getresponse()
                    content = reply.read()
                finally:
                    server.close()
                if fault is not None and fault.lose_reply:
                    self.close_connection = True
                    return
                headers = {name: value for name, value in reply.getheaders() if name.lower() not in _HOP}
                self._answer(reply.status, headers, content, fault.cut_after if fault else None)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on  # noqa: N815

            def _answer(self, status: int, headers: dict[str, str], body: bytes, cut_after: int | None) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    if name.lower() not in ("content-length", "date", "server"):
                        self.send_header(name, value)
                # a HEAD tells the length of what it does not send
                length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(body))
                self.send_header("Content-Length", length)
                self.end_headers()
                self.wfile.write(body[:cut_after])
                self.close_connection = cut_after is not None

            def log_message(self, *_: object) -> None:
                """Tests are silent."""

        return Handler
