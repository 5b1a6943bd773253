"""What a newcomer is told to do works, command by command, in a folder that has nothing else."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import ROOT, below
from tests.support.programs import NEWCOMERS
from tests.support.walkthrough import Walkthrough, matches


def environment(port: str, **more: str) -> dict[str, str]:
    """A newcomer's: no setting but the server's address, as the usual port may be somebody's."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PAGEMILL_", "PYTHON", "VIRTUAL_"))
    }
    # torch may have been built for GPUs that this machine lacks
    return kept | {"PAGEMILL_REDIS_URL": f"redis://localhost:{port}/0", "PAGEMILL_DEVICE": "cpu"} | more


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder that looks like a checkout in which all is installed."""
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and path.name not in ("pagemill.toml", "jobs.jsonl"):
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The files of the checkout as they would be committed, and nothing else."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize(("page", "heading"), NEWCOMERS.values(), ids=NEWCOMERS)
def test_the_commands_work_where_all_is_installed(
    page: Path, heading: str, free_ports: tuple[str, str], installed: Path
) -> None:
    """
    In the page's order, with a fake engine in the model's place: what it says is not compared, all else is.
    """
    port = free_ports[0]
    walk = Walkthrough(
        installed,
        environment(
            port,
            PATH=f"{sys.prefix}/bin:{os.environ['PATH']}",
            PYTHONPATH=str(ROOT),
            PAGEMILL_ENGINE="fake",
            PAGEMILL_SERVED_MODEL_NAME="smollm2",
        ),
        ports={"6379": port},
        installs=False,
        answers=False,
    )

    walk.follow(below(page, heading))


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("page", "heading"), NEWCOMERS.values(), ids=NEWCOMERS)
def test_a_newcomer_comes_from_a_clone_to_answers(
    page: Path, heading: str, free_ports: tuple[str, str], clone: Path
) -> None:
    """
    Installed from nothing, the model fetched into an empty cache, and its answers are those of the page.
    """
    port = free_ports[0]
    # the interpreter that runs the tests is new enough, python3 may not be
    python = clone / "newcomers-bin"
    python.mkdir()
    (python / "python3").symlink_to(f"{sys.base_prefix}/bin/python3")
    environ = environment(port, PATH=f"{python}:{os.environ['PATH']}", PAGEMILL_CACHE=str(clone / "cache"))
    walk = Walkthrough(clone, environ, ports={"6379": port}, installs=True, answers=True)

    walk.follow(below(page, heading))

    assert walk.compared > 0
    shutil.rmtree(clone / ".venv")
    shutil.rmtree(clone / "cache")


def test_outputs_are_compared_line_by_line() -> None:
    """
    Dots stand for anything within a line, and a line more or less is a difference.
    """
    assert matches("a ... c\nd\n", "a  b b   c\nd")
    assert not matches("a ... c\nd\n", "a b c")
    assert not matches("a\n", "a\nb")
    assert not matches("a.c", "abc")
