"""
One HTTP POST to a URL that a stranger chose, bounded in every way.

The standard clients look the host up themselves, follow redirects and read what comes for as long as
it comes. Here the name is looked up once, the address that was found is checked and is the one that
is connected to, and nothing of the answer is used but its status. Proxies of the environment are
not asked: they would connect for us.
"""

import contextlib
import ipaddress
import re
import socket
import ssl
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import SplitResult, urlsplit

from pagemill.batches import http_url

MAX_ANSWER_BYTES = 16 * 1024
# after the status is known: a receiver that still writes sees no broken pipe
DRAIN_S = 0.5

# global by the registries, and yet not the internet: IPv4 inside of IPv6, special uses, a cloud's own service
_REFUSED = tuple(
    map(
        ipaddress.ip_network,
        ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32", "2001::/23", "2002::/16", "2001:db8::/32"),
    )
)
_GLOBAL_IPV6 = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})[ \r]")


class AddressRefused(Exception):
    """Raised when a host has no address that may be connected to."""


class BadAnswer(Exception):
    """Raised when what comes back is not HTTP, or too long."""


def post(
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    *,
    timeout_s: float,
    allow_private: bool = False,
    context: ssl.SSLContext | None = None,
) -> int:
    """
    Send the body and return the answer's status; a redirect is a status like others.

    Args:
        timeout_s: For all of it, once the name is looked up.
        allow_private: Connect also to addresses that are not public.

    Raises:
        ValueError: the URL is not one of a web server.
        AddressRefused: the host has private addresses alone.
        BadAnswer, OSError: there is no answer.
    """
    parts = urlsplit(http_url(url))
    addresses = _resolve(parts, allow_private=allow_private)
    deadline = time.monotonic() + timeout_s
    with contextlib.closing(_connect(addresses, deadline)) as plain:
        connection = plain
        if parts.scheme == "https":
            secure = context or ssl.create_default_context()
            plain.settimeout(_left_s(deadline))
            connection = secure.wrap_socket(plain, server_hostname=parts.hostname)
        with contextlib.closing(connection):
            connection.settimeout(_left_s(deadline))
            connection.sendall(_request(parts, body, headers))
            return _read_status(connection, deadline)


def is_public(address: str) -> bool:
    """Whether it is an address of the internet, and of nothing nearer."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return is_public(str(ip.ipv4_mapped))
        if ip in _NAT64:
            return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
        if ip not in _GLOBAL_IPV6:
            return False
    refused = any(ip in network for network in _REFUSED if network.version == ip.version)
    return ip.is_global and not ip.is_multicast and not refused


def _resolve(parts: SplitResult, *, allow_private: bool) -> list[Any]:
    assert parts.hostname is not None
    port = parts.port or (443 if parts.scheme == "https" else 80)
    found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    allowed = [(family, address) for family, _, _, _, address in found if allow_private or is_public(str(address[0]))]
    if not allowed:
        raise AddressRefused(f"{parts.hostname} is {found[0][4][0]}, which is no public address")
    return allowed


def _connect(addresses: list[Any], deadline: float) -> socket.socket:
    failure: OSError = TimeoutError("no time was left to connect")
    for number, (family, address) in enumerate(addresses):
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            # a dead address leaves time for those behind it
            connection.settimeout(_left_s(deadline) / (len(addresses) - number))
            connection.connect(address)
        except OSError as error:
            connection.close()
            failure = error
        else:
            return connection
    raise failure


def _request(parts: SplitResult, body: bytes, headers: Mapping[str, str]) -> bytes:
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    lines = [
        f"POST {target} HTTP/1.1",
        f"Host: {parts.netloc}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    lines += [f"Content-Length: {len(body)}", "Connection: close"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def _read_status(connection: socket.socket, deadline: float) -> int:
    answer = b""
    while True:
        head, end, rest = answer.partition(b"\r\n\r\n")
        match = _STATUS.match(head + end)
        if end and match is None:
            raise BadAnswer("the answer is not HTTP/1.1")
        if end and match is not None:
            status = int(match.group(1))
            if status >= 200:
                _drain(connection, deadline)
                return status
            # an interim answer: the real one follows
            answer = rest
            continue
        if len(answer) > MAX_ANSWER_BYTES:
            raise BadAnswer(f"the answer's head has more than {MAX_ANSWER_BYTES:,} bytes")
        connection.settimeout(_left_s(deadline))
        more = connection.recv(4096)
        if not more:
            raise BadAnswer("the connection was closed without an answer")
        answer += more


def _drain(connection: socket.socket, deadline: float) -> None:
    end = min(deadline, time.monotonic() + DRAIN_S)
    num_bytes = 0
    with contextlib.suppress(OSError):
        while num_bytes < MAX_ANSWER_BYTES:
            connection.settimeout(_left_s(end))
            more = connection.recv(4096)
            if not more:
                return
            num_bytes += len(more)


def _left_s(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer in time")
    return left
