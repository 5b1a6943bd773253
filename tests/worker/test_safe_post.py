"""A POST to a stranger's URL: what it connects to, and what it waits for."""

import datetime
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.support.receivers import receiver, status
from worker import safe_post
from worker.safe_post import AddressRefused, BadAnswer, is_public, post

HEADERS = {"Content-Type": "application/json"}


def resolver(monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> list[str]:
    """Have names resolved to these addresses, one list a look-up; returns the names that were looked up."""
    asked: list[str] = []

    def look_up(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in answers[len(asked) - 1]]

    monkeypatch.setattr(safe_post.socket, "getaddrinfo", look_up)
    return asked


def test_a_post_arrives_whole() -> None:
    """
    Path, query, host, headers and body are the caller's, and the status comes back.
    """
    with receiver(status(202)) as server:
        answer = post(server.url, b"{}", HEADERS, timeout_s=5, allow_private=True)

    [request] = server.received
    assert (202, "POST /hook?x=1 HTTP/1.1", b"{}") == (answer, request.line, request.body)
    assert f"127.0.0.1:{server.port}" == request.headers["host"]
    assert "application/json" == request.headers["content-type"]


@pytest.mark.parametrize(
    "address",
    [
        *(
            "127.0.0.1",
            "127.8.8.8",
            "0.0.0.0",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "100.64.0.1",
            "255.255.255.255",
        ),
        *("169.254.169.254", "192.0.0.192", "100.100.100.200", "168.63.129.16", "fd00:ec2::254"),
        *("224.0.0.1", "ff0e::1", "240.0.0.1", "198.18.0.1", "192.0.2.1"),
        *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "2001:db8::1", "2002:7f00:1::", "::127.0.0.1"),
        *("::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::7f00:1", "64:ff9b:1::1"),
    ],
)
def test_addresses_that_are_not_of_the_internet(address: str) -> None:
    """
    Private, loopback, link-local, multicast, reserved and metadata addresses, also inside of IPv6.
    """
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "2001:4860:4860::8888", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_addresses_of_the_internet(address: str) -> None:
    """
    Public addresses, also where a network reaches IPv4 through IPv6.
    """
    assert is_public(address)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "127.1"])
def test_a_private_address_is_refused_however_it_is_written(host: str) -> None:
    """
    What counts is the address that the name stands for; nothing is sent.
    """
    with receiver(status(200)) as server:
        with pytest.raises(AddressRefused):
            post(f"http://{host}:{server.port}/", b"", {}, timeout_s=5)

        assert [] == server.received


def test_the_address_that_was_checked_is_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    DNS rebinding: a name is looked up once, so that it cannot be another address a moment later.
    """
    asked = resolver(monkeypatch, ["127.0.0.1"])
    with receiver(status(200)) as server:
        assert 200 == post(f"http://rebinding.example:{server.port}/", b"", {}, timeout_s=5, allow_private=True)

    assert ["rebinding.example"] == asked
    assert ["127.0.0.1"] == [request.address for request in server.received]


def test_of_several_addresses_only_the_public_ones_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A name with a private address beside a public one does not lead to the private one.
    """
    resolver(monkeypatch, ["127.0.0.2", "127.0.0.3"])
    monkeypatch.setattr(safe_post, "is_public", lambda address: address == "127.0.0.3")
    with receiver(status(200)) as server:
        post(f"http://both.example:{server.port}/", b"", {}, timeout_s=5)

    assert ["127.0.0.3"] == [request.address for request in server.received]


def test_a_dead_address_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Where the first address refuses the connection, the next one is tried.
    """
    resolver(monkeypatch, ["127.0.0.1", "127.0.0.2"])
    with receiver(status(200)) as server:
        true_connect = socket.socket.connect

        def connect(self: socket.socket, address: Any) -> None:
            if address[0] == "127.0.0.1":
                raise ConnectionRefusedError
            true_connect(self, address)

        monkeypatch.setattr(safe_post.socket.socket, "connect", connect)
        assert 200 == post(f"http://two.example:{server.port}/", b"", {}, timeout_s=5, allow_private=True)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://127.0.0.1/", "gopher://127.0.0.1/", "//127.0.0.1/"])
def test_only_the_webs_schemes_are_taken(url: str) -> None:
    """
    Whatever lies in the queue: nothing but http and https is ever opened.
    """
    with pytest.raises(ValueError, match="http"):
        post(url, b"", {}, timeout_s=5, allow_private=True)


def test_a_redirect_is_not_followed() -> None:
    """
    A receiver cannot send us on to an address that was not checked.
    """
    with receiver(status(200)) as inside, receiver(status(302, f"Location: {inside.url}")) as server:
        assert 302 == post(server.url, b"", {}, timeout_s=5, allow_private=True)

        assert [] == inside.received


def drip(connection: socket.socket) -> None:
    for byte in status(200) * 100:
        connection.sendall(bytes([byte]))
        time.sleep(0.05)


def hang(connection: socket.socket) -> None:
    connection.recv(1)


def flood(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    while True:
        connection.sendall(b"X: " + b"x" * 4000 + b"\r\n")


@pytest.mark.parametrize("answer", [drip, hang])
def test_a_slow_answer_is_given_up(answer: Callable[[socket.socket], None]) -> None:
    """
    The time is for all of it: a byte now and then does not make it longer.
    """
    started = time.monotonic()
    with receiver(answer) as server, pytest.raises(TimeoutError):
        post(server.url, b"", {}, timeout_s=0.3, allow_private=True)

    assert time.monotonic() - started < 2


@pytest.mark.parametrize("answer", [flood, b"", b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1 2000 OK\r\n\r\n"])
def test_an_answer_that_is_none(answer: Any) -> None:
    """
    No end of headers, nothing, or another protocol: an error after a bounded number of bytes.
    """
    with receiver(answer) as server, pytest.raises(BadAnswer):
        post(server.url, b"", {}, timeout_s=5, allow_private=True)


def test_a_long_body_is_not_waited_for() -> None:
    """
    The status is all that is asked: a body without end changes nothing.
    """

    def endless(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            connection.sendall(b"x" * 4096)

    with receiver(endless) as server:
        assert 200 == post(server.url, b"", {}, timeout_s=5, allow_private=True)


def test_interim_answers_are_passed_over() -> None:
    """
    What counts is the final status.
    """
    with receiver(b"HTTP/1.1 100 Continue\r\n\r\n" + b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\n" + status(204)) as server:
        assert 204 == post(server.url, b"", {}, timeout_s=5, allow_private=True)


def certificate(folder: Path, name: str) -> Path:
    """A self-signed certificate for a host name, and its key, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = folder / f"{name}.pem"
    path.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return path


def test_the_certificate_is_checked_for_the_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """
    The connection goes to the checked address, and the certificate must be the name's.
    """
    path = certificate(tmp_path, "hooks.example")
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(path)
    trusting = ssl.create_default_context(cafile=str(path))
    resolver(monkeypatch, ["127.0.0.1"], ["127.0.0.1"], ["127.0.0.1"])

    with receiver(status(200), wrap=lambda one: server_side.wrap_socket(one, server_side=True)) as server:

        def send(host: str, context: ssl.SSLContext | None) -> int:
            url = f"https://{host}:{server.port}/"
            return post(url, b"{}", {}, timeout_s=5, allow_private=True, context=context)

        assert 200 == send("hooks.example", trusting)
        with pytest.raises(ssl.SSLCertVerificationError):
            send("other.example", trusting)
        with pytest.raises(ssl.SSLCertVerificationError):
            send("hooks.example", None)

    assert 1 == len(server.received)
