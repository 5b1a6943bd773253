"""When a supervisor starts its worker again, with workers and a clock that a test pretends."""

import signal
import subprocess
import sys
from collections.abc import Sequence
from textwrap import dedent
from typing import Any

import pytest
from redis import Redis

from pagemill.errors import QueueUnavailable
from pagemill.obituary import DeathReport
from tests.support.services import CHECKOUT
from worker import exits, obituaries
from worker.lifeline import DRAINED, HURRY_SIGNAL, SERVING
from worker.obituaries import Obituaries
from worker.supervisor import GOOD_LIFE_S, REMAINS_POLL_S, REMAINS_S, REPORT_S, Supervisor
from worker.verdicts import End, judge

KILLED = (-signal.SIGKILL, [SERVING])
CRASHED = (-signal.SIGSEGV, [SERVING])
AWAY: tuple[int, list[str]] = (exits.AWAY, [])
GOOD = (0, [SERVING, DRAINED])


class Scene:
    """
    A supervisor whose workers end as they are told, one after the other, and a clock that waits move on.

    Args:
        ends: Of each worker its exit code and its notes.
        lives_s: Of each worker how long it lives; 1 s where nothing is said.
        signals: What reaches the supervisor, by the number of the wait that hears it.
    """

    def __init__(
        self,
        ends: Sequence[tuple[int, list[str]]],
        *,
        lives_s: Sequence[float] = (),
        signals: dict[int, int] | None = None,
    ) -> None:
        self.now = 0.0
        self.starts: list[float] = []
        self.sent: list[int] = []
        self.reports: list[tuple[str, str]] = []
        self.told_at: list[float] = []
        self.blames = True
        self.away_until = 0.0
        # how long a worker's engine outlives it
        self.remains_s = 0.0
        self._ends = list(ends)
        self._lives_s = [*lives_s, *[1.0] * len(ends)]
        self._signals = signals or {}
        self._num_waits = 0
        self._dies_at: float | None = None

    def run(self) -> int:
        supervisor = Supervisor(
            lambda: Worker(self),  # type: ignore[arg-type, return-value]
            Obituaries(Redis(), "q", clock=lambda: self.now),
            self,  # type: ignore[arg-type]
            restart_s=1.0,
            max_restart_s=60.0,
            clock=lambda: self.now,
        )
        return supervisor.run()

    def begin(self) -> None:
        self.starts.append(self.now)
        self._dies_at = self.now + self._lives_s[len(self.starts) - 1]

    def end(self) -> tuple[int, End] | None:
        if self._dies_at is None or self.now < self._dies_at:
            return None
        self._dies_at = None
        code, notes = self._ends[len(self.starts) - 1]
        return code, judge(code, notes, oom_killed=False)

    def wait(self, timeout_s: float | None) -> list[int]:
        """As `Wakeups.wait`: the death of a worker ends the wait too."""
        self._num_waits += 1
        if number := self._signals.get(self._num_waits):
            return [number]
        ends = [self.now + timeout_s] if timeout_s is not None else []
        self.now = min([*ends, self._dies_at] if self._dies_at is not None else ends)
        return [signal.SIGCHLD] if self.now == self._dies_at else []

    def report(self, _redis: Any, _queue: str, worker_id: str, *, cause: str, why: str) -> DeathReport:
        assert why
        if self.now < self.away_until:
            raise QueueUnavailable("the server is away")
        self.told_at.append(self.now)
        self.reports.append((worker_id, cause))
        return DeathReport(suspects=2) if cause == "crash" and self.blames else DeathReport(returned=2)

    @property
    def pauses(self) -> list[float]:
        """Between each worker's death and the next start."""
        deaths = [start + life for start, life in zip(self.starts, self._lives_s, strict=False)]
        return [start - death for death, start in zip(deaths, self.starts[1:], strict=False)]


