"""Turn output rows into the bytes of one object, row by row."""

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import IO, Any, Literal, Protocol, cast

from pagemill.objects import ObjectWriter
from producers.bulk.rows import OutputRow

ShardFormat = Literal["jsonl", "jsonl.zst", "parquet"]

# rows of one row group of Parquet: what is held before it is written
_GROUP_ROWS = 1000


class Encoder(Protocol):
    """Takes rows in order."""

    def write(self, row: OutputRow) -> None: ...


class Digester(io.RawIOBase):
    """A file that passes on what is written to an object, and knows its hash and size."""

    def __init__(self, writer: ObjectWriter) -> None:
        super().__init__()
        self._writer = writer
        self._digest = sha256()
        self.size_bytes = 0

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size_bytes

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._writer.write(view)
        self._digest.update(view)
        self.size_bytes += len(view)
        return len(view)


@contextmanager
def open_encoder(file: Digester, format: ShardFormat) -> Iterator[Encoder]:  # noqa: A002
    """An encoder whose last bytes are in the file when it is left."""
    if format == "jsonl":
        yield _Jsonl(file)
    elif format == "jsonl.zst":
        import zstandard

        # one thread and one level: the same rows give the same bytes
        packer = zstandard.ZstdCompressor(level=3, write_checksum=True)
        with packer.stream_writer(cast(IO[bytes], file), closefd=False) as packed:
            yield _Jsonl(packed)
    else:
        import pyarrow.parquet as pq

        with pq.ParquetWriter(file, parquet_schema(), compression="zstd") as tables:
            encoder = _Parquet(tables)
            yield encoder
            encoder.flush()


class _Jsonl:
    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, row: OutputRow) -> None:
        self._file.write(row.model_dump_json().encode() + b"\n")


class _Parquet:
    def __init__(self, tables: Any) -> None:
        self._tables = tables
        self._rows: list[dict[str, Any]] = []

    def write(self, row: OutputRow) -> None:
        values = row.model_dump()
        # any JSON value, and any names: no fixed type would hold them
        values["output"] = None if row.output is None else json.dumps(row.output, ensure_ascii=False)
        values["metadata"] = list(row.metadata.items())
        self._rows.append(values)
        if len(self._rows) == _GROUP_ROWS:
            self.flush()

    def flush(self) -> None:
        import pyarrow as pa

        if self._rows:
            self._tables.write_table(pa.Table.from_pylist(self._rows, schema=parquet_schema()))
            self._rows = []


def parquet_schema() -> Any:
    """The columns of a Parquet shard: the same whatever its rows hold, so that shards can be read as one table."""
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("custom_id", pa.string()),
            pa.field("row", pa.int64(), nullable=False),
            pa.field("status", pa.string(), nullable=False),
            pa.field("text", pa.string()),
            pa.field("output", pa.string()),
            pa.field("error", pa.struct([("code", pa.string()), ("message", pa.string())])),
            pa.field(
                "usage",
                pa.struct(
                    [("prompt_tokens", pa.int64()), ("completion_tokens", pa.int64()), ("cached_tokens", pa.int64())]
                ),
            ),
            pa.field("finish_reason", pa.string()),
            pa.field("metadata", pa.map_(pa.string(), pa.string())),
        ]
    )
