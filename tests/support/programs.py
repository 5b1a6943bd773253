"""Which blocks of the pages are run by which test, and how Python's are."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.pages import ROOT, Block, below, blocks

DOCS = ROOT / "docs"

# walked through in order, by test_first_steps.py and test_programs.py
NEWCOMERS = {"first page": (DOCS / "README.md", "Five minutes"), "readme": (ROOT / "README.md", "Quick start")}
WALKS = {
    "bulk": (DOCS / "bulk.md", "Five minutes"),
    "gateway": (DOCS / "gateway.md", "Five minutes"),
    "metrics": (DOCS / "metrics.md", "Five minutes"),
}
# Python with a worker and nothing else
PLAIN = (ROOT / "README.md", DOCS / "client.md", DOCS / "webhooks.md", DOCS / "migration.md")
# blocks that want more, by their remarks, and commands of migration.md
WANTS = ("with celery", "with grammars", "with a store", "a batch file", "a bulk job")
# whose tests are their own
ELSEWHERE = tuple(
    DOCS / name for name in ("kubernetes.md", "observability.md", "settings.md", "stack.md", "status.md", "wire.md")
)
# programs that no test of pages can start
OUTSIDE = ("docker ", "kubectl ", "helm ")

# gives each block what the reader has by then; a block may await
_RUN = """
import ast, asyncio, inspect, json, sys
prelude, *codes = json.load(sys.stdin)
names = {"__name__": "__main__"}
for code in codes:
    exec(prelude, names)
    made = eval(compile(code, "<block>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    if inspect.iscoroutine(made):
        asyncio.run(made)
"""


def plain_blocks(page: Path) -> list[Block]:
    """The blocks of Python of a page that want no more than a worker."""
    return [block for block in blocks(page) if block.language == "python" and not block.remark]


def walked() -> set[Block]:
    return {block for page, heading in (*NEWCOMERS.values(), *WALKS.values()) for block in below(page, heading)}


def is_run(block: Block) -> bool:
    if block.page in ELSEWHERE or block.remark in WANTS or block.code.startswith(OUTSIDE):
        return True
    if block.remark.startswith("not run"):
        return False
    return block in walked() or (block.page in PLAIN and block in plain_blocks(block.page))


def run_python(codes: Sequence[str], *, prelude: str, folder: Path, environ: Mapping[str, str]) -> str:
    """Run blocks one after the other in one process, the prelude before each; gives what they printed."""
    import json

    done = subprocess.run(
        [sys.executable, "-c", _RUN],
        input=json.dumps([prelude, *codes]),
        cwd=folder,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
