"""An S3 server that answers as it is told: errors, half an object, and what came in."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self


@dataclass(frozen=True, slots=True)
class Answer:
    """
    One answer.

    Args:
        code: An S3 error, as XML in the body.
        cut_after: Say that the whole body comes, and hang up after so many bytes.
    """

    status: int = 200
    body: bytes = b""
    code: str = ""
    cut_after: int | None = None


class ScriptedS3:
    """
    Answers requests in order, and with `then` once the script is over; entered, it runs.

    Args:
        then: May be set anew at any time.
    """

    def __init__(self, *answers: Answer, then: Answer = Answer()) -> None:
        self.then = then
        self.headers: list[Mapping[str, str]] = []
        self._answers = list(answers)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())

    @property
    def url(self) -> str:
        """A store in this server."""
        return f"s3://bucket/prefix?region=us-east-1&endpoint=http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), name="scripted-s3", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        script = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_PUT(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self._answer()

            def do_GET(self) -> None:
                self._answer()

            def log_message(self, *_: object) -> None:
                """Tests are silent."""

            def _answer(self) -> None:
                script.headers.append(dict(self.headers))
                answer = script._answers.pop(0) if script._answers else script.then
                body = f"<Error><Code>{answer.code}</Code></Error>".encode() if answer.code else answer.body
                self.send_response(answer.status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[: answer.cut_after])
                self.close_connection = answer.cut_after is not None

        return Handler
