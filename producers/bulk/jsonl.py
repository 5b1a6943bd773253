"""Read rows of JSON lines, all of an object or a window of it."""

from collections.abc import Callable, Iterable, Iterator

from pagemill.object_store import ObjectStore
from pagemill.objects import ObjectEntry
from producers.bulk.columns import Columns, Item, fault
from producers.bulk.forward import ForwardReader
from producers.bulk.lines import LineSplitter, LongLine
from producers.bulk.strict_json import decode, is_text, reason
from producers.bulk.windows import unpacked, windows

_BOM = b"\xef\xbb\xbf"

# makes an item of a line, given what the columns mean and the row's number
LineParser = Callable[[bytes | LongLine, Columns, int], Item]


class JsonlReader:
    """Reads JSON lines that lie in an object as they are: any window of bytes can be read alone."""

    def __init__(self, store: ObjectStore, columns: Columns, parse: LineParser | None = None) -> None:
        self._store = store
        self._columns = columns
        self._parse = parse

    def unit_bytes(self, entry: ObjectEntry) -> float:  # noqa: ARG002
        """Offsets are bytes."""
        return 1.0

    def scan(self, entry: ObjectEntry, first_row: int) -> Iterator[tuple[str | None, int]]:
        """The id of each row, and the offset of the byte behind it."""
        return ((item.custom_id, end) for item, end in self.rows(entry, first_row, 0, entry.size))

    def rows(self, entry: ObjectEntry, first_row: int, start: int, end: int) -> Iterator[tuple[Item, int]]:
        """Each row from byte `start` to byte `end`."""
        data = windows(self._store, entry.url, entry.etag, start, end)
        return rows_of(data, self._columns, first_row, start, self._parse)


class PackedJsonlReader:
    """
    Reads JSON lines of a gzip or Zstandard stream; offsets count what is unpacked.

    Such a stream has no places to enter it: chunks read in order cost one way through it, another order costs more.
    """

    def __init__(self, store: ObjectStore, columns: Columns, packing: str, parse: LineParser | None = None) -> None:
        self._store = store
        self._columns = columns
        self._parse = parse
        self._packing = packing
        self._forward = ForwardReader(self._open)
        self.rows = self._forward.rows

    def unit_bytes(self, entry: ObjectEntry) -> float:  # noqa: ARG002
        """Offsets are bytes."""
        return 1.0

    def scan(self, entry: ObjectEntry, first_row: int) -> Iterator[tuple[str | None, int]]:
        """The id of each row, and the offset of the byte behind it."""
        return ((item.custom_id, end) for item, end in self._open(entry, first_row, 0))

    def _open(self, entry: ObjectEntry, first_row: int, start: int) -> Iterator[tuple[Item, int]]:
        # the size that a plan's piece has is of what it unpacks to
        size = self._store.stat(entry.url).size
        packed = windows(self._store, entry.url, entry.etag, 0, size)
        data = _behind(unpacked(packed, self._packing, entry.url), start)
        return rows_of(data, self._columns, first_row, start, self._parse)


def _behind(data: Iterable[bytes], start: int) -> Iterator[bytes]:
    """Leave out the first `start` bytes."""
    for window in data:
        if start < len(window):
            yield window[start:]
        start = max(start - len(window), 0)


def rows_of(
    data: Iterable[bytes], columns: Columns, first_row: int, start: int, parse: LineParser | None = None
) -> Iterator[tuple[Item, int]]:
    """
    The rows of lines that begin at byte `start` of an object, each with the offset of the byte behind it.

    A blank line between rows is a fault; behind the last row it is nothing.
    """
    parse = parse or parse_document
    row, position = first_row, start
    # ends of blank lines of which nobody knows yet whether a row comes behind them
    blank: list[int] = []
    for lines, num_ends in _lines(data, columns.max_bytes):
        for line in lines:
            content = line.removeprefix(_BOM) if position == 0 and isinstance(line, bytes) else line
            position += len(line) + num_ends
            if isinstance(content, bytes) and (not content or content.isspace()):
                blank.append(position)
                continue
            for end in blank:
                yield fault(row, "blank_line", "a blank line between rows: want one JSON object a line"), end
                row += 1
            blank.clear()
            yield parse(content, columns, row), position
            row += 1


def _lines(data: Iterable[bytes], max_bytes: int) -> Iterator[tuple[list[bytes | LongLine], int]]:
    """Lines, and how many bytes end each of them: the last one may have no end."""
    splitter = LineSplitter(max_bytes)
    for window in data:
        yield splitter.feed(window), 1
    yield splitter.finish(), 0


def parse_document(line: bytes | LongLine, columns: Columns, row: int) -> Item:
    """One line as a document, or what is wrong with it."""
    if isinstance(line, LongLine):
        return columns.too_long(row, None, len(line))
    try:
        values = decode(line.decode())
    except UnicodeDecodeError as error:
        return fault(row, "invalid_encoding", f"byte {error.start} of the line is no UTF-8: {error.reason}")
    except (ValueError, RecursionError) as error:
        return fault(row, "invalid_json", reason(error))
    if type(values) is not dict:
        return fault(row, "not_an_object", f"a {type(values).__name__}: want a JSON object with {columns.text!r}")
    # half of a pair, as an escape: no text that could be sent or written
    if b"\\u" in line and not is_text(values):
        return fault(row, "invalid_encoding", "an escape is half of a surrogate pair")
    return columns.item(values, row)
