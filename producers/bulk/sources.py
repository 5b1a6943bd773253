"""Read any number of documents: planned once as a stream, then any chunk of them alone."""

import tempfile
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import PurePosixPath
from typing import Protocol

from pagemill.errors import SettingsError
from pagemill.objects import ObjectEntry
from producers.bulk.chunks import Chunk, Piece
from producers.bulk.columns import Columns, Item
from producers.bulk.duplicates import DuplicateFinder
from producers.bulk.io_errors import SourceError
from producers.bulk.jsonl import JsonlReader, LineParser, PackedJsonlReader
from producers.bulk.locations import Location, locate
from producers.bulk.parquet import ParquetReader
from producers.bulk.rows import RowFault
from producers.bulk.texts import TextReader

MAX_LINE_BYTES = 4 * 1024 * 1024

# a chunk ends here also with few rows
MAX_CHUNK_BYTES = 64 * 1024 * 1024


_FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonl.gz": "jsonl.gz",
    ".ndjson.gz": "jsonl.gz",
    ".jsonl.zst": "jsonl.zst",
    ".ndjson.zst": "jsonl.zst",
    ".parquet": "parquet",
    ".txt": "text",
    ".md": "text",
}


class RowReader(Protocol):
    """Reads the rows of one object; what offsets count is the format's."""

    def unit_bytes(self, entry: ObjectEntry) -> float:
        """How many bytes of content one of what offsets count is, in the mean."""
        ...

    def scan(self, entry: ObjectEntry, first_row: int) -> Iterator[tuple[str | None, int]]:
        """The id of each row, None where it cannot be read, and where the row ends."""
        ...

    def rows(self, entry: ObjectEntry, first_row: int, start: int, end: int) -> Iterator[tuple[Item, int]]:
        """Each row from `start` to `end`, with where it ends."""
        ...


def open_source(
    url: str,
    *,
    text_field: str = "text",
    id_field: str = "custom_id",
    format: str | None = None,  # noqa: A002
    max_line_bytes: int = MAX_LINE_BYTES,
    fields: Sequence[str] | None = None,
) -> "Source":
    """
    The documents at `s3://bucket/path?endpoint=...`, `file:///path` or a path of this machine.

    The path names one object, a folder (all below it), or several by `*`, `**` and `[abc]`. Nothing is read yet.

    Args:
        text_field: The column that is worked on.
        id_field: The column that names a row; text or a whole number.
        format: jsonl, jsonl.gz, jsonl.zst, parquet or text; without it the ends of the names tell.
        max_line_bytes: A longer line, or text file, is a row fault and is never held in memory.
        fields: The other columns that are read of a Parquet table; None for all.

    Raises:
        SettingsError: the URL is none of these, or there is no such format.
    """
    if format is not None and format not in _FORMATS.values():
        raise SettingsError(f"the format is {format!r}: want one of {', '.join(sorted(set(_FORMATS.values())))}")
    return Source(locate(url), Columns(text_field, id_field, max_line_bytes), format, fields)


