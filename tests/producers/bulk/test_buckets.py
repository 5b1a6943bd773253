"""Bulk input and output in a bucket of a real S3-compatible server, with faults on the way."""

import gzip
import io
import json
from collections.abc import Iterator
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pagemill.ids import uuid7
from pagemill.object_store import ObjectStore, open_store
from producers.bulk.locations import open_folder
from producers.bulk.manifest import Manifest, commit_manifest, read_manifest, verify_manifest
from producers.bulk.rows import Document, OutputRow
from producers.bulk.shards import list_shards, read_shard, write_shard
from producers.bulk.sources import open_source
from tests.support.s3_proxy import Request, S3Proxy
from tests.support.seaweed import Seaweed


@pytest.fixture
def folder() -> str:
    return f"bulk-{uuid7()}"


@pytest.fixture
def proxy(bucket: Seaweed) -> Iterator[S3Proxy]:
    with S3Proxy(bucket.endpoint) as proxy:
        yield proxy
        assert 0 == proxy.num_faults_left


@pytest.fixture
def store(bucket: Seaweed, folder: str) -> ObjectStore:
    """The test's folder, without faults."""
    return open_store(bucket.url(folder))


def lines(first: int, number: int, size: int = 10) -> bytes:
    rows = ({"custom_id": f"id-{row}", "text": "é" * size} for row in range(first, first + number))
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def test_an_input_of_several_formats(bucket: Seaweed, store: ObjectStore, folder: str) -> None:
    """
    Lines, packed lines and a table below one prefix are one input; names may hold anything.
    """
    table = io.BytesIO()
    pq.write_table(pa.table({"custom_id": ["t1", "t2"], "text": ["x", "y"]}), table)
    store.put("in/a b é%20#1.jsonl", lines(0, 100))
    store.put("in/deep/b.jsonl.gz", gzip.compress(lines(100, 100)))
    store.put("in/deep/c.parquet", table.getvalue())
    store.put("in/_SUCCESS", b"")
    source = open_source(bucket.url(f"{folder}/in"))

    chunks = list(source.chunks(30))
    ids = [item.custom_id for chunk in chunks for item in source.read(chunk) if isinstance(item, Document)]

    assert sorted([*(f"id-{row}" for row in range(200)), "t1", "t2"]) == sorted(ids)
    assert [30] * 6 + [22] == [chunk.num_rows for chunk in chunks]
    one = open_source(bucket.url(f"{folder}/in/a b é%20#1.jsonl"))
    assert 100 == sum(chunk.num_rows for chunk in one.chunks(1000))
    some = open_source(bucket.url(f"{folder}/in/**/*.jsonl*"))
    assert 200 == sum(chunk.num_rows for chunk in some.chunks(1000))


def test_an_input_behind_a_bad_network(bucket: Seaweed, proxy: S3Proxy, store: ObjectStore, folder: str) -> None:
    """
    Reads that break off and a store that says SlowDown change no row.
    """
    store.put("in.jsonl", lines(0, 2000, 500))

    def is_read(request: Request) -> bool:
        return request.method == "GET" and "Range" in request.headers

    proxy.cut(700_001, is_read, times=2)
    proxy.refuse("SlowDown", 503, is_read)
    proxy.cut(12_345, is_read, times=1)
    source = open_source(bucket.url(f"{folder}/in.jsonl", proxy.endpoint))

    chunks = list(source.chunks(700))
    items = [item for chunk in chunks for item in source.read(chunk)]

    assert [Document(row, f"id-{row}", "é" * 500) for row in range(2000)] == items


def test_an_output_in_a_bucket(bucket: Seaweed, proxy: S3Proxy, folder: str) -> None:
    """
    Shards, their errors and the manifest are written through faults, found again, and are what they should be.
    """
    out = open_folder(bucket.url(f"{folder}/out", proxy.endpoint))
    rows = [OutputRow(custom_id=f"id-{row}", row=row, status="done", text=f"text {row}") for row in range(200)]
    proxy.refuse("InternalError", 500, lambda request: request.method == "PUT" and "part-000001" in request.path)

    shards = [write_shard(out, index, rows[100 * index : 100 * index + 100], errors=True) for index in range(2)]
    times = {"started_at": datetime.now(UTC), "ended_at": datetime.now(UTC)}
    made = Manifest.of(shards, source="s", source_fingerprint="f", config_fingerprint="c", format="jsonl.zst", **times)
    commit_manifest(out, made)

    direct = open_folder(bucket.url(f"{folder}/out"))
    assert [0, 1] == sorted(index for index, _ in list_shards(direct))
    assert shards == [read_shard(direct, index) for index in range(2)]
    assert made == read_manifest(direct) == commit_manifest(direct, made)
    assert [] == list(verify_manifest(direct, made))
    assert shards[0] == write_shard(direct, 0, rows[:50])


def test_a_shard_whose_answer_was_lost(bucket: Seaweed, proxy: S3Proxy, folder: str) -> None:
    """
    A shard that was written though nobody was told so is found by the second attempt, and is the same.
    """
    out = open_folder(bucket.url(folder, proxy.endpoint))
    proxy.lose_reply(lambda request: request.method == "PUT")

    shard = write_shard(out, 0, [OutputRow(custom_id="a", row=0, status="done", text="t")])

    assert 2 == sum(request.method == "PUT" for request in proxy.requests)
    assert shard == read_shard(out, 0)
