"""Read output rows back."""

import json
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

from pydantic import ValidationError

from pagemill.object_store import ObjectStore
from pagemill.objects import ObjectStat
from producers.bulk.encoders import ShardFormat
from producers.bulk.io_errors import OutputError, SourceError
from producers.bulk.rows import OutputRow
from producers.bulk.windows import RangeFile, unpacked, windows

_GROUP_ROWS = 1000


def read_rows(
    store: ObjectStore,
    url: str,
    format: ShardFormat,  # noqa: A002
    stat: ObjectStat | None = None,
) -> Iterator[OutputRow]:
    """
    The rows of a shard, in order, in bounded memory.

    Args:
        stat: What the store says of it, where that is known.

    Raises:
        ObjectNotFound: it is not there.
        OutputError: it is no shard of that format.
    """
    stat = stat or store.stat(url)
    try:
        yield from _parquet_rows(store, url, stat) if format == "parquet" else _json_rows(store, url, format, stat)
    except (ValidationError, SourceError, ValueError) as error:
        raise OutputError(f"{url} is no shard of {format}: {error}") from error


def digest_of(store: ObjectStore, url: str, stat: ObjectStat) -> str:
    """The SHA-256 of an object, as hex digits."""
    digest = sha256()
    for window in windows(store, url, stat.etag, 0, stat.size):
        digest.update(window)
    return digest.hexdigest()


def _json_rows(store: ObjectStore, url: str, format: ShardFormat, stat: ObjectStat) -> Iterator[OutputRow]:  # noqa: A002
    data = windows(store, url, stat.etag, 0, stat.size)
    begun = b""
    for window in data if format == "jsonl" else unpacked(data, "zst", url):
        *lines, begun = (begun + window).split(b"\n")
        for line in lines:
            yield OutputRow.model_validate_json(line)
    if begun:
        raise ValueError("its last line has no end")


def _parquet_rows(store: ObjectStore, url: str, stat: ObjectStat) -> Iterator[OutputRow]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(RangeFile(store, url, stat), buffer_size=1024 * 1024, pre_buffer=False) as table:
        for batch in table.iter_batches(batch_size=_GROUP_ROWS):
            for values in batch.to_pylist():
                yield OutputRow.model_validate(_as_row(values))


def _as_row(values: dict[str, Any]) -> dict[str, Any]:
    output = values["output"]
    return values | {
        "output": None if output is None else json.loads(output),
        "metadata": dict(values["metadata"] or ()),
    }
