"""Each chunk's output is one object, whole or not there, and the same whoever writes it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pagemill.errors import ObjectNotFound
from pagemill.file_store import FileWriter
from pagemill.object_store import ObjectStore
from producers.bulk.decoders import read_rows
from producers.bulk.encoders import ShardFormat, parquet_schema
from producers.bulk.io_errors import OutputError
from producers.bulk.locations import open_folder
from producers.bulk.rows import OutputRow, RowError, RowUsage
from producers.bulk.shards import list_shards, read_shard, shard_name, write_shard

FORMATS: list[ShardFormat] = ["jsonl", "jsonl.zst", "parquet"]


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_folder(str(tmp_path / "out"))


def answers(number: int = 10, *, failed: bool = True) -> list[OutputRow]:
    """Rows of all kinds; every third has failed."""
    return [
        OutputRow(custom_id=f"a{row}", row=row, status="failed", error=RowError(code="too_long", message="é\n"))
        if failed and row % 3 == 2
        else OutputRow(
            custom_id=f"a{row}",
            row=row,
            status="done",
            text=f"text\u2028{row}\n😀",
            output={"tags": [row, None, "x"], "deep": {"a": 1.5}} if row % 2 else None,
            usage=RowUsage(prompt_tokens=row, completion_tokens=2 * row, cached_tokens=1),
            finish_reason="stop",
            metadata={"tenant": "b", "é": str(row)} if row % 4 else {},
        )
        for row in range(number)
    ]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("number", [0, 1, 2500])
def test_what_is_written_is_read(store: ObjectStore, format: ShardFormat, number: int) -> None:  # noqa: A002
    """
    Rows come back as they were, in their order, and the shard says what they add up to.
    """
    rows = answers(number)

    shard = write_shard(store, 3, iter(rows), format=format)

    assert rows == list(read_rows(store, shard.url, format))
    data = store.get(shard.url)
    assert (3, shard_name(3, format), store.url(shard.name)) == (shard.index, shard.name, shard.url)
    assert (sha256(data).hexdigest(), len(data)) == (shard.sha256, shard.size_bytes)
    failed = sum(row.status == "failed" for row in rows)
    assert (number, failed) == (shard.num_rows, shard.num_failed)
    assert sum(row.usage.completion_tokens for row in rows) == shard.usage.completion_tokens
    assert shard == read_shard(store, 3, format)


@pytest.mark.parametrize("format", FORMATS)
def test_the_same_rows_are_the_same_bytes(tmp_path: Path, format: ShardFormat) -> None:  # noqa: A002
    """
    A chunk that is done again elsewhere gives the same object.
    """
    shards = [write_shard(open_folder(str(tmp_path / name)), 0, answers(100), format=format) for name in ("a", "b")]

    assert shards[0].sha256 == shards[1].sha256


@pytest.mark.parametrize("format", FORMATS)
def test_the_first_who_writes_a_shard_wins(store: ObjectStore, format: ShardFormat) -> None:  # noqa: A002
    """
    A shard never changes: whoever writes it again is told what is there.
    """
    first = write_shard(store, 0, answers(10), format=format)

    assert first == write_shard(store, 0, answers(12), format=format)
    assert 10 == len(list(read_rows(store, first.url, format)))


def test_a_shard_that_is_to_be_replaced(store: ObjectStore) -> None:
    """
    Failed rows that were run again take the old shard's place, and that of its errors.
    """
    write_shard(store, 0, answers(10), errors=True)
    second = write_shard(store, 0, answers(10, failed=False), errors=True, replace=True)

    assert (0, second) == (second.num_failed, read_shard(store, 0))
    assert [] == list(list_shards(store, kind="errors"))


def test_errors_stay_until_their_shard_is_replaced(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A rerun that ends just before its shard takes the old one's place leaves the old one's errors: they run again.
    """
    write_shard(store, 0, answers(10), errors=True)

    def killed(writer: FileWriter) -> None:  # noqa: ARG001
        raise KeyboardInterrupt

    monkeypatch.setattr(FileWriter, "_name", killed)
    with pytest.raises(KeyboardInterrupt):
        write_shard(store, 0, answers(10, failed=False), errors=True, replace=True)

    assert 3 == read_shard(store, 0).num_failed
    assert [0] == [index for index, _ in list_shards(store, kind="errors")]


