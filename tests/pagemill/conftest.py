"""The protocol's tests run against the oldest and the newest server; command lines run here."""

import io
import sys
from collections.abc import Callable

import pytest

from pagemill.cli import main
from tests.support.suspects import Supervisor

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(params=["newest", "oldest"])
def server_url(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(f"{request.param}_server")
    return url


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line here: exit code, standard output, standard error."""

    def run_here(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pagemill", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run_here


@pytest.fixture
def settings(server_url: str, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment leads command lines to the test's queue."""
    monkeypatch.setenv("PAGEMILL_REDIS_URL", server_url)
    monkeypatch.setenv("PAGEMILL_QUEUE", queue)


@pytest.fixture
def supervisor(server_url: str, queue: str) -> Supervisor:
    """Whoever sees the test's workers die."""
    return Supervisor(server_url, queue)