class Worker:
    """One of the scene's workers."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        scene.begin()
        self.worker_id = f"w{len(scene.starts)}"

    def send(self, number: int) -> None:
        self.scene.sent.append(number)

    def end(self) -> tuple[int, End] | None:
        self.died_at = self.scene.now
        return self.scene.end()

    @property
    def all_gone(self) -> bool:
        return self.scene.now >= self.died_at + self.scene.remains_s

    def close(self) -> None:
        pass


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(scene: Scene) -> int:
        monkeypatch.setattr(obituaries, "report_death", scene.report)
        return scene.run()

    return run


def test_pauses_double_up_to_a_minute(play: Any) -> None:
    """
    A worker that dies again and again is started ever more rarely, and each death is reported.
    """
    scene = Scene([KILLED] * 9 + [GOOD])

    assert 0 == play(scene)
    assert [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0] == scene.pauses
    assert [(f"w{number}", "lapse") for number in range(1, 10)] == scene.reports


def test_a_good_life_is_a_new_beginning(play: Any) -> None:
    """
    Whoever has lived for five minutes is started again after the first pause.
    """
    scene = Scene([KILLED] * 4 + [GOOD], lives_s=[1.0, 1.0, GOOD_LIFE_S, 1.0])

    assert 0 == play(scene)
    assert [1.0, 2.0, 1.0, 2.0] == scene.pauses


@pytest.mark.parametrize(("remains_s", "pause_s"), [(0.5, 1.0), (5.0, 5.0), (600.0, 1.0 + REMAINS_S)])
def test_what_is_left_of_a_worker_is_waited_for(play: Any, remains_s: float, pause_s: float) -> None:
    """
    Its engine may keep the device for a while; not longer than a process can take that was killed.
    """
    scene = Scene([KILLED, GOOD])
    scene.remains_s = remains_s

    assert 0 == play(scene)
    assert scene.pauses == [pytest.approx(pause_s, abs=2 * REMAINS_POLL_S)]
    assert [1.0] == scene.told_at


def test_suspects_are_found_out_without_delay(play: Any) -> None:
    """
    A death that made jobs suspects is not followed by ever longer pauses; one that says nothing is.
    """
    scene = Scene([CRASHED] * 5 + [GOOD])
    assert 0 == play(scene)
    assert [1.0] * 5 == scene.pauses

    scene = Scene([CRASHED] * 5 + [GOOD])
    scene.blames = False
    assert 0 == play(scene)
    assert [1.0, 2.0, 4.0, 8.0, 16.0] == scene.pauses


@pytest.mark.parametrize(("code", "ends_with"), [(exits.STARTUP, 1), (exits.SETTINGS, 2), (exits.AWAY, 1)])
def test_what_cannot_start_at_first_is_not_tried_again(play: Any, code: int, ends_with: int) -> None:
    """
    Whoever started it reads the message, and the queue hears nothing.
    """
    scene = Scene([(code, [])])

    assert ends_with == play(scene)
    assert [] == scene.reports


@pytest.mark.parametrize("code", [exits.AWAY, exits.STARTUP])
def test_what_cannot_start_later_is_tried_until_it_can(play: Any, code: int) -> None:
    """
    A worker that came up once may lack the server for a while, or memory that its last engine still holds.
    """
    scene = Scene([KILLED, (code, []), (code, []), GOOD])

    assert 0 == play(scene)
    assert [("w1", "lapse")] == scene.reports
    assert [1.0, 2.0, 4.0] == scene.pauses


def test_a_death_that_cannot_be_told_is_told_later(play: Any) -> None:
    """
    The next start waits five seconds for the server, no more; the report goes on being tried beside it.
    """
    scene = Scene([CRASHED, GOOD], lives_s=[1.0, 100.0])
    scene.away_until = 40.0

    assert 0 == play(scene)
    assert [REPORT_S + 1.0] == scene.pauses
    assert [("w1", "crash")] == scene.reports
    assert 40.0 <= scene.told_at[0] < 41.0


def test_signals_are_passed_on_once_and_then_hurry(play: Any) -> None:
    """
    The first asks the worker to drain, and each further one to hurry.
    """
    scene = Scene([GOOD], lives_s=[9.0], signals={1: signal.SIGINT, 2: signal.SIGTERM, 3: signal.SIGINT})

    assert 0 == play(scene)
    assert [signal.SIGTERM, HURRY_SIGNAL, HURRY_SIGNAL] == scene.sent


def test_no_worker_is_started_after_a_signal(play: Any) -> None:
    """
    Told to stop in a pause, or when the worker dies instead of draining, the supervisor ends.
    """
    paused = Scene([KILLED, GOOD], signals={2: signal.SIGTERM})
    assert 0 == play(paused)
    assert 1 == len(paused.starts)

    died = Scene([KILLED, GOOD], signals={1: signal.SIGTERM})
    assert exits.FAILED == play(died)
    assert (1, [("w1", "lapse")]) == (len(died.starts), died.reports)


def test_a_worker_that_is_stopped_while_it_starts_has_drained(play: Any) -> None:
    """
    It held nothing yet, and may be ended by the signal itself.
    """
    scene = Scene([(-signal.SIGTERM, [])], signals={1: signal.SIGTERM})

    assert 0 == play(scene)
    assert [] == scene.reports


def test_a_late_signal_does_not_kill_a_supervisor_on_its_way_out() -> None:
    """
    The interpreter gives signals back to the system before it ends: those that stop are ignored by then.
    """
    program = dedent("""
        import os, signal
        from worker.supervisor import Wakeups

        class Late:
            def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
                kill(pid, number)

        with Wakeups():
            pass
        late = Late()
    """)

    ended = subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, timeout=60, check=False)

    assert 0 == ended.returncode
