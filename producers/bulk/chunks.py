"""Where a chunk of the input lies: what a plan is made of."""

from pydantic import BaseModel, ConfigDict


class Piece(BaseModel):
    """
    Consecutive rows of one object.

    Args:
        etag: The object's when it was planned; reading another one raises ObjectChanged.
        name: The object's name below the input.
        format: How the object is read: jsonl, jsonl.gz, jsonl.zst, parquet or text.
        start: Where the rows begin: a byte for JSONL, of what is unpacked for packed JSONL, a row for Parquet.
        end: Where they end, exclusive.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    etag: str
    name: str
    format: str
    start: int
    end: int
    num_rows: int


class Chunk(BaseModel):
    """
    Consecutive rows of the input that can be read again alone; a JSON value.

    Args:
        index: Its number in the plan, from 0.
        first_row: The first row's number in the whole input.
        size_bytes: Of the content that it covers, unpacked; for Parquet its share of all rows.
        duplicates: Numbers of those of its rows whose custom_id an earlier row of the input has.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    index: int
    first_row: int
    num_rows: int
    size_bytes: int
    pieces: tuple[Piece, ...]
    duplicates: tuple[int, ...] = ()
