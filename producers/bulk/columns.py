"""Make a document of a row's columns, or say what is wrong with the row."""

from dataclasses import dataclass
from typing import Any

from producers.bulk.rows import Document, FaultCode, RowFault

Item = Document | RowFault

MAX_ID_CHARS = 512


@dataclass(frozen=True, slots=True)
class Columns:
    """
    Which columns of a row mean what.

    Args:
        text: The column that is worked on.
        id: The column that names the row; a row without one is named by its number.
        max_bytes: The longest line, or text file.
    """

    text: str = "text"
    id: str = "custom_id"
    max_bytes: int = 4 * 1024 * 1024

    def item(self, values: dict[str, Any], row: int) -> Item:
        """
        The row as a document; takes its text and id out of `values`, which the document keeps.
        """
        custom_id = values.pop(self.id, None)
        if type(custom_id) is not str:
            if custom_id is None:
                custom_id = f"row-{row}"
            elif type(custom_id) is int:
                custom_id = str(custom_id)
            else:
                kind = type(custom_id).__name__
                return RowFault(row, None, "invalid_custom_id", f"{self.id!r} is a {kind}: want text or a whole number")
        if not 0 < len(custom_id) <= MAX_ID_CHARS:
            message = f"{self.id!r} has {len(custom_id):,} characters: want 1 to {MAX_ID_CHARS}"
            return RowFault(row, None, "invalid_custom_id", message)
        text = values.pop(self.text, None)
        if type(text) is not str:
            kind = "is not there" if text is None else f"is a {type(text).__name__}"
            return RowFault(row, custom_id, "missing_text", f"{self.text!r} {kind}: want text")
        if not text or text.isspace():
            return RowFault(row, custom_id, "empty_text", f"{self.text!r} is blank: want text")
        return Document(row, custom_id, text, values)

    def too_long(self, row: int, custom_id: str | None, num_bytes: int) -> RowFault:
        message = f"{num_bytes:,} bytes: want no more than {self.max_bytes:,}"
        return RowFault(row, custom_id, "line_too_long", message)


def fault(row: int, code: FaultCode, message: str) -> RowFault:
    """A fault of a row whose id cannot be read."""
    return RowFault(row, None, code, message)
