"""An authority of a test's own, certificates that it signs, and a server that takes them."""

import datetime
import ipaddress
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.support import server_box


@dataclass(frozen=True, slots=True)
class Certificates:
    """Files of an authority, of a server at 127.0.0.1 and of a client."""

    folder: Path

    @property
    def of_server(self) -> tuple[str, ...]:
        """Options of a server that asks its clients for certificates."""
        files = {"ca-cert": "ca.pem", "cert": "server.pem", "key": "server.key"}
        return tuple(word for name, file in files.items() for word in (f"--tls-{name}-file", str(self.folder / file)))

    @property
    def of_client(self) -> dict[str, Any]:
        """What redis-py connects with."""
        return {"ssl": True} | dict(self._files)

    @property
    def query(self) -> str:
        """What a URL connects with."""
        return "&".join(f"{name}={path}" for name, path in self._files)

    @property
    def _files(self) -> list[tuple[str, str]]:
        files = {"ssl_ca_certs": "ca.pem", "ssl_certfile": "client.pem", "ssl_keyfile": "client.key"}
        return [(name, str(self.folder / file)) for name, file in files.items()]


def make_certificates(folder: Path) -> Certificates:
    folder.mkdir(parents=True, exist_ok=True)
    authority = _Signer("Pagemill test authority")
    (folder / "ca.pem").write_bytes(authority.certificate.public_bytes(serialization.Encoding.PEM))
    for name in ("server", "client"):
        signed = _Signer(name, by=authority)
        (folder / f"{name}.pem").write_bytes(signed.certificate.public_bytes(serialization.Encoding.PEM))
        form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        (folder / f"{name}.key").write_bytes(signed.key.private_bytes(*form))
    return Certificates(folder)


class _Signer:
    """A key, and a certificate of it that is its own or another's."""

    def __init__(self, name: str, *, by: "_Signer | None" = None) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        now = datetime.datetime.now(datetime.UTC)
        places = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
        self.certificate = (
            x509.CertificateBuilder()
            .subject_name(self.name)
            .issuer_name(by.name if by else self.name)
            .public_key(self.key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=2))
            .add_extension(x509.BasicConstraints(ca=by is None, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(places), critical=False)
            .sign(by.key if by else self.key, hashes.SHA256())
        )


@cache
def find_tls_server() -> Path | None:
    """A server that was built with TLS, if there is one here."""
    for name in server_box.NAMES:
        program = server_box.find(name)
        if program is not None and _speaks_tls(program):
            return program
    return None


def _speaks_tls(program: Path) -> bool:
    # it ends at once: there is no certificate
    command = [str(program), "--port", "0", "--tls-port", "1"]
    told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    return "Failed to configure TLS" in told.stdout
