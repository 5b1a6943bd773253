"""`pagemill tenants` and `pagemill lanes`: the operator's view of shares and limits."""

import json
from collections.abc import Callable

import pytest

from pagemill.client import Client
from tests.support.servers import a_job

Run = Callable[..., tuple[int, str, str]]


pytestmark = pytest.mark.usefixtures("settings")


def test_a_tenants_weight_and_limit_are_set_and_shown(run: Run, client: Client) -> None:
    """
    What was set is in the list, as text and as JSON, beside what waits.
    """
    assert (0, "", "") == run("tenants", "set", "acme", "--weight", "2.5", "--max-queued-tokens", "5000")
    client.submit(a_job("abc", max_tokens=9, tenant="acme", lane="bulk"))

    head, line = run("tenants", "list")[1].splitlines()
    [shown] = [json.loads(one) for one in run("tenants", "list", "--json")[1].splitlines()]

    assert [
        "tenant",
        "weight",
        "limit",
        "interactive",
        "standard",
        "bulk",
        "tokens",
        "used",
        "GPU",
        "s",
    ] == head.split()
    assert ["acme", "2.5", "5,000", "0", "0", "10", "0", "0.0"] == line.split()
    assert ("acme", 2.5, 5000, 10) == (
        *(shown["tenant"], shown["weight"], shown["max_queued_tokens"]),
        shown["queued_tokens"]["bulk"],
    )


def test_a_lanes_limit_is_set_and_shown(run: Run, client: Client) -> None:
    """
    Lanes are listed with what waits in them and how much may.
    """
    assert (0, "", "") == run("lanes", "set", "bulk", "--max-queued-tokens", "1000000")
    client.submit(a_job("abc", max_tokens=9, lane="bulk"))

    lines = run("lanes", "list")[1].splitlines()
    as_json = [json.loads(line) for line in run("lanes", "list", "--json")[1].splitlines()]

    assert ["interactive", "0", "0", "none"] == lines[1].split()
    assert ["bulk", "1", "10", "1,000,000"] == lines[3].split()
    assert {"lane": "bulk", "jobs": 1, "tokens": 10, "max_queued_tokens": 1_000_000} == as_json[2]


@pytest.mark.usefixtures("client")
@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("tenants", "set", "acme"), 2, "--weight"),
        (("tenants", "set", "acme", "--weight", "0"), 1, "the weight is 0: want 0.001 to 1000"),
        (("lanes", "set", "express", "--max-queued-tokens", "5"), 1, "want interactive, standard, bulk"),
    ],
)
def test_what_is_wrong_is_one_line(run: Run, words: tuple[str, ...], code: int, message: str) -> None:
    """
    A value out of range changes nothing and says what to give.
    """
    ended, out, error = run(*words)

    assert (code, "") == (ended, out)
    assert message in error


def test_a_busy_queue_says_why_and_for_how_long(run: Run, client: Client) -> None:
    """
    Who is refused by a limit hears whose it is, and when to try again.
    """
    client.set_tenant("default", max_queued_tokens=1)
    client.submit(a_job())

    code, _, error = run("submit", "one more")

    assert 1 == code
    assert "too many tokens of tenant default wait; try again in 60.0 s" in error
