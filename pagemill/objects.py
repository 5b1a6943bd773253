"""What a store says of an object, and how one is written in pieces."""

from dataclasses import dataclass
from typing import Protocol, Self


@dataclass(frozen=True, slots=True)
class ObjectStat:
    """
    An object as it is now.

    Args:
        size: In bytes.
        etag: Another one when the content is another; opaque.
    """

    size: int
    etag: str


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """
    One object of a listing.

    Args:
        name: Inside the store, as `put` takes it.
        size: In bytes.
    """

    name: str
    url: str
    size: int
    etag: str


class ObjectWriter(Protocol):
    """
    Writes one object from its beginning to its end.

    Entered, it takes bytes. Left in order, the object is there, whole; left by an error, nothing is, and what was
    there under that name still is.
    """

    @property
    def url(self) -> str: ...

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Take more of the object; return how many bytes that was."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None: ...
