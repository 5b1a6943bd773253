"""What the files at the top say of the project: paths, commands and licence that there are."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from pagemill import __version__

ROOT = Path(__file__).resolve().parent.parent
IMAGES = {"pagemill/gateway", "pagemill/worker-cpu", "pagemill/worker-gpu"}
PAGES = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "docs/kubernetes.md")
# of the words of the Apache License 2.0, with its appendix, as apache.org has it
LICENSE_SHA256 = "a0b9af0d1614b5e8f3004aaf2092bf005b64398ef067ca868d81a8beeb6cb0b5"


def headings(path: Path) -> set[str]:
    """Anchors of a page, as the places that show it make them."""
    found = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """
    To a file that there is, and to a heading of it.
    """
    path = ROOT / page
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", path.read_text())

    assert links
    for target, anchor in links:
        found = (path.parent / target).resolve() if target else path
        assert found.exists(), target
        assert not anchor or anchor in headings(found), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES)
def test_paths_that_a_page_names_exist(page: str) -> None:
    """
    In code: files of the checkout, from its top or from the part that the page is of.
    """
    tops = {path.name for path in ROOT.iterdir() if path.is_dir()} - {".venv"}
    words = [word for code in re.findall(r"`([^`\n]+)`", (ROOT / page).read_text()) for word in code.split()]
    named = {word for word in words if "/" in word and word.partition("/")[0] in tops}

    assert set() == {word for word in named - IMAGES if not (ROOT / word).exists()}


def test_commands_that_contributors_are_told_exist() -> None:
    """
    Targets of make, modules and files.
    """
    text = (ROOT / "CONTRIBUTING.md").read_text()
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wanted = set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE))

    assert len(wanted) > 4
    assert set() == wanted - targets
    for module in re.findall(r"python -m ((?:docs|benchmarks)[\w.]+)", text):
        assert (ROOT / (module.replace(".", "/") + ".py")).exists()


def test_recipes_name_things_that_the_code_has() -> None:
    """
    Names in code that are no paths, as a class or a fixture, are found in a file that the same recipe names.
    """
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for recipe in re.findall(r"^### A \w+.*?\n(.*?)(?=^###? |\Z)", text, re.MULTILINE | re.DOTALL):
        codes = [code for code in re.findall(r"`([^`\n]+)`", recipe) if " " not in code and not code.startswith("--")]
        files = [ROOT / code for code in codes if "/" in code and (ROOT / code).is_file()]
        assert len(files) > 5
        # configs of models are elsewhere, and error classes are raised from where they are defined
        source = "".join(path.read_text() for path in (*files, ROOT / "pagemill" / "errors.py"))
        names = {code for code in codes if re.fullmatch(r"\w+", code)}
        assert set() == {name for name in names if name not in source}


def hooks() -> list[dict[str, Any]]:
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert "local" == repo["repo"]
    return list(repo["hooks"])


def test_hooks_run_what_make_check_runs() -> None:
    """
    The same commands in the same order, of the environment, over the whole checkout.
    """
    makefile = (ROOT / "Makefile").read_text()
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert recipe is not None

    expected = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe.group(1).splitlines()]
    assert expected == [hook["entry"] for hook in hooks()]
    assert {("system", False)} == {(hook["language"], hook["pass_filenames"]) for hook in hooks()}


def test_a_commit_of_badly_formatted_code_is_refused(tmp_path: Path) -> None:
    """
    By pre-commit itself, with nothing but the tools of the environment; well formatted it is taken.
    """
    program = Path(sys.executable).with_name("pre-commit")
    if not program.exists() or shutil.which("git") is None:
        pytest.skip("pre-commit or git is not installed")
    shutil.copy(ROOT / ".pre-commit-config.yaml", tmp_path)
    (tmp_path / ".venv").symlink_to(Path(sys.prefix))
    (tmp_path / ".gitignore").write_text(".venv\n")
    environment = os.environ | {"PRE_COMMIT_HOME": str(tmp_path.parent / "pre-commit"), "HOME": str(tmp_path.parent)}

    def outcome(text: str) -> int:
        (tmp_path / "code.py").write_text(text)
        subprocess.run(["git", "add", "--all"], cwd=tmp_path, check=True, env=environment)
        done = subprocess.run(
            [program, "run", "ruff-format"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert "Skipped" not in done.stdout
        return done.returncode

    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True, env=environment)
    assert 1 == outcome("x = [1,\n2]\n")
    assert 0 == outcome("x = [1, 2]\n")


def test_the_licence_is_whole() -> None:
    """
    All of its words, and the same in what is published.
    """
    words = " ".join((ROOT / "LICENSE").read_text().split())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert LICENSE_SHA256 == hashlib.sha256(words.encode()).hexdigest()
    assert ("Apache-2.0", ["LICENSE"]) == (project["license"], project["license-files"])


def test_the_changelog_keeps_its_form() -> None:
    """
    Unreleased first, then versions with their days, newest first; each with kinds of changes that the form knows.
    """
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (.+)$", text, re.MULTILINE)
    kinds = set(re.findall(r"^### (.+)$", text, re.MULTILINE))

    assert "[Unreleased]" == versions[0]
    assert [] == [one for one in versions[1:] if not re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", one)]
    assert {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"} >= kinds
    assert __version__ in text