class Source:
    """
    An input: its chunks, and the rows of each.

    What a plan says stays true or is found out: each object is read with the etag that it had, and another one raises
    ObjectChanged.

    Args:
        parse: Makes rows of JSON lines in another way than as documents.
    """

    def __init__(
        self,
        location: Location,
        columns: Columns,
        format_name: str | None,
        fields: Sequence[str] | None = None,
        *,
        parse: LineParser | None = None,
    ) -> None:
        self._location = location
        self._columns = columns
        self._format = format_name
        self._fields = fields
        self._readers: dict[str, RowReader] = {
            "jsonl": JsonlReader(location.store, columns, parse),
            "jsonl.gz": PackedJsonlReader(location.store, columns, "gz", parse),
            "jsonl.zst": PackedJsonlReader(location.store, columns, "zst", parse),
            "parquet": ParquetReader(location.store, columns, fields),
            "text": TextReader(location.store, columns),
        }

    def fingerprint(self) -> str:
        """
        Names what would be planned now: another one if any object, or how it is read, is another.

        Raises:
            SourceError: there is no such object.
        """
        digest = sha256(repr((self._columns, self._format, self._fields)).encode())
        for entry in self._location.objects():
            digest.update(repr((entry.name, entry.size, entry.etag)).encode())
        return digest.hexdigest()

    def chunks(self, rows_per_chunk: int) -> Iterator[Chunk]:
        """
        Read the whole input once, then give its chunks, in order.

        None comes before all is read, since only then it is known which ids come again.

        Raises:
            SourceError: nothing is there, or not in the format that it should have.
            ObjectChanged: an object was written anew meanwhile.
            ObjectStoreError: an object cannot be read.
        """
        with tempfile.TemporaryFile("w+", encoding="utf-8") as planned, DuplicateFinder() as ids:
            num_rows = 0
            for chunk in self._plan(rows_per_chunk, ids):
                planned.write(chunk.model_dump_json() + "\n")
                num_rows = chunk.first_row + chunk.num_rows
            later = ids.find(num_rows)
            planned.seek(0)
            for line in planned:
                chunk = Chunk.model_validate_json(line)
                duplicates = tuple(later.within(chunk.first_row, chunk.num_rows))
                yield chunk.model_copy(update={"duplicates": duplicates}) if duplicates else chunk

    def read(self, chunk: Chunk) -> Iterator[Item]:
        """
        The chunk's rows, in order: one document or fault for each of `num_rows`.

        Raises:
            ObjectChanged: an object is not the one that was planned.
            ObjectStoreError: an object cannot be read, or is not there any more.
        """
        duplicates = frozenset(chunk.duplicates)
        row = chunk.first_row
        for piece in chunk.pieces:
            entry = ObjectEntry(piece.name, piece.url, piece.end, piece.etag)
            for item, _ in self._readers[piece.format].rows(entry, row, piece.start, piece.end):
                yield _duplicate(item) if item.row in duplicates else item
            row += piece.num_rows

    def _plan(self, rows_per_chunk: int, ids: DuplicateFinder) -> Iterator[Chunk]:
        draft = _Draft(0, 0)
        row = 0
        for entry, kind in self._objects():
            reader = self._readers[kind]
            unit_bytes = reader.unit_bytes(entry)
            start = end = num_rows = 0
            for custom_id, end in reader.scan(entry, row):
                if custom_id is not None:
                    ids.add(custom_id, row)
                row += 1
                num_rows += 1
                size_bytes = (end - start) * unit_bytes
                if draft.num_rows + num_rows == rows_per_chunk or draft.size_bytes + size_bytes >= MAX_CHUNK_BYTES:
                    draft.add(entry, kind, start, end, num_rows, size_bytes)
                    yield draft.chunk()
                    draft = _Draft(draft.index + 1, row)
                    start, num_rows = end, 0
            if num_rows:
                draft.add(entry, kind, start, end, num_rows, (end - start) * unit_bytes)
        if draft.num_rows:
            yield draft.chunk()

    def _objects(self) -> Iterator[tuple[ObjectEntry, str]]:
        """Each object with its format."""
        kinds: set[str] = set()
        for entry in self._location.objects():
            kind = self._format or format_of(entry)
            kinds.add(kind)
            if len(kinds) > 1 and "text" in kinds:
                others = ", ".join(sorted(kinds - {"text"}))
                raise SourceError(f"{entry.url}: text files and {others} lie together: name one kind by a pattern")
            yield entry, kind


def format_of(entry: ObjectEntry) -> str:
    """
    The format that an object's name tells.

    Raises:
        SourceError: it tells none.
    """
    for end in ("".join(PurePosixPath(entry.name).suffixes[-2:]), PurePosixPath(entry.name).suffix):
        if end.lower() in _FORMATS:
            return _FORMATS[end.lower()]
    raise SourceError(
        f"the format of {entry.url} is not known: end its name in {', '.join(_FORMATS)}, or name a format"
    )


class _Draft:
    """A chunk that is still being planned."""

    def __init__(self, index: int, first_row: int) -> None:
        self.index = index
        self.first_row = first_row
        self.num_rows = 0
        self.size_bytes = 0.0
        self._pieces: list[Piece] = []

    def add(self, entry: ObjectEntry, kind: str, start: int, end: int, num_rows: int, size_bytes: float) -> None:
        self._pieces.append(
            Piece(url=entry.url, etag=entry.etag, name=entry.name, format=kind, start=start, end=end, num_rows=num_rows)
        )
        self.num_rows += num_rows
        self.size_bytes += size_bytes

    def chunk(self) -> Chunk:
        return Chunk(
            index=self.index,
            first_row=self.first_row,
            num_rows=self.num_rows,
            size_bytes=round(self.size_bytes),
            pieces=tuple(self._pieces),
        )


def _duplicate(item: Item) -> RowFault:
    return RowFault(item.row, item.custom_id, "duplicate_custom_id", "an earlier row has this id")
