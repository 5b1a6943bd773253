"""What the end of a worker process means for the jobs that it held."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from worker import exits, lifeline

# sent by somebody else: they say nothing of the jobs
OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})

CODES = {
    exits.FAILED: "the worker failed",
    exits.HUNG: "a step did not end",
    exits.DEVICE_LOST: "the device was lost",
}

_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class End:
    """
    How a worker process ended.

    Args:
        kind: "drained" as it was told to. "refused" to start: the operator has to change something.
            "away": the queue's server was, so it did not start. "lapse": ended from outside.
            "crash": one of its jobs may have ended it.
        why: The same in words.
        served: It may have held jobs.
    """

    kind: Literal["drained", "refused", "away", "lapse", "crash"]
    why: str
    served: bool


def judge(code: int, notes: Sequence[str], *, oom_killed: bool) -> End:
    """
    Args:
        code: Exit code, or the signal's number below 0, as `subprocess` has it.
        notes: What the process wrote down its lifeline.
        oom_killed: The system has killed a process of ours for its memory meanwhile.
    """
    served = lifeline.SERVING in notes
    # what came before counts: a process may well stumble on its way out
    if lifeline.DRAINED in notes:
        return End("drained", "it was told to end", served)
    if (failure := _said(notes, lifeline.FAILED)) is not None:
        return End("crash", f"{CODES.get(code, CODES[exits.FAILED])}: {failure}", served)
    if (engine_code := _said(notes, lifeline.ENGINE_ENDED)) is not None:
        return _judge_engine(int(engine_code), served=served, oom_killed=oom_killed)
    if code < 0:
        return _judge_signal(-code, served=served, oom_killed=oom_killed)
    if served:
        return End("crash", CODES.get(code, f"it ended by itself with exit code {code}"), served)
    return _judge_start(code)


def _said(notes: Sequence[str], kind: str) -> str | None:
    return next((note.removeprefix(kind) for note in notes if note.startswith(kind)), None)


def _judge_engine(code: int, *, served: bool, oom_killed: bool) -> End:
    if code >= 0:
        return End("crash", f"the engine's process ended by itself with exit code {code}", served)
    end = _judge_signal(-code, served=served, oom_killed=oom_killed)
    return replace(end, why=f"the engine's process was {end.why}")


def _judge_start(code: int) -> End:
    if code == exits.DRAINED:
        return End("drained", "it was told to end", served=False)
    if code in (exits.STARTUP, exits.SETTINGS):
        return End("refused", f"exit code {code}", served=False)
    if code == exits.AWAY:
        return End("away", "the queue's server is away", served=False)
    return End("crash", f"it ended with exit code {code} while it started", served=False)


def _judge_signal(number: int, *, served: bool, oom_killed: bool) -> End:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if number == signal.SIGKILL and oom_killed:
        return End("crash", "killed by the system: out of memory", served)
    if number in OUTSIDE:
        return End("lapse", f"ended from outside by {name}", served)
    return End("crash", f"killed by {name}", served)


def num_oom_kills(cgroups: Path = _CGROUPS, self_cgroup: Path = Path("/proc/self/cgroup")) -> int:
    """
    How often the system has killed a process of our control group, or below it, for its memory; 0 where
    it does not say.
    """
    try:
        lines = self_cgroup.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            folder, name = cgroups, "memory.events"
        elif "memory" in controllers.split(","):
            folder, name = cgroups / "memory", "memory.oom_control"
        else:
            continue
        # inside a container the path may be the host's, and the container's own group the root
        for place in (folder / path.lstrip("/"), folder):
            if (count := _read_count(place / name)) is not None:
                return count
    return 0


def _read_count(path: Path) -> int | None:
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return None
    return next((int(value) for name, value in words if name == "oom_kill"), None)