@pytest.mark.parametrize("format", FORMATS)
def test_failed_rows_have_an_object_of_their_own(store: ObjectStore, format: ShardFormat) -> None:  # noqa: A002
    """
    Those who look for failures need not read what was done; a chunk without any has no such object.
    """
    rows = answers(10)
    write_shard(store, 0, rows, format=format, errors=True)
    write_shard(store, 1, answers(10, failed=False), format=format, errors=True)

    [(index, entry)] = list_shards(store, format, kind="errors")

    assert 0 == index
    assert [row for row in rows if row.status != "done"] == list(read_rows(store, entry.url, format))


def test_errors_belong_to_the_shard_that_stays(store: ObjectStore) -> None:
    """
    Whoever writes a shard second leaves the errors of the first one.
    """
    write_shard(store, 0, answers(10), errors=True)
    write_shard(store, 0, answers(20), errors=True)

    assert [2, 5, 8] == [row.row for row in read_rows(store, store.url(shard_name(0, kind="errors")), "jsonl.zst")]


@pytest.mark.parametrize("format", FORMATS)
def test_a_shard_that_breaks_off_is_not_there(store: ObjectStore, format: ShardFormat) -> None:  # noqa: A002
    """
    An error in the middle of a chunk leaves neither rows nor errors of it.
    """

    def broken() -> Iterator[OutputRow]:
        yield from answers(1500)
        raise RuntimeError("the queue is away")

    with pytest.raises(RuntimeError, match="the queue is away"):
        write_shard(store, 0, broken(), format=format, errors=True)

    assert [] == list(store.list())


def test_the_finished_shards(store: ObjectStore) -> None:
    """
    A folder tells which chunks are done, in which format; what else lies there is no shard.
    """
    for index in (0, 7, 1_000_000):
        write_shard(store, index, answers(2))
    write_shard(store, 1, answers(2), format="parquet")
    for name in ("part-x.jsonl.zst", "part-000001.jsonl.zst.tmp", "manifest.json", "deep/part-000002.jsonl.zst"):
        store.put(name, b"")

    assert {0, 7, 1_000_000} == {index for index, _ in list_shards(store)}
    assert {1} == {index for index, _ in list_shards(store, "parquet")}


def test_several_writers_of_one_shard(store: ObjectStore) -> None:
    """
    Of many that write one shard at once, all are told of the one that is there.
    """
    with ThreadPoolExecutor(8) as threads:
        told = list(threads.map(lambda number: write_shard(store, 0, answers(number)), range(1, 17)))

    assert {read_shard(store, 0)} == set(told)


def test_tables_have_one_schema(store: ObjectStore) -> None:
    """
    A Parquet shard has the same columns whatever its rows hold, so that all shards are one table.
    """
    for index, rows in enumerate(([], answers(1), answers(3)[2:])):
        write_shard(store, index, rows, format="parquet")

    schemas = [pq.read_schema(path) for path in sorted(Path(store.url("")[7:]).glob("*.parquet"))]
    assert [parquet_schema()] * 3 == [schema.remove_metadata() for schema in schemas]
    assert "struct<code: string, message: string>" == str(schemas[0].field("error").type)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("data", [b"", b"{}\n", b"garbage"])
def test_what_is_no_shard(store: ObjectStore, format: ShardFormat, data: bytes) -> None:  # noqa: A002
    """
    An object of a shard's name that is none is said to be none; an empty one is a shard of lines without rows.
    """
    store.put(shard_name(0, format), data)

    if data or format == "parquet":
        with pytest.raises(OutputError, match=f"is no shard of {format}"):
            read_shard(store, 0, format)
    else:
        assert 0 == read_shard(store, 0, format).num_rows
    with pytest.raises(ObjectNotFound):
        read_shard(store, 1, format)
