"""Read plain text files: each is one row, named by its path."""

from collections.abc import Iterator

from pagemill.object_store import ObjectStore
from pagemill.objects import ObjectEntry
from producers.bulk.columns import Columns, Item
from producers.bulk.rows import RowFault


class TextReader:
    """Reads whole objects as one text each."""

    def __init__(self, store: ObjectStore, columns: Columns) -> None:
        self._store = store
        self._columns = columns

    def unit_bytes(self, entry: ObjectEntry) -> float:  # noqa: ARG002
        """Offsets are bytes."""
        return 1.0

    def scan(self, entry: ObjectEntry, first_row: int) -> Iterator[tuple[str | None, int]]:  # noqa: ARG002
        """The name says it all; nothing is read."""
        yield entry.name, entry.size

    def rows(self, entry: ObjectEntry, first_row: int, start: int, end: int) -> Iterator[tuple[Item, int]]:
        """The one row."""
        if end > self._columns.max_bytes:
            yield self._columns.too_long(first_row, entry.name, end), end
            return
        data = self._store.get_range(entry.url, start, end, entry.etag)
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            message = f"byte {error.start} of the file is no UTF-8: {error.reason}"
            yield RowFault(first_row, entry.name, "invalid_encoding", message), end
            return
        yield self._columns.item({self._columns.id: entry.name, self._columns.text: text}, first_row), end
