"""
The URL of the queue's server: one server, one behind Sentinel, or a cluster.

    redis://user:password@host:6379/0               one server; rediss:// with TLS, unix:///path
    redis+sentinel://host1:26379,host2:26379/name/0 the master that Sentinel calls by that name
    redis+cluster://host1:6379,host2:6379           a cluster, some nodes of it

rediss+sentinel:// and rediss+cluster:// speak TLS with all of them. What is special in a password is
percent-encoded.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from pagemill.errors import SettingsError

Address = tuple[str, int]
Kind = Literal["single", "sentinel", "cluster"]

# in a query: of TLS, names of files; with certificates that are asked for unless that is switched off
FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
TLS = (*FILES, "ssl_cert_reqs", "ssl_check_hostname")
GUIDES = {"sentinel_username": "username", "sentinel_password": "password"}
QUERY = ("client_name", *TLS, *GUIDES)

_PORTS = {"sentinel": 26379, "cluster": 6379, "single": 6379}
_WANT = (
    "want redis://host:port/0, redis+sentinel://host:port/name/0, redis+cluster://host:port, rediss://... or unix://"
)
_ESCAPE = "a special character of a password is written %xx"


@dataclass(frozen=True, slots=True)
class ServerUrl:
    """
    What a URL says.

    Args:
        hosts: The server, or those who know where it is: sentinels, nodes of the cluster.
        service: What Sentinel calls the master.
        options: What every connection to a server is made with, in redis-py's names.
        guide_options: As those, for connections to sentinels.
        path: Of a socket in the file system.
    """

    kind: Kind
    tls: bool
    hosts: tuple[Address, ...] = ()
    service: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    guide_options: dict[str, Any] = field(default_factory=dict)
    path: str = ""


def parse_server_url(url: str) -> ServerUrl:
    """
    Raises:
        SettingsError: it is no URL of a server; it is not shown, as it may hold a password.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        raise _bad("", "it is no URL") from None
    scheme, _, kind = parts.scheme.partition("+")
    if parts.scheme == "unix":
        query = _query(parts, tls=False, kind="single")
        db = _db(parts.scheme, query.pop("db", ""))
        return ServerUrl("single", False, options=_login(parts) | db | query, path=parts.path)
    if scheme not in ("redis", "rediss") or kind not in ("", "sentinel", "cluster"):
        raise _bad(parts.scheme, "it has no scheme of a server")
    if splits_password(url):
        raise _bad(parts.scheme, f"its path or query has an @, or it has a #; {_ESCAPE}")
    return _over_tcp(parts, "single" if kind == "" else "sentinel" if kind == "sentinel" else "cluster")


def splits_password(url: str) -> bool:
    """Whether a password's special character is not escaped: what follows is read as something else, and shown."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return True
    return "@" in parts.path + parts.query or bool(parts.fragment)


def _over_tcp(parts: SplitResult, kind: Kind) -> ServerUrl:
    tls = parts.scheme.startswith("rediss")
    query = _query(parts, tls=tls, kind=kind)
    path = [unquote(part) for part in parts.path.strip("/").split("/") if part]
    service = path.pop(0) if kind == "sentinel" and path else ""
    db = query.pop("db", "") or (path.pop(0) if path else "")
    if path:
        raise _bad(parts.scheme, "its path has too many parts")
    if kind == "sentinel" and not service:
        raise _bad(parts.scheme, "it does not say by which name Sentinel knows the master")
    if kind == "cluster" and db not in ("", "0"):
        raise _bad(parts.scheme, f"it asks for database {db}, and a cluster has 0 alone")
    hosts = tuple(_address(parts.scheme, text, _PORTS[kind]) for text in parts.netloc.rpartition("@")[2].split(","))
    if kind == "single" and len(hosts) > 1:
        raise _bad(parts.scheme, "it names several hosts: of Sentinel, or of a cluster?")
    secure = {name: value for name, value in query.items() if name in TLS} | ({"ssl": True} if tls else {})
    guides = {GUIDES[name]: query.pop(name) for name in GUIDES if name in query} | secure
    return ServerUrl(kind, tls, hosts, service, _login(parts) | _db(parts.scheme, db) | query, guides)


def _address(scheme: str, text: str, usual_port: int) -> Address:
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        host, port = text, ""
    if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise _bad(scheme, f"a port is no number from 1 to 65,535; {_ESCAPE}")
    return unquote(host.strip("[]")) or "localhost", int(port or usual_port)


def _login(parts: SplitResult) -> dict[str, Any]:
    login, at, _ = parts.netloc.rpartition("@")
    name, _, password = login.partition(":") if at else ("", "", "")
    given = {"username": unquote(name), "password": unquote(password)}
    return {what: value for what, value in given.items() if value}


def _db(scheme: str, text: str) -> dict[str, Any]:
    if text and not (text.isascii() and text.isdigit()):
        raise _bad(scheme, f"its database is {text!r}: want a number")
    return {"db": int(text)} if text else {}


def _query(parts: SplitResult, *, tls: bool, kind: Kind) -> dict[str, Any]:
    known = [name for name in QUERY if kind == "sentinel" or name not in GUIDES]
    query: dict[str, Any] = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name, value in query.items():
        if name not in (*known, "db"):
            # time-outs and formats are what the protocol needs
            raise _bad(parts.scheme, f"its query has {name!r}; it may have {', '.join(known)}")
        if name in TLS and not tls:
            raise _bad(parts.scheme, f"its query has {name!r}, and it is not rediss")
        if name in FILES and not Path(value).is_file():
            raise _bad(parts.scheme, f"{name} is {value!r}: there is no such file")
    if tls:
        asked = str(query.setdefault("ssl_cert_reqs", "required"))
        if asked not in ("required", "none"):
            raise _bad(parts.scheme, f"ssl_cert_reqs is {asked!r}: want required or none")
        checks = str(query.get("ssl_check_hostname", "true")).lower()
        query["ssl_check_hostname"] = asked == "required" and checks not in ("false", "0", "no")
    return query


def _bad(scheme: str, why: str) -> SettingsError:
    return SettingsError(f"the server's URL ({scheme or 'no scheme'}) cannot be used: {why}; {_WANT}")
