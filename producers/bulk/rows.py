"""What a bulk job reads and writes, row by row."""

from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

FaultCode = Literal[
    "invalid_json",
    "not_an_object",
    "missing_text",
    "empty_text",
    "blank_line",
    "invalid_encoding",
    "invalid_custom_id",
    "line_too_long",
    "duplicate_custom_id",
]


@dataclass(frozen=True, slots=True)
class Document:
    """
    One row that can be worked on.

    Args:
        row: Its number in the whole input, from 0; rows with faults and blank lines between rows count.
        custom_id: As given; else "row-<row>", or a text file's path below the input folder.
        text: Never blank.
        fields: The other columns as JSON values, without the text's and the id's.
    """

    row: int
    custom_id: str
    text: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RowFault:
    """
    One row that cannot be worked on, and why; the rest of the input can.

    Args:
        row: As a Document's.
        custom_id: None where the row has none that can be read.
        message: What is wrong and what is wanted; holds nothing of the row's text.
    """

    row: int
    custom_id: str | None
    code: FaultCode
    message: str


class RowError(BaseModel):
    """Why a row has no answer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    code: str
    message: str


class RowUsage(BaseModel):
    """What a row took, all jobs and all tries of it added up."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def __add__(self, other: "RowUsage") -> "RowUsage":
        mine, others = self.model_dump(), other.model_dump()
        return RowUsage(**{name: number + others[name] for name, number in mine.items()})


class OutputRow(BaseModel):
    """
    One line of the output.

    Args:
        custom_id: None for a row whose input has none that can be read.
        row: The input row's number.
        output: The answer as JSON, where a template asks for JSON; `text` is the answer as it came.
        finish_reason: Of the last job of the row: stop, length.
        metadata: Of the user; values are text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    custom_id: str | None
    row: int
    status: Literal["done", "failed", "cancelled", "expired"]
    text: str | None = None
    output: Any = None
    error: RowError | None = None
    usage: RowUsage = RowUsage()
    finish_reason: str | None = None
    metadata: dict[str, str] = {}

    def after(self, earlier: "OutputRow") -> "OutputRow":
        """The row with what an earlier try of it took."""
        return self.model_copy(update={"usage": earlier.usage + self.usage})
