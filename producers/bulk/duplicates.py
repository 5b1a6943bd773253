"""Find the ids that come again among any number, in bounded memory."""

import tempfile
from collections.abc import Iterator
from hashlib import blake2b
from typing import Self

# a power of two; each has one open file once it outgrows its memory
_NUM_PARTS = 64

# of one part that stays in memory
_PART_BYTES = 256 * 1024

_DIGEST_BYTES = 16
_ROW_BYTES = 6


class DuplicateFinder:
    """
    Takes ids row by row, and says then which rows have an id that an earlier row has.

    Ids are kept as 128-bit digests, in parts by their first bits; large parts lie in temporary files. Two ids of one
    digest are not to be met with in this world, nor can they be made on purpose: equal digests are equal ids.
    16 MiB at most are kept in memory for it, 22 bytes an id on the disk, and one part at a time to look through.
    """

    def __init__(self) -> None:
        self._parts = [tempfile.SpooledTemporaryFile(max_size=_PART_BYTES) for _ in range(_NUM_PARTS)]
        self._writes = [part.write for part in self._parts]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for part in self._parts:
            part.close()

    def add(self, custom_id: str, row: int) -> None:
        digest = blake2b(custom_id.encode(), digest_size=_DIGEST_BYTES).digest()
        self._writes[digest[0] % _NUM_PARTS](digest + row.to_bytes(_ROW_BYTES))

    def find(self, num_rows: int) -> "RowSet":
        """
        The rows that come second or later.

        Args:
            num_rows: One more than the highest row.
        """
        later = RowSet(num_rows)
        for part in self._parts:
            part.seek(0)
            seen: set[bytes] = set()
            # rows were added in order, so that the first of an id is the first that is met
            while records := part.read(4096 * (_DIGEST_BYTES + _ROW_BYTES)):
                for start in range(0, len(records), _DIGEST_BYTES + _ROW_BYTES):
                    digest = records[start : start + _DIGEST_BYTES]
                    if digest in seen:
                        end = start + _DIGEST_BYTES
                        later.add(int.from_bytes(records[end : end + _ROW_BYTES]))
                    else:
                        seen.add(digest)
        return later


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
