"""URLs of servers: what each form means, and what is refused."""

from pathlib import Path

import pytest

from pagemill.errors import SettingsError
from pagemill.server_url import ServerUrl, parse_server_url


def test_one_server() -> None:
    """
    Host, port, login and database; what is special in a password is percent-encoded.
    """
    url = parse_server_url("redis://app:p%40ss%2Fword@queue.example:6380/3?client_name=nightly")

    options = {"username": "app", "password": "p@ss/word", "db": 3, "client_name": "nightly"}
    assert ServerUrl("single", False, (("queue.example", 6380),), options=options) == url


def test_what_is_left_out() -> None:
    """
    The usual ports, database 0, no login.
    """
    assert (("localhost", 6379),) == parse_server_url("redis://").hosts
    assert (("a", 26379), ("b", 26379)) == parse_server_url("redis+sentinel://a,b/main").hosts
    assert (("a", 6379), ("::1", 7000)) == parse_server_url("redis+cluster://a,[::1]:7000").hosts
    assert {} == parse_server_url("redis://host").options


def test_a_password_alone() -> None:
    """
    As of servers that know no users.
    """
    assert {"password": "secret"} == parse_server_url("redis://:secret@host").options


def test_sentinels_may_have_a_login_of_their_own() -> None:
    """
    The login before the hosts is the master's.
    """
    url = parse_server_url("redis+sentinel://app:one@a:1,b:2/main/4?sentinel_username=guard&sentinel_password=two")

    assert ("sentinel", "main", (("a", 1), ("b", 2))) == (url.kind, url.service, url.hosts)
    assert {"username": "app", "password": "one", "db": 4} == url.options
    assert {"username": "guard", "password": "two"} == url.guide_options


def test_tls(tmp_path: Path) -> None:
    """
    Certificates are asked for and names are checked, unless the query says otherwise.
    """
    authority = tmp_path / "ca.pem"
    authority.touch()

    checked = parse_server_url(f"rediss://host?ssl_ca_certs={authority}")
    free = parse_server_url("rediss+cluster://host?ssl_cert_reqs=none")

    assert {"ssl_ca_certs": str(authority), "ssl_cert_reqs": "required", "ssl_check_hostname": True} == checked.options
    assert (True, False) == (free.tls, free.options["ssl_check_hostname"])


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://user:hunter2@host", "no scheme of a server"),
        ("redis+magic://user:hunter2@host", "no scheme of a server"),
        ("localhost:6379", "no scheme of a server"),
        ("redis://user:hunter2@host:port/0", "a port is no number"),
        *[
            (f"redis://user:{start}{special}hunter2@host:1/0", "special character of a password")
            for start in ("", "hunter2", "12")
            for special in "/?#"
        ],
        ("redis://user:pass@word/hunter2@host", "special character of a password"),
        ("redis://user:hunter2@a,b/0", "several hosts"),
        ("redis://user:hunter2@host/main", r"\(redis\) .*want a number"),
        ("redis+sentinel://user:hunter2@a,b", "by which name"),
        ("redis+sentinel://user:hunter2@a,b/main/0/1", "too many parts"),
        ("redis+cluster://user:hunter2@a/3", "a cluster has 0 alone"),
        ("redis://user:hunter2@host?decode_responses=true", "'decode_responses'; it may have client_name"),
        ("redis://user:hunter2@host?sentinel_password=hunter2", "'sentinel_password'"),
        ("redis://user:hunter2@host?ssl_cert_reqs=none", "not rediss"),
        ("rediss://user:hunter2@host?ssl_cert_reqs=maybe", "want required or none"),
        ("rediss://user:hunter2@host?ssl_ca_certs=/nowhere/ca.pem", "no such file"),
    ],
)
def test_what_is_refused(url: str, why: str) -> None:
    """
    The message says what is wrong and shows no password.
    """
    with pytest.raises(SettingsError, match=why) as caught:
        parse_server_url(url)

    assert "hunter2" not in str(caught.value)
