"""docs/performance.md shows what the commands printed."""

import pytest

from benchmarks import performance_page
from benchmarks.performance_page import PAGE, RESULTS, TABLES, main, with_tables


def test_the_page_is_current() -> None:
    """
    `python -m benchmarks.performance_page` writes its tables anew.
    """
    page = PAGE.read_text(encoding="utf-8")

    assert with_tables(page) == page
    assert 0 == main(["--check"])


def test_each_table_has_rows() -> None:
    """
    None is empty, and all rows of one have as many cells.
    """
    for name, make in TABLES.items():
        rows = make()
        assert len(rows) > 2, name
        assert 1 == len({row.count(" | ") for row in (rows[0], *rows[2:])}), name


def test_a_line_that_changes_changes_the_page(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """
    And only the table that is made of it.
    """
    for path in RESULTS.glob("*.jsonl"):
        (tmp_path / path.name).write_text(path.read_text())
    start_up = tmp_path / "h200-start-up.jsonl"
    start_up.write_text(start_up.read_text().replace('"first_token": ', '"first_token": 9'))
    monkeypatch.setattr(performance_page, "RESULTS", tmp_path)

    before, after = PAGE.read_text().splitlines(), with_tables(PAGE.read_text()).splitlines()

    changed = [line for line, other in zip(before, after, strict=True) if line != other]
    assert len(start_up.read_text().splitlines()) == len(changed)
    assert 1 == main(["--check"])


def test_a_page_with_a_table_too_few_is_refused() -> None:
    """
    A table that nobody sees is a mistake of the page.
    """
    with pytest.raises(ValueError, match="gpu-start"):
        with_tables(PAGE.read_text().replace("<!-- table: gpu-start -->", ""))
