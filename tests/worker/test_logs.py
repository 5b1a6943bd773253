"""What the log shows, and what it never does."""

import subprocess
import sys

import pytest

from tests.support.services import CHECKOUT

FAILING = """
import structlog
from worker.logs import configure_logging

def read(prompt):
    raise ValueError("no such token")

configure_logging("{style}", "info")
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
