"""What is made of the end of a process: pure, and from files as the kernel writes them."""

import signal
from pathlib import Path

import pytest

from worker import exits
from worker.lifeline import DRAINED, ENGINE_ENDED, FAILED, SERVING
from worker.verdicts import judge, num_oom_kills


@pytest.mark.parametrize("number", ["SIGKILL", "SIGTERM", "SIGINT", "SIGHUP"])
def test_signals_from_outside_are_lapses(number: str) -> None:
    """
    Whoever sends these is no job: what the worker held goes back as it is.
    """
    end = judge(-signal.Signals[number], [SERVING], oom_killed=False)

    assert ("lapse", True) == (end.kind, end.served)
    assert number in end.why


@pytest.mark.parametrize("number", ["SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE"])
def test_signals_of_a_fault_are_crashes(number: str) -> None:
    """
    These come of what the process itself did.
    """
    end = judge(-signal.Signals[number], [SERVING], oom_killed=False)

    assert "crash" == end.kind
    assert number in end.why


def test_a_kill_for_memory_is_a_crash() -> None:
    """
    SIGKILL is from outside, unless the system has just killed one of ours for its memory.
    """
    assert "crash" == judge(-signal.SIGKILL, [SERVING], oom_killed=True).kind
    assert "lapse" == judge(-signal.SIGTERM, [SERVING], oom_killed=True).kind


@pytest.mark.parametrize("code", [0, 1, 2, 3, exits.FAILED, exits.HUNG, exits.DEVICE_LOST, exits.AWAY, 139])
def test_whoever_served_and_ends_by_itself_has_crashed(code: int) -> None:
    """
    Any library may exit with any code: only a worker that says that it has drained has drained.
    """
    assert "crash" == judge(code, [SERVING], oom_killed=False).kind
    assert "drained" == judge(code, [SERVING, DRAINED], oom_killed=False).kind


def test_a_fault_on_the_way_out_changes_nothing() -> None:
    """
    What a process said before it stumbled at its exit holds.
    """
    assert "drained" == judge(-signal.SIGSEGV, [SERVING, DRAINED], oom_killed=False).kind

    end = judge(-signal.SIGKILL, [SERVING, f"{FAILED}RuntimeError: no"], oom_killed=False)
    assert "crash" == end.kind
    assert "RuntimeError: no" in end.why


@pytest.mark.parametrize(
    ("code", "oom_killed", "kind"),
    [
        (-signal.SIGKILL, False, "lapse"),
        (-signal.SIGKILL, True, "crash"),
        (-signal.SIGSEGV, False, "crash"),
        (0, False, "crash"),
        (1, False, "crash"),
    ],
)
def test_the_end_of_the_engines_process_is_judged_as_the_workers_own(code: int, oom_killed: bool, kind: str) -> None:
    """
    The worker says how its engine ended, and what it exits with itself adds nothing.
    """
    for notes, served in (([SERVING], True), ([], False)):
        end = judge(exits.FAILED, [*notes, f"{ENGINE_ENDED}{code}"], oom_killed=oom_killed)

        assert (kind, served) == (end.kind, end.served)
        assert "the engine's process" in end.why


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (exits.STARTUP, "refused"),
        (exits.SETTINGS, "refused"),
        (exits.AWAY, "away"),
        (-signal.SIGSEGV, "crash"),
        (3, "crash"),
        (-signal.SIGKILL, "lapse"),
    ],
)
def test_whoever_never_served_held_nothing(code: int, kind: str) -> None:
    """
    Before its first pull a worker may refuse to start; however it ends then, no job is touched.
    """
    end = judge(code, [], oom_killed=False)

    assert (kind, False) == (end.kind, end.served)


@pytest.mark.parametrize(
    ("own", "file"),
    [
        ("0::/\n", "memory.events"),
        ("0::/system.slice/worker.service\n", "system.slice/worker.service/memory.events"),
        # the path is the host's, and the container sees its own group as the root
        ("0::/kubepods/pod1/abc\n", "memory.events"),
        ("5:cpu:/x\n4:memory:/docker/abc\n0::/\n", "memory/docker/abc/memory.oom_control"),
        ("9:name=systemd:/\n4:memory,hugetlb:/docker/abc\n", "memory/memory.oom_control"),
    ],
)
def test_kills_for_memory_are_counted_by_the_control_group(tmp_path: Path, own: str, file: str) -> None:
    """
    Both versions of control groups are read, on a host and in a container.
    """
    (tmp_path / "own").write_text(own)
    (tmp_path / "cgroup" / file).parent.mkdir(parents=True)
    (tmp_path / "cgroup" / file).write_text("low 0\noom 9\noom_kill 3\noom_group_kill 0\n")

    assert 3 == num_oom_kills(tmp_path / "cgroup", tmp_path / "own")


def test_a_system_that_does_not_count_says_none(tmp_path: Path) -> None:
    """
    Without control groups, as on other systems, nothing is known and nothing fails.
    """
    assert 0 == num_oom_kills(tmp_path, tmp_path / "own")
    (tmp_path / "own").write_text("0::/\n")
    assert 0 == num_oom_kills(tmp_path, tmp_path / "own")
