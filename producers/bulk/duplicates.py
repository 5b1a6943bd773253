"""Find the ids that come again among any number, in bounded memory."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from hashlib import blake2b
from typing import IO, Self

# a power of two; each has one open file once it outgrows its memory
_NUM_PARTS = 64

# of one part that stays in memory
_PART_BYTES = 256 * 1024

_DIGEST_BYTES = 16
_RECORD_BYTES = _DIGEST_BYTES + 6
_READ_BYTES = 8192 * _RECORD_BYTES


class DuplicateFinder:
    """
    Takes ids row by row, and says then which rows have an id that an earlier row has.

    Ids are kept as 128-bit digests, in parts by their first bits; what a part has more than a little lies in a
    temporary file. Equal digests are equal ids: two ids of one digest are not to be met with in this world, nor can
    they be made on purpose. 16 MiB at most are kept in memory, 22 bytes an id on the disk, and the digests of one part
    at a time to look through them.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._parts = [_Part(self._stack) for _ in range(_NUM_PARTS)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, custom_id: str, row: int) -> None:
        """Take the id of a row; rows come in order."""
        record = blake2b(custom_id.encode(), digest_size=_DIGEST_BYTES).digest() + row.to_bytes(6, "big")
        part = self._parts[record[0] % _NUM_PARTS]
        part.records += record
        if len(part.records) >= _PART_BYTES:
            part.spill()

    def find(self, num_rows: int) -> "RowSet":
        """
        The rows that come second or later.

        Args:
            num_rows: One more than the highest row.
        """
        later = RowSet(num_rows)
        for part in self._parts:
            seen: set[bytes] = set()
            # rows were added in order, so that the first of an id is the first that is met
            for records in part.read():
                for start in range(0, len(records), _RECORD_BYTES):
                    digest = records[start : start + _DIGEST_BYTES]
                    if digest in seen:
                        later.add(int.from_bytes(records[start + _DIGEST_BYTES : start + _RECORD_BYTES], "big"))
                    else:
                        seen.add(digest)
        return later


class _Part:
    """Records whose digests begin alike: the last ones in memory, those before in a file."""

    def __init__(self, stack: ExitStack) -> None:
        self.records = bytearray()
        self._stack = stack
        self._file: IO[bytes] | None = None

    def spill(self) -> None:
        if self._file is None:
            self._file = self._stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 (closed with the stack)
        self._file.write(self.records)
        self.records.clear()

    def read(self) -> Iterator[bytes]:
        if self._file is not None:
            self._file.seek(0)
            while records := self._file.read(_READ_BYTES):
                yield records
        yield bytes(self.records)
        self.records.clear()


class RowSet:
    """A set of rows: one bit a row of the whole input, however many are in it."""

    def __init__(self, num_rows: int) -> None:
        self._bits = bytearray(num_rows // 8 + 1)
        self._any = False

    def add(self, row: int) -> None:
        self._bits[row >> 3] |= 1 << (row & 7)
        self._any = True

    def within(self, first: int, num_rows: int) -> Iterator[int]:
        """Those of `num_rows` rows from `first`, in order."""
        if not self._any:
            return
        for row in range(first, first + num_rows):
            if self._bits[row >> 3] >> (row & 7) & 1:
                yield row
