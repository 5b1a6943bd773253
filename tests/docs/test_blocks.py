"""The code of the pages is code: each block can be read by its language, and is run, or says why not."""

import ast
import json
import subprocess
import tomllib
from pathlib import Path

import jinja2
import pytest
import yaml

from tests.support import server_box
from tests.support.pages import ROOT, Block, blocks, pages
from tests.support.programs import is_run

LANGUAGES = {"python", "sh", "bash", "json", "toml", "yaml", "jinja", "js", "mermaid", "text", ""}


def fault_of(block: Block) -> str | None:
    """Why a block is not of its language."""
    try:
        match block.language:
            case "python":
                compile(block.code, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            case "sh" | "bash":
                done = subprocess.run(["bash", "-n"], input=block.code, capture_output=True, text=True, check=False)
                return done.stderr or None
            case "json":
                json.loads(block.code)
            case "toml":
                tomllib.loads(block.code)
            case "yaml":
                list(yaml.safe_load_all(block.code))
            case "jinja":
                jinja2.Environment().parse(block.code)
    except (SyntaxError, ValueError, yaml.YAMLError, jinja2.TemplateSyntaxError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_each_block_can_be_read_by_its_language(page: Path) -> None:
    """
    Python compiles, a shell finds no fault, JSON, TOML, YAML and templates are read.
    """
    faults = {str(block): fault for block in blocks(page) if (fault := fault_of(block)) is not None}

    assert {} == faults


def test_a_block_that_is_wrong_is_found(tmp_path: Path) -> None:
    """
    In each language.
    """
    wrong = {"python": "a b", "sh": "if true; then", "json": "{a: 1}", "toml": "a", "yaml": "a: [", "jinja": "{% if %}"}
    found = [fault_of(Block(tmp_path, 1, language, code, "")) for language, code in wrong.items()]

    assert None not in found


def test_languages_are_those_that_are_checked() -> None:
    """
    Another one wants a way to check it.
    """
    assert set() == {block.language for page in pages() for block in blocks(page)} - LANGUAGES


@pytest.mark.skipif(server_box.find("node") is None, reason="there is no Node")
def test_javascript_can_be_read() -> None:
    """
    By Node.
    """
    for block in [block for page in pages() for block in blocks(page) if block.language == "js"]:
        node = str(server_box.find("node"))
        subprocess.run([node, "--check", "-"], input=block.code, text=True, check=True, capture_output=True)


def test_each_program_of_a_page_is_run_or_says_why_not() -> None:
    """
    By a remark before it, which readers do not see. Pages for who works on Pagemill are not looked at.
    """
    readers = [page for page in pages() if page == ROOT / "README.md" or page.parent == ROOT / "docs"]
    unknown = [
        f"{block} {block.remark}"
        for page in readers
        for block in blocks(page)
        if block.language in ("python", "sh", "bash", "js") and not is_run(block) and not _excused(block)
    ]

    assert [] == unknown


def _excused(block: Block) -> bool:
    kind, _, reason = block.remark.partition(": ")
    return kind == "not run" and bool(reason)
