"""
A TCP proxy that cuts, delays, holds and swallows on command, in either direction.

It stands between a client and a real server, so that what is tested is what a network does: a
reply that never comes although the command was carried out, a connection that is open and dead, a
command that arrives long after its sender gave it up.
"""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal, Self
from urllib.parse import urlsplit, urlunsplit

from pagemill.scripts import load

Direction = Literal["to_server", "to_client"]
BOTH: tuple[Direction, ...] = ("to_server", "to_client")

CHUNK = 65536


@dataclass(slots=True, eq=False)
class _Loss:
    """A reply that is to be lost: of a command that holds these bytes, after so many of the kind."""

    command: bytes
    after: int
    silently: bool


@dataclass(slots=True, eq=False)
class _Link:
    """One client's connection and ours to the server."""

    client: socket.socket
    server: socket.socket
    # set while a command is with the server whose reply is to be lost
    loss: _Loss | None = None
    # passes nothing on until all is healed, and stays open
    stranded: bool = False

    def cut(self) -> None:
        for end in (self.client, self.server):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


class TcpProxy:
    """
    Passes on what comes, until told otherwise; every fault can be ended with `heal`.

    Bytes that were held are passed on when it heals, also those of a client that has hung up
    meanwhile: as a network does that lost and repeated them.
    """

    def __init__(self, server_url: str) -> None:
        parts = urlsplit(server_url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._target = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        login = f"{parts.netloc.rpartition('@')[0]}@" if "@" in parts.netloc else ""
        self.url = urlunsplit(parts._replace(netloc=f"{login}127.0.0.1:{self._listener.getsockname()[1]}"))
        self.num_replies_lost = 0

        # all the mutable state there is, under the lock
        self._changed = threading.Condition()
        self._links: set[_Link] = set()
        self._held: set[Direction] = set()
        self._delay_s: dict[Direction, float] = {}
        self._losing: list[_Loss] = []
        self._num_to_lose = 0
        self._closed = False

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        # close() alone would not wake the thread that accepts
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def __repr__(self) -> str:
        return f"TcpProxy({len(self._links)} open, {self.num_replies_lost} replies lost)"

    def point_at(self, server_url: str, *, cut: bool = True) -> None:
        """
        Lead new connections to another server, as a name that moves in a failover.

        Args:
            cut: End those that are open; else they stay where they are.
        """
        parts = urlsplit(server_url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._target = (parts.hostname, parts.port)
        if cut:
            self.cut()

    def cut(self) -> int:
        """End all connections, and say how many they were; new ones are taken."""
        with self._changed:
            links = list(self._links)
        for link in links:
            link.cut()
        return len(links)

    def hold(self, *directions: Direction) -> None:
        """Pass nothing on, on open and new connections: the network is away, and nobody says so."""
        with self._changed:
            self._held.update(directions or BOTH)

    def strand(self) -> None:
        """Pass nothing on on the connections that are open now; new ones work."""
        with self._changed:
            for link in self._links:
                link.stranded = True

    def delay(self, seconds: float, *directions: Direction) -> None:
        """Pass everything on later."""
        with self._changed:
            self._delay_s = dict.fromkeys(directions or BOTH, seconds)

    @property
    def all_lost(self) -> bool:
        """Whether every reply that was to be lost has been."""
        return self.num_replies_lost == self._num_to_lose

    def lose_reply(self, command: bytes, *, after: int = 0, silently: bool = False) -> None:
        """
        Let the server carry out the next command that holds these bytes, and its reply never arrive.

        Args:
            after: So many of these commands are answered before that one.
            silently: Leave the connection open and dead, instead of cutting it.
        """
        with self._changed:
            self._losing.append(_Loss(command, after, silently))
            self._num_to_lose += 1

    def heal(self) -> None:
        """End all faults; held bytes go on their way."""
        with self._changed:
            for link in self._links:
                link.loss, link.stranded = None, False
            self._held.clear()
            self._delay_s.clear()
            self._losing.clear()
            self._changed.notify_all()

    @contextmanager
    def holding(self, *directions: Direction) -> Iterator[None]:
        """Hold for as long as the block lasts."""
        self.hold(*directions)
        try:
            yield
        finally:
            self.heal()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target, timeout=5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            link = _Link(client, server)
            with self._changed:
                self._links.add(link)
            for direction in BOTH:
                threading.Thread(target=self._pump, args=(link, direction), name=direction, daemon=True).start()

    def _pump(self, link: _Link, direction: Direction) -> None:
        source, sink = (link.client, link.server) if direction == "to_server" else (link.server, link.client)
        with suppress(OSError):
            while data := source.recv(CHUNK):
                if not self._may_pass(link, direction, data):
                    break
                sink.sendall(data)
        # a client that hung up: what it had sent before has gone to the server, the answers go nowhere
        link.cut()
        with self._changed:
            self._links.discard(link)
            if link.loss:
                # nobody waited for that reply any more
                self._losing.append(link.loss)
                link.loss = None

    def _may_pass(self, link: _Link, direction: Direction, data: bytes) -> bool:
        """Wait for as long as these bytes are held or delayed; False where the connection ends with them."""
        time.sleep(self._delay_s.get(direction, 0.0))
        with self._changed:
            if direction == "to_client" and link.loss:
                self.num_replies_lost += 1
                loss, link.loss = link.loss, None
                if not loss.silently:
                    return False
                link.stranded = True
            self._changed.wait_for(lambda: self._closed or not self._is_held(link, direction), timeout=120)
            if direction == "to_server":
                self._mark(link, data)
        return not self._closed

    def _is_held(self, link: _Link, direction: Direction) -> bool:
        return direction in self._held or link.stranded

    def _mark(self, link: _Link, data: bytes) -> None:
        if link.loss:
            # what comes after goes down with it
            return
        for loss in self._losing:
            if loss.command not in data:
                continue
            if loss.after > 0:
                loss.after -= 1
                continue
            self._losing.remove(loss)
            link.loss = loss
            return


def lose_replies_of(proxy: TcpProxy, *scripts: str, after: int = 0, silently: bool = False) -> None:
    """A reply of each of these scripts is lost; the server is to know them by their hash already."""
    for name in scripts:
        proxy.lose_reply(load(name).sha.encode(), after=after, silently=silently)
