"""HTTP servers that receive webhooks, well or badly; what they answer is written by the test."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Received:
    """One request as it came."""

    line: str
    headers: dict[str, str]
    body: bytes
    # the server's own address that was connected to
    address: str


Answer = bytes | Callable[[socket.socket], None]


def status(code: int, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {code} Whatever", "Content-Length: 2", *headers]
    return ("\r\n".join(lines) + "\r\n\r\nok").encode()


@dataclass(slots=True)
class Receiver:
    """
    Answers the first request with the first answer, and so on; the last one goes on for ever.
    """

    answers: list[Answer]
    port: int = 0
    received: list[Received] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook?x=1"

    def serve(self, connection: socket.socket) -> None:
        with connection:
            request = _read(connection)
            if request is None:
                return
            answer = self.answers[min(len(self.received), len(self.answers) - 1)]
            self.received.append(request)
            try:
                if callable(answer):
                    answer(connection)
                else:
                    connection.sendall(answer)
            except OSError:
                # whoever asked has left
                return


@contextmanager
def receiver(*answers: Answer, wrap: Callable[[socket.socket], socket.socket] | None = None) -> Iterator[Receiver]:
    """A server on a port of its own, on all of the loopback's addresses."""
    made = Receiver(list(answers))
    with socket.create_server(("0.0.0.0", 0)) as listening:
        made.port = listening.getsockname()[1]
        listening.settimeout(0.05)

        def accept() -> None:
            while not made.closing.is_set():
                try:
                    connection, _ = listening.accept()
                    served = wrap(connection) if wrap else connection
                except OSError:
                    continue
                threading.Thread(target=made.serve, args=(served,), daemon=True).start()

        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        try:
            yield made
        finally:
            made.closing.set()
            accepting.join(10)


def _read(connection: socket.socket) -> Received | None:
    text = b""
    while b"\r\n\r\n" not in text:
        more = connection.recv(4096)
        if not more:
            return None
        text += more
    head, _, body = text.partition(b"\r\n\r\n")
    line, *rest = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (one.partition(": ") for one in rest)}
    while len(body) < int(headers.get("content-length", 0)):
        body += connection.recv(4096)
    return Received(line, headers, body, connection.getsockname()[0])
