"""The benchmark of bulk's memory, in a small size."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import bulk_memory


@pytest.mark.parametrize("format", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
def test_memory_is_bounded(format: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: A002
    """
    All rows are planned and read, in far less memory than the promised 300 MB.
    """
    monkeypatch.setattr(sys, "argv", ["bulk_memory", "--rows", "20000", "--line-bytes", "1000", "--format", format])

    bulk_memory.main()

    line = json.loads(capsys.readouterr().out)
    assert (20_000, 20, format) == (line["rows_read"], line["chunks"], line["bulk_memory"])
    assert 10 < line["peak_mib"] < 250


def test_rows_are_as_long_as_they_should_be(tmp_path: Path) -> None:
    """
    The file has as many bytes as the figures say.
    """
    bulk_memory.make(tmp_path / "in.jsonl", "jsonl", 10, 200)

    assert 2000 == (tmp_path / "in.jsonl").stat().st_size
