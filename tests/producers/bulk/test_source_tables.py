"""Parquet tables as inputs: what is fetched of them, and what their values become."""

import datetime
import random
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from producers.bulk.io_errors import SourceError
from producers.bulk.planner import source_of
from producers.bulk.rows import Document, RowFault
from producers.bulk.sources import open_source
from producers.bulk.spec import BulkSpec
from tests.support.bulk_inputs import (
    counted_ranges,
    read_all,
)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table with a wide column beside what is wanted."""
    rng = random.Random(0)
    rows = [{"custom_id": row, "text": f"t{row}", "wide": rng.randbytes(1000).hex()} for row in range(2000)]
    path = tmp_path / "in.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=500)
    return path


def test_only_wanted_columns_of_a_table_are_fetched(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Planning fetches the ids, and reading the columns that are named.
    """
    source = open_source(str(table), fields=["nothing"])
    sizes = counted_ranges(source, monkeypatch)

    found = read_all(source, list(source.chunks(100)))

    assert [Document(row, str(row), f"t{row}") for row in range(2000)] == found
    assert sum(sizes) < table.stat().st_size / 10


@pytest.mark.parametrize(
    ("fields", "share"), [({}, 0.1), ({"template": "m.j2", "template_text": "{{ fields.wide }}"}, 2)]
)
def test_a_job_fetches_the_columns_that_its_template_uses(
    table: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, str], share: float
) -> None:
    """
    The templates that come along use the text; others may use any column.
    """
    source = source_of(BulkSpec.build({"input": str(table), "output": "o", **fields}))
    sizes = counted_ranges(source, monkeypatch)

    found = read_all(source, list(source.chunks(100)))

    assert 2000 == len(found)
    assert ("wide" in found[0].fields) == bool(fields)
    assert sum(sizes) < table.stat().st_size * share


def test_values_of_a_table_become_json(tmp_path: Path) -> None:
    """
    Times, decimals, bytes, nested values and numbers that are none become what JSON has.
    """
    row = {
        "text": "t",
        "when": datetime.datetime(2026, 11, 30, 1, 2, 3, tzinfo=datetime.UTC),
        "day": datetime.date(2026, 11, 30),
        "price": Decimal("1.50"),
        "raw": b"\x00\xff",
        "nan": float("nan"),
        "nested": {"list": [{"at": datetime.date(2026, 1, 1)}, None, {"at": datetime.date(2026, 1, 2)}]},
        "no": None,
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "in.parquet")
    source = open_source(str(tmp_path / "in.parquet"))

    (item,) = read_all(source, list(source.chunks(1)))

    assert isinstance(item, Document)
    assert {
        "when": "2026-11-30T01:02:03+00:00",
        "day": "2026-11-30",
        "price": "1.50",
        "raw": "AP8=",
        "nan": None,
        "nested": {"list": [{"at": "2026-01-01"}, None, {"at": "2026-01-02"}]},
        "no": None,
    } == item.fields


def test_ids_of_a_table_that_become_text_come_again_too(tmp_path: Path) -> None:
    """
    A day is an id by the name that its row has, and the second one is a fault.
    """
    day = datetime.date(2026, 11, 30)
    rows = [{"custom_id": day, "text": "a"}, {"custom_id": day, "text": "b"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    source = open_source(str(tmp_path / "in.parquet"))

    first, second = read_all(source, list(source.chunks(10)))

    assert Document(0, "2026-11-30", "a") == first
    assert ("2026-11-30", "duplicate_custom_id") == (second.custom_id, isinstance(second, RowFault) and second.code)


def test_faults_of_a_table(tmp_path: Path) -> None:
    """
    Rows of a table have the faults that lines have; text that is no UTF-8 costs its own row alone.
    """
    texts = pa.StringArray.from_buffers(5, *string_buffers([b"good", b"\xff", b"fine", b"", b"x" * 200]))
    pq.write_table(pa.table({"custom_id": ["a", "b", "c", "d", "e"], "text": texts}), tmp_path / "in.parquet")
    source = open_source(str(tmp_path / "in.parquet"), max_line_bytes=100)

    found = read_all(source, list(source.chunks(10)))

    assert ["good", "invalid_encoding", "fine", "empty_text", "line_too_long"] == [
        item.text if isinstance(item, Document) else item.code for item in found
    ]


def string_buffers(values: list[bytes]) -> tuple[pa.Buffer, pa.Buffer]:
    """A column of text of any bytes, as other writers make it."""
    offsets = [0]
    for value in values:
        offsets.append(offsets[-1] + len(value))
    return pa.array(offsets, pa.int32()).buffers()[1], pa.py_buffer(b"".join(values))


def test_a_table_without_the_column_of_texts(table: Path) -> None:
    """
    That none of a million rows has a text is said once, with the columns that there are.
    """
    with pytest.raises(SourceError, match="no column 'body': it has custom_id, text, wide"):
        list(open_source(str(table), text_field="body").chunks(10))
