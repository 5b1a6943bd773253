"""Sequences whose next token hangs on the value of the last one, beside others and with steps in flight."""

import pytest

from engine.grammar import AnyText
from engine.request import Sequence, Step
from engine.scheduler import Scheduler
from tests.support.fake_runner import Turns
from tests.support.planning import add, make_scheduler, make_turns


def add_bound(scheduler: Scheduler, name: str, *, max_tokens: int = 40) -> Sequence:
    sequence = add(scheduler, name, 4, max_tokens=max_tokens)
    # before it runs, as an engine does
    sequence.grammar = AnyText(1000)
    return sequence


def names_in(step: Step | None) -> str:
    return "".join(sorted(chunk.sequence.request.request_id for chunk in step.chunks)) if step else ""


def take(turns: Turns, count: int) -> list[str]:
    """Who computed something in each of the next steps."""
    steps: list[str] = []
    while len(steps) < count:
        step = turns.take()
        turns.scheduler.check()
        steps += [names_in(step)] if step else []
    return steps


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_alone_they_go_in_every_step(depth: int) -> None:
    """
    The next step is planned when the one before has come back.
    """
    scheduler = make_scheduler()
    turns = make_turns(scheduler, depth=depth)
    for name in "abc":
        add_bound(scheduler, name)

    assert ["abc"] * 10 == take(turns, 10)


@pytest.mark.parametrize("depth", [2, 3])
def test_those_that_came_later_are_caught_up_with(depth: int) -> None:
    """
    Two groups that went by turns would each get half of the steps, for ever.
    """
    scheduler = make_scheduler()
    turns = make_turns(scheduler, depth=depth)
    for name in "ab":
        add_bound(scheduler, name)
    take(turns, 3)
    for name in "cd":
        add_bound(scheduler, name)

    steps = take(turns, 10)

    assert ["abcd"] * 7 == steps[3:]


def test_many_others_do_not_wait_for_them() -> None:
    """
    Who needs no value goes in every step, as long as these are more; the others join them when their value is there.
    """
    scheduler = make_scheduler()
    turns = make_turns(scheduler, depth=2)
    for name in "abcd":
        add(scheduler, name, 4, max_tokens=40)
    add_bound(scheduler, "x")

    steps = take(turns, 12)

    assert all(step.startswith("abcd") for step in steps)
    assert 6 == sum("x" in step for step in steps)


def test_they_are_forgotten_when_they_leave() -> None:
    """
    Nobody waits any more when the last of them has ended.
    """
    scheduler = make_scheduler()
    turns = make_turns(scheduler, depth=2)
    add(scheduler, "a", 4, max_tokens=40)
    bound = add_bound(scheduler, "x", max_tokens=3)
    while not bound.finished:
        turns.take()

    scheduled = [scheduler.schedule() for _ in range(3)]

    assert ["a"] * 3 == [names_in(step) for step in scheduled]
