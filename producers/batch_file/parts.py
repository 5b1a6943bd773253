"""
What a chunk of the input came to, as one object; and all of them joined into the two files.

A part has a head of a fixed length, then the lines of the output file, then those of the error file.
It is there whole or not at all, the first who writes it wins, and joining copies ranges of bytes.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from pagemill.errors import ObjectExists
from pagemill.object_store import ObjectStore
from pagemill.objects import ObjectEntry, ObjectWriter
from producers.bulk.io_errors import OutputError
from producers.bulk.windows import windows

HEAD_BYTES = 128

_NAME = re.compile(r"parts/(\d{6,})")


@dataclass(frozen=True, slots=True)
class LineEnd:
    """
    How a line of the input ended.

    Args:
        data: One line of the output file, or of the error file.
    """

    data: bytes
    completed: bool


class Head(BaseModel):
    """Lines of a part with and without a response, and the bytes of the first kind."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    completed: int
    failed: int
    output_bytes: int

    def packed(self) -> bytes:
        return self.model_dump_json().encode().ljust(HEAD_BYTES - 1) + b"\n"


def write_part(store: ObjectStore, index: int, ends: Sequence[LineEnd]) -> None:
    """Write what became of a chunk's lines, in their order; a part that is there already stays."""
    output = b"".join(end.data for end in ends if end.completed)
    errors = b"".join(end.data for end in ends if not end.completed)
    completed = sum(end.completed for end in ends)
    head = Head(completed=completed, failed=len(ends) - completed, output_bytes=len(output))
    try:
        store.put_if_absent(f"parts/{index:06d}", head.packed() + output + errors)
    except ObjectExists:
        return


def list_parts(store: ObjectStore) -> Iterator[tuple[int, ObjectEntry]]:
    """The parts that are there, by the numbers of their chunks."""
    for entry in store.list("parts/"):
        if found := _NAME.fullmatch(entry.name):
            yield int(found[1]), entry


def read_head(store: ObjectStore, entry: ObjectEntry) -> Head:
    """
    Raises:
        OutputError: it is no part.
    """
    try:
        return Head.model_validate_json(store.get_range(entry.url, 0, HEAD_BYTES, entry.etag))
    except ValidationError as error:
        raise OutputError(f"{entry.url} is no part of an output: {error}") from error


def copy_lines(
    store: ObjectStore, parts: Iterable[ObjectEntry], kind: Literal["output", "errors"], writer: ObjectWriter
) -> None:
    """Put the lines of one kind of all parts one behind the other."""
    for entry in parts:
        middle = HEAD_BYTES + read_head(store, entry).output_bytes
        start, end = (HEAD_BYTES, middle) if kind == "output" else (middle, entry.size)
        for window in windows(store, entry.url, entry.etag, start, end):
            writer.write(window)
