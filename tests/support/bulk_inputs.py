"""Inputs of bulk jobs in all formats, and what is read of them."""

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from producers.bulk.chunks import Chunk
from producers.bulk.rows import Document, RowFault
from producers.bulk.sources import Source

Save = Callable[[Path, list[dict[str, object]]], Path]


def jsonl(rows: list[dict[str, object]]) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def save_jsonl(folder: Path, rows: list[dict[str, object]]) -> Path:
    path = folder / "in.jsonl"
    path.write_bytes(jsonl(rows))
    return path


def save_gzip(folder: Path, rows: list[dict[str, object]]) -> Path:
    """Two members, as appending to such a file makes."""
    path = folder / "in.jsonl.gz"
    data = jsonl(rows)
    path.write_bytes(gzip.compress(data[: len(data) // 3]) + gzip.compress(data[len(data) // 3 :]) + b"\0" * 512)
    return path


def save_zstd(folder: Path, rows: list[dict[str, object]]) -> Path:
    """Three frames: one of unknown size, one that is to be skipped, and one more."""
    path = folder / "in.jsonl.zst"
    data = jsonl(rows)
    packer = zstandard.ZstdCompressor(write_checksum=True)
    stream = packer.compressobj()
    first = stream.compress(data[: len(data) // 3]) + stream.flush()
    skipped = b"\x50\x2a\x4d\x18\x04\x00\x00\x00skip"
    path.write_bytes(first + skipped + packer.compress(data[len(data) // 3 :]))
    return path


def save_parquet(folder: Path, rows: list[dict[str, object]]) -> Path:
    path = folder / "in.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=37)
    return path


FORMATS: list[Save] = [save_jsonl, save_gzip, save_zstd, save_parquet]


def documents(number: int, seed: int = 0) -> list[dict[str, object]]:
    rng = random.Random(seed)
    words = ["a\u2028b", "é😀", "plain", "c\nd", " "]
    return [
        {"custom_id": f"id-{row}", "text": "x" + " ".join(rng.choices(words, k=rng.randrange(30))), "n": row}
        for row in range(number)
    ]


def read_all(source: Source, chunks: list[Chunk]) -> list[Document | RowFault]:
    return [item for chunk in chunks for item in source.read(chunk)]


def counted_ranges(source: Source, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all windows that are read from now on."""
    store = source._location.store
    sizes: list[int] = []
    get_range = store.get_range

    def counting(url: str, start: int, length: int, etag: str | None = None) -> bytes:
        data = get_range(url, start, length, etag)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(store, "get_range", counting)
    return sizes
