"""Knowing whether the server was in reach."""

from contextlib import suppress

import pytest

from pagemill.contact import Contact
from pagemill.errors import QueueUnavailable, ServerAway
from tests.support.clock import Clock


def test_a_server_that_answers_is_in_reach() -> None:
    """
    Calls that go well, and refusals of one command, change nothing.
    """
    contact = Contact(lease_s=2.0, clock=Clock())
    with contact.watched():
        pass
    with pytest.raises(QueueUnavailable), contact.watched():
        raise QueueUnavailable("that command is not known")

    assert contact.steady


def test_after_an_outage_a_whole_lease_counts() -> None:
    """
    The lease begins anew with each call that fails.
    """
    clock = Clock()
    contact = Contact(lease_s=2.0, clock=clock)
    seen = []
    for _ in range(2):
        with pytest.raises(ServerAway), contact.watched():
            raise ServerAway("no route")
        clock.now += 1.9
        seen.append(contact.steady)
    clock.now += 0.2

    assert [False, False, True] == [*seen, contact.steady]


def test_a_call_that_took_most_of_a_lease_is_an_outage() -> None:
    """
    A server that was frozen answers in the end, and no heartbeat has reached it meanwhile.
    """
    clock = Clock()
    contact = Contact(lease_s=2.0, clock=clock)
    with contact.watched():
        clock.now += 1.1

    assert not contact.steady


def test_a_call_that_is_still_waiting_is_an_outage() -> None:
    """
    A frozen server may wake for another call first, and that one must know.
    """
    clock = Clock()
    contact = Contact(lease_s=2.0, clock=clock)
    with contact.watched():
        clock.now += 1.1
        with contact.watched():
            pass

        assert not contact.steady


def test_each_call_is_told_with_its_time_and_its_failure() -> None:
    """
    Whatever the failure is; calls are told by name.
    """
    clock = Clock()
    told: list[tuple[str, float, bool]] = []
    contact = Contact(lease_s=2.0, clock=clock, on_call=lambda *call: told.append(call))
    with contact.watched("pull"):
        clock.now += 0.5
    for error in (ServerAway("away"), QueueUnavailable("refused")):
        with suppress(QueueUnavailable), contact.watched("finish"):
            clock.now += 0.25
            raise error

    assert [("pull", 0.5, False), ("finish", 0.25, True), ("finish", 0.25, True)] == told
