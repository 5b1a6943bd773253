"""What the log shows, and what it never does."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import structlog

from pagemill.logs import CONTENT_CHARS, MAX_LINES, WINDOW_S, FewLines, mask, of_job
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


def logged(code: str, **settings: Any) -> list[dict[str, Any]]:
    """What a program logs that runs some code, line by line."""
    start = f"""
import logging, threading, warnings
import structlog
from pagemill.logs import bind, configure_logging, content, of_job
from pagemill.settings import LogSettings

configure_logging(LogSettings(**{settings!r}), queue="q")
log = structlog.get_logger("test")
"""
    done = subprocess.run(
        [sys.executable, "-c", start + code], cwd=CHECKOUT, capture_output=True, text=True, timeout=60, check=False
    )
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_each_line_says_whose_it_is() -> None:
    """
    Fields of the process stand where the line says none of that name.
    """
    first, second = logged("bind(worker='w'); log.info('a', **of_job('j')); log.info('b', worker='other')")

    assert ("a", "j", "w", "q", "info") == tuple(
        first[name] for name in ("event", "job_id", "worker", "queue", "level")
    )
    assert ("b", "other", "q") == (second["event"], second["worker"], second["queue"])


def test_a_job_of_a_trace_says_which() -> None:
    """
    By its producer's trace; what is none is left out.
    """
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"

    assert {"job_id": "j", "trace_id": trace} == of_job("j", f"00-{trace}-00f067aa0ba902b7-01")
    assert {"job_id": "j"} == of_job("j", "no trace") == of_job("j", None)


def test_libraries_and_crashes_have_the_same_form() -> None:
    """
    What is logged by logging, warned of, raised in a thread, and raised at last.
    """
    code = """
logging.getLogger("botocore.retries").warning("tried %d times", 3)
logging.getLogger("ours").warning("event.name", extra={"fields": {"spans": 7}})
logging.getLogger("urllib3").info("not told")
warnings.warn("old")
thread = threading.Thread(target=lambda: 1 / 0, name="t")
thread.start()
thread.join()
raise RuntimeError("the end")
"""
    library, ours, warned, thread, crash = logged(code)

    assert ("botocore.retries", "tried 3 times", "warning", "q") == tuple(
        library[name] for name in ("logger", "event", "level", "queue")
    )
    assert ("event.name", 7) == (ours["event"], ours["spans"])
    assert ("py.warnings", True) == (warned["logger"], "old" in warned["event"])
    assert ("thread.crashed", "t", "ZeroDivisionError") == (thread["event"], thread["thread"], thread["error"])
    assert ("process.crashed", "critical", "RuntimeError") == (crash["event"], crash["level"], crash["error"])
    assert "the end" == crash["exception"][0]["exc_value"]


def test_levels_that_libraries_make_up_are_told_as_the_one_below() -> None:
    """
    A line of level 35 is a warning; what is below the least that is told is not.
    """
    lines = logged("for level in (5, 25, 35, 60): logging.getLogger('lib').log(level, 'at %d', level)")

    assert [("at 35", "warning"), ("at 60", "critical")] == [(line["event"], line["level"]) for line in lines]


def test_a_fault_in_a_job_or_an_answer_is_told_without_its_text() -> None:
    """
    The errors of both have the place of what is wrong, and not what stands there.
    """
    code = """
from pagemill.schema import Completion, Job
for kind, fields in ((Job, {"prompt": ["the patient is ill"]}), (Completion, {"text": ["the patient is ill"]})):
    try:
        kind.model_validate(fields)
    except ValueError:
        log.exception("fault")
"""
    lines = logged(code)

    assert 2 == len(lines)
    for line, place in zip(lines, ("prompt", "text"), strict=True):
        assert place in line["exception"][0]["exc_value"]
        assert "the patient" not in json.dumps(line)


def test_a_flood_of_a_library_is_limited_by_what_it_says_and_not_by_the_values() -> None:
    """
    As many lines as `log_limit` allows; our own events are told all the same.
    """
    flood = "for n in range(9): logging.getLogger('lib').warning('lost %d', n)"
    lines = logged(f"{flood}\nlog.info('ours')", log_limit=4)

    assert ["lost 0", "lost 1", "lost 2", "lost 3", "ours"] == [line["event"] for line in lines]
    assert 10 == len(logged(f"{flood}\nlog.info('ours')", log_limit=0))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:pa:ss-w0rd!@host:6379/0", "redis://:***@host:6379/0"),
        ("rediss://user:secret@host", "rediss://user:***@host"),
        (
            "redis+sentinel://:secret@a:1,b:2/name/0?sentinel_password=secret&db=1",
            "redis+sentinel://:***@a:1,b:2/name/0?sentinel_password=***&db=1",
        ),
        ("https://bucket/x?X-Amz-Signature=abc&part=1", "https://bucket/x?X-Amz-Signature=***&part=1"),
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
    ],
)
def test_urls_have_no_secrets(url: str, shown: str) -> None:
    """
    What leads to a server stays.
    """
    assert f'{{"url": "{shown}"}}' == mask(None, "info", f'{{"url": "{url}"}}')


def test_no_line_has_a_secret() -> None:
    """
    Neither fields, nor messages of libraries, nor tracebacks.
    """
    code = """
url = "redis://:secret@host"
log.info("connecting", url=url)
logging.getLogger("lib").error("cannot reach %s", url)
raise RuntimeError(url)
"""
    ours, library, crash = logged(code)

    shown = "redis://:***@host"
    assert (shown, f"cannot reach {shown}", shown) == (
        ours["url"],
        library["event"],
        crash["exception"][0]["exc_value"],
    )


def test_prompts_are_for_the_asking() -> None:
    """
    And then the beginning alone.
    """
    code = "log.info('job.ended', **content(prompt='x' * 1000, text='short'))"
    (silent,), (asked,) = logged(code), logged(code, log_prompts=True)

    assert {"prompt", "text"}.isdisjoint(silent)
    assert ("x" * CONTENT_CHARS + "...", "short") == (asked["prompt"], asked["text"])
