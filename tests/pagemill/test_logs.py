"""What the log shows, and what it never does."""

import subprocess
import sys
from pathlib import Path

import pytest
import structlog

from pagemill.logs import MAX_LINES, WINDOW_S, FewLines
from tests.support.clock import Clock
from tests.support.services import CHECKOUT

FAILING = """
import structlog
from pagemill.logs import configure_logging
from pagemill.settings import LogSettings

def read(prompt):
    raise ValueError("no such token")

configure_logging(LogSettings(log_format="{style}"))
secret = "the patient" + " is ill"
try:
    read(secret)
except ValueError:
    structlog.get_logger("test").exception("job.intake_failed", job_id="job-1")
"""


@pytest.mark.parametrize("style", ["text", "json"])
def test_tracebacks_show_no_prompt(style: str) -> None:
    """
    An exception is logged with its type, its message and its lines, without the variables of its frames.
    """
    done = subprocess.run(
        [sys.executable, "-c", FAILING.format(style=style)],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert "the patient is ill" not in done.stderr
    for part in ("job.intake_failed", "job-1", "ValueError", "no such token", "read"):
        assert part in done.stderr


def test_what_happens_often_is_told_a_few_times() -> None:
    """
    Beyond so many lines of one event the rest is counted; other events are told all the same.
    """
    clock = Clock()
    few = FewLines(clock=clock)

    def told(name: str) -> dict[str, object] | None:
        try:
            return few(None, "info", {"event": name})
        except structlog.DropEvent:
            return None

    lines = [told("job.refused") for _ in range(MAX_LINES + 7)]
    other = told("worker.started")
    clock.now = WINDOW_S
    later = [told("job.refused") for _ in range(2)]

    assert ([True] * MAX_LINES + [False] * 7, True) == ([line is not None for line in lines], other is not None)
    assert [{"event": "job.refused", "dropped": 7}, {"event": "job.refused"}] == later


def test_a_full_disk_loses_lines_and_nothing_else() -> None:
    """
    Neither the write fails nor the process that made it.
    """
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", FAILING.format(style="json")],
            cwd=CHECKOUT,
            stdout=subprocess.DEVNULL,
            stderr=full,
            timeout=60,
            check=False,
        )

    assert 0 == done.returncode
