"""Read rows of Parquet tables, in row groups and with the columns that are wanted."""

import base64
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date, datetime, time
from typing import Any

from pagemill.object_store import ObjectStore
from pagemill.objects import ObjectEntry, ObjectStat
from producers.bulk.columns import Columns, Item, fault
from producers.bulk.forward import ForwardReader
from producers.bulk.io_errors import SourceError
from producers.bulk.windows import RangeFile

# of rows that are unpacked at once
_BATCH_BYTES = 8 * 1024 * 1024
_MAX_BATCH_ROWS = 4096

# of one column that is fetched at once
_BUFFER_BYTES = 1024 * 1024


class ParquetReader:
    """
    Reads tables; offsets count rows.

    Planning reads the column of ids alone. A row group is entered at its beginning: chunks read in order cost one way
    through it.

    Args:
        fields: The other columns that are read; None for all.
    """

    def __init__(self, store: ObjectStore, columns: Columns, fields: Sequence[str] | None = None) -> None:
        self._store = store
        self._columns = columns
        self._fields = fields
        self.rows = ForwardReader(self._open).rows

    def unit_bytes(self, entry: ObjectEntry) -> float:
        """The size of a row, unpacked."""
        with self._table(entry) as table:
            groups = [table.metadata.row_group(group) for group in range(table.metadata.num_row_groups)]
            num_bytes: int = sum(group.total_byte_size for group in groups)
            num_rows: int = table.metadata.num_rows
        return num_bytes / max(num_rows, 1)

    def scan(self, entry: ObjectEntry, first_row: int) -> Iterator[tuple[str | None, int]]:
        """
        The id of each row, and its number in the table, from 1.

        Raises:
            SourceError: this is no Parquet table, or it has no column of texts.
        """
        with self._table(entry) as table:
            names = table.schema_arrow.names
            if self._columns.text not in names:
                raise SourceError(f"{entry.url} has no column {self._columns.text!r}: it has {', '.join(names)}")
            if self._columns.id not in names:
                yield from ((f"row-{first_row + row}", row + 1) for row in range(table.metadata.num_rows))
                return
            row = 0
            for batch in table.iter_batches(_MAX_BATCH_ROWS, columns=[self._columns.id], use_threads=False):
                for value in _rows_of(batch):
                    item = self._item(value and value | {self._columns.text: "-"}, first_row + row)
                    row += 1
                    yield item.custom_id, row

    def _open(self, entry: ObjectEntry, first_row: int, start: int) -> Iterator[tuple[Item, int]]:
        with self._table(entry) as table:
            group, group_start = _group_of(table.metadata, start)
            groups = list(range(group, table.metadata.num_row_groups))
            batches = table.iter_batches(
                _batch_rows(table.metadata), row_groups=groups, columns=self._wanted(table), use_threads=False
            )
            position = group_start
            for batch in batches:
                skipped = min(max(start - position, 0), batch.num_rows)
                position += skipped
                for values in _rows_of(batch.slice(skipped)):
                    row = first_row + position - start
                    position += 1
                    yield self._item(values, row), position

    def _item(self, values: dict[str, Any] | None, row: int) -> Item:
        if values is None:
            return fault(row, "invalid_encoding", "a column of text is no UTF-8")
        text = values.get(self._columns.text)
        if isinstance(text, str) and len(text) > self._columns.max_bytes:
            return self._columns.too_long(row, None, len(text))
        return self._columns.item({name: as_json(value) for name, value in values.items()}, row)

    def _wanted(self, table: Any) -> list[str] | None:
        if self._fields is None:
            return None
        wanted = {self._columns.id, self._columns.text, *self._fields}
        return [name for name in table.schema_arrow.names if name in wanted]

    @contextmanager
    def _table(self, entry: ObjectEntry) -> Iterator[Any]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        stat = self._store.stat(entry.url)
        file = RangeFile(self._store, entry.url, ObjectStat(stat.size, entry.etag))
        try:
            with pq.ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False) as table:
                yield table
        # the store's own errors are of another kind: OSError is what the library calls damage, too
        except (pa.ArrowException, OSError) as error:
            raise SourceError(f"{entry.url} is no Parquet table that can be read: {error}") from error


def _group_of(metadata: Any, row: int) -> tuple[int, int]:
    """The row group that a row is in, and that group's first row."""
    start = 0
    for group in range(metadata.num_row_groups):
        end = start + metadata.row_group(group).num_rows
        if row < end:
            return group, start
        start = end
    return metadata.num_row_groups, start


def _batch_rows(metadata: Any) -> int:
    """So many rows that no batch is much larger than it should be."""
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    largest = max((group.total_byte_size // max(group.num_rows, 1) for group in groups), default=1)
    return int(min(max(_BATCH_BYTES // max(largest, 1), 1), _MAX_BATCH_ROWS))


def _rows_of(batch: Any) -> list[dict[str, Any] | None]:
    """The rows of a batch; None for one whose text is no text."""
    try:
        rows: list[dict[str, Any] | None] = batch.to_pylist()
    except UnicodeDecodeError:
        if batch.num_rows == 1:
            return [None]
        return [row for number in range(batch.num_rows) for row in _rows_of(batch.slice(number, 1))]
    return rows


def as_json(value: Any) -> Any:
    """A value of a table as JSON has it: times as ISO 8601, bytes as base64, numbers that JSON has not as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, dict):
        return {str(name): as_json(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(part) for part in value]
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    # decimals, durations and ids, which have one way to be written
    return str(value)
