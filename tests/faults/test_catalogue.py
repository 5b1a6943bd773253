"""README.md beside this file says which test stands for which row of the failure catalogue: is that true?"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]

# the catalogue skips some numbers
ROWS = [*range(1, 12), *range(13, 26), 27, 28, 29, 30, 32, 33, 34, 35, 37, 38, *range(40, 46)]


def table() -> dict[int, str]:
    """Each row's number, and what stands in its last column."""
    lines = (CHECKOUT / "tests/faults/README.md").read_text().splitlines()
    rows = [re.fullmatch(r"\| (\d+) \| [^|]+ \| ([^|]+) \|", line) for line in lines]
    return {int(row[1]): row[2] for row in rows if row}


@cache
def functions_in(page: str) -> frozenset[str]:
    tree = ast.parse((CHECKOUT / page).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_no_row_is_missing() -> None:
    """
    The table has the rows of the catalogue, in their order.
    """
    assert ROWS == list(table())


@pytest.mark.parametrize("row", ROWS)
def test_a_rows_tests_exist(row: int) -> None:
    """
    Each row names tests that are there; one that has none says why.
    """
    text = table()[row]
    names = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)

    assert names or text.startswith("not here: ")
    assert [] == [f"{page}::{name}" for page, name in names if name not in functions_in(page)]


def test_tests_that_are_named_after_a_row_are_in_it() -> None:
    """
    What is called test_row_NN stands in row NN of the table.
    """
    pages = sorted(Path(__file__).parent.glob("test_*.py"))
    numbered = [name for page in pages for name in functions_in(str(page.relative_to(CHECKOUT))) if "test_row_" in name]
    rows = table()

    assert [] == [name for name in numbered if f"::{name}`" not in rows[int(name[9:11])]]
