"""Read an object in windows, unpacked where it is packed."""

import io
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from pagemill.object_store import ObjectStore
from pagemill.objects import ObjectStat
from producers.bulk.io_errors import SourceError

# one request to a bucket; large enough that its round trip is nothing
WINDOW_BYTES = 8 * 1024 * 1024

# unpacked bytes that are held at once, however well they were packed
_UNPACKED_BYTES = 1024 * 1024

# what a gzip stream has taken of so much is copied away at each pause
_GZIP_BYTES = 64 * 1024

# Zstandard is given so little at once: four bytes may mean 128 KiB, and their unpacking cannot be paused
_ZSTD_BYTES = 512


def windows(store: ObjectStore, url: str, etag: str, start: int, end: int) -> Iterator[bytes]:
    """
    The bytes from `start` to `end`, in order.

    Raises:
        ObjectChanged: the object has another etag.
    """
    while start < end:
        window = store.get_range(url, start, min(WINDOW_BYTES, end - start), etag)
        if not window:
            return
        yield window
        start += len(window)


def unpacked(packed: Iterator[bytes], kind: str, url: str) -> Iterator[bytes]:
    """
    The content of gzip ("gz") or Zstandard ("zst") data, of all members or frames of it, in small windows.

    Raises:
        SourceError: the data is damaged, or ends in the middle.
    """
    unpack: Callable[[Iterator[bytes]], Iterator[bytes]] = {"gz": _gunzip, "zst": _unzstd}[kind]
    try:
        yield from unpack(packed)
    except _Damaged as damage:
        raise SourceError(f"{url} is no whole {kind} file: {damage}") from None


class _Damaged(Exception):
    pass


def _gunzip(packed: Iterator[bytes]) -> Iterator[bytes]:
    member: Any = None
    for piece in _cut(packed, _GZIP_BYTES):
        data = piece
        while data:
            # zeros may fill the end up, as tapes want it
            data = data if member else data.lstrip(b"\0")
            if not data:
                break
            member = member or zlib.decompressobj(wbits=31)
            try:
                out = member.decompress(data, _UNPACKED_BYTES)
            except zlib.error as error:
                raise _Damaged(str(error)) from None
            if out:
                yield out
            data = member.unconsumed_tail
            if member.eof:
                data, member = member.unused_data, None
    if member is not None:
        raise _Damaged("it ends in the middle")


def _unzstd(packed: Iterator[bytes]) -> Iterator[bytes]:
    import zstandard

    unpacker = zstandard.ZstdDecompressor()
    frame: Any = None
    for piece in _cut(packed, _ZSTD_BYTES):
        data = piece
        while data:
            frame = frame or unpacker.decompressobj()
            try:
                out = frame.decompress(data)
            except zstandard.ZstdError as error:
                raise _Damaged(str(error)) from None
            if out:
                yield out
            data = b""
            if frame.eof:
                data, frame = frame.unused_data, None
    if frame is not None:
        raise _Damaged("it ends in the middle")


def _cut(data: Iterator[bytes], num_bytes: int) -> Iterator[bytes]:
    for window in data:
        for start in range(0, len(window), num_bytes):
            yield window[start : start + num_bytes]


class RangeFile(io.RawIOBase):
    """An object as a file that can be read anywhere."""

    def __init__(self, store: ObjectStore, url: str, stat: ObjectStat) -> None:
        super().__init__()
        self._store = store
        self._url = url
        self._stat = stat
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._stat.size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        left = max(self._stat.size - self._position, 0)
        length = left if size is None or size < 0 else min(size, left)
        data = self._store.get_range(self._url, self._position, length, self._stat.etag) if length else b""
        self._position += len(data)
        return data
