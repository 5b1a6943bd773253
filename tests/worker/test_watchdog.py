"""The watchdog, with steps that a test pretends; a real hung process is among the tests of the supervisor."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.support.servers import wait_for
from worker import exits
from worker.watchdog import Watchdog


class Engine:
    """Says since when it has been at its step."""

    def __init__(self) -> None:
        self.since: float | None = None


@contextmanager
def watched(engine: Engine, leave: Callable[[int], object]) -> Iterator[Watchdog]:
    dog = Watchdog(lambda: engine.since, timeout_s=0.1, leave=leave)
    dog.start()
    yield dog
    dog.stop()


def test_a_step_that_does_not_end_ends_the_process(capfd: object) -> None:
    """
    All stacks are shown first.
    """
    engine, codes = Engine(), list[int]()
    with watched(engine, codes.append):
        engine.since = 1.0
        wait_for(lambda: codes)

    assert [exits.HUNG] == codes
    assert "most recent call first" in capfd.readouterr().err  # type: ignore[attr-defined]


def test_steps_that_end_are_left_alone() -> None:
    """
    However long the engine is busy: each step counts for itself, and an idle engine is not watched.
    """
    codes, looks = list[int](), list[float]()

    def since() -> float | None:
        looks.append(len(looks))
        return None if len(looks) % 7 == 0 else len(looks) // 3

    dog = Watchdog(since, timeout_s=0.1, leave=codes.append)
    dog.start()
    wait_for(lambda: len(looks) > 40)
    dog.stop()

    assert [] == codes
