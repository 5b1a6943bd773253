"""docs/runbook.md says what to do about each error with which a process may not start."""

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import StartupError
from pagemill import errors
from pagemill.errors import PagemillError
from tests.support.pages import ROOT
from tests.support.raised import HOLE, Raised, raised
from worker.engine_process import EngineEnded, StepHung

# of one job or one call: the table in docs/client.md has those
OF_A_CALL = {
    errors.InvalidJob,
    errors.NewerVersion,
    errors.UnknownModel,
    errors.Conflict,
    errors.BatchNotFound,
    errors.BatchClosed,
    errors.Busy,
    errors.JobNotFound,
    errors.JobFailed,
    errors.WaitTimeout,
}
# messages of commands and calls, not of programs that start
OTHER_PLACES = ("pagemill/shares.py", "pagemill/submitter.py")
MODULES = (
    "worker.self_test",
    "producers.bulk.errors",
    "producers.bulk.io_errors",
    "producers.batch_file.errors",
    "producers.tasks.failures",
)


def tree(root: type[BaseException]) -> Iterator[type[BaseException]]:
    yield root
    for one in root.__subclasses__():
        yield from tree(one)


def start_up_errors() -> set[str]:
    for module in MODULES:
        importlib.import_module(module)
    found = {*tree(StartupError), *tree(PagemillError)} - {PagemillError} - OF_A_CALL
    ours = {one.__name__ for one in found if one.__module__.startswith(("engine", "worker", "pagemill", "producers"))}
    # of a task, and of one row
    return (ours | {EngineEnded.__name__, StepHung.__name__}) - {"RunsElsewhere", "InvalidArguments", "ResultLost"}


def rows() -> Iterator[tuple[str, str, str]]:
    """Class, message and remedy of each row; a row without a class has the one above it."""
    text = (ROOT / "docs/runbook.md").read_text(encoding="utf-8")
    _, _, chapter = text.partition("## When a process does not start")
    name = ""
    for line in chapter.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("|") and len(cells) == 3 and cells[0] not in ("class", "---"):
            name = cells[0].strip("`") or name
            for message in re.findall(r"`([^`]+)`", cells[1]):
                yield name, message, cells[2]


def is_told(message: str, shown: str) -> bool:
    """Whether what is shown is a part of the message; an ellipsis stands for anything, in both."""
    return re.search(".*".join(re.escape(part) for part in re.split(rf"\s*{HOLE}\s*", shown)), message) is not None


def messages() -> list[Raised]:
    found = raised(["engine", "worker", "pagemill", "producers"], start_up_errors())
    # what is put together elsewhere cannot be read there
    return [one for one in found if set(one.message) - set(HOLE) and not one.where.startswith(OTHER_PLACES)]


def test_each_class_of_error_has_an_entry() -> None:
    """
    With what to do.
    """
    entries = {name: remedy for name, _, remedy in rows()}

    assert set() == start_up_errors() - entries.keys()
    assert set() == entries.keys() - start_up_errors()
    assert all(entries.values())


def test_each_message_has_an_entry() -> None:
    """
    Under its class, or under that of the error that it is a kind of.
    """
    shown: dict[str, list[str]] = {}
    for name, message, _ in rows():
        shown.setdefault(name, []).append(message)
    kin = {one.__name__: [base.__name__ for base in one.__mro__] for one in (*tree(StartupError), *tree(PagemillError))}

    found = messages()
    missing = [
        f"{one.where} {one.error}: {one.message}"
        for one in found
        if not any(
            is_told(one.message, text) for name in kin.get(one.error, [one.error]) for text in shown.get(name, [])
        )
    ]

    assert len(found) > 100
    assert [] == missing


def said(*command: str, cwd: Path, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", "HOME": str(cwd), "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.returncode, done.stderr.strip()


AWAY = ("--redis-url", "redis://127.0.0.1:1/0")


@pytest.mark.parametrize(
    ("command", "code", "error"),
    [
        (("worker", "--engine", "fake", "--lease-s", "0"), 2, "SettingsError"),
        (("worker", "--engine", "fake", *AWAY), 1, "ServerAway"),
        (("worker.exporter", "--redis-url", "nonsense"), 2, "SettingsError"),
        (("producers.gateway",), 2, "SettingsError"),
        (("producers.bulk", "run", "--template", "nothing", "--input", "in", "--output", "out"), 2, "SpecError"),
        (("producers.bulk", "run", "--input", "in", "--output", "out", *AWAY), 1, "ServerAway"),
        (("producers.bulk", "report", "out"), 1, "OutputError"),
        (("producers.batch_file", "serve"), 2, "SettingsError"),
        (("producers.tasks.completer",), 2, "SettingsError"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else str(value),
)
def test_what_a_program_says_is_found_in_the_runbook(
    command: tuple[str, ...], code: int, error: str, tmp_path: Path
) -> None:
    """
    A reader who looks for the words on the screen finds the row; the exit code is that of the page.
    """
    (tmp_path / "pagemill.toml").write_text("celery_completer = 3\n" if "completer" in command[0] else "")

    ended, words = said(*command, cwd=tmp_path)

    assert code == ended, words
    assert [] != [one for name, one, _ in rows() if name == error and is_told(words, one)], words


def test_celery_ends_with_the_message(tmp_path: Path) -> None:
    """
    As the last line of what Celery says.
    """
    (tmp_path / "pagemill.toml").write_text("celery_completer = 3\n")

    ended, words = said("celery", "-A", "producers.celery_app", "report", cwd=tmp_path)

    assert 0 != ended
    assert "celery_completer" in words.splitlines()[-1]
