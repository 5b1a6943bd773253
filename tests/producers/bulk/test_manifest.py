"""The manifest is there last, once, and says what is to be found."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from pagemill.object_store import ObjectStore
from producers.bulk.io_errors import OutputError
from producers.bulk.locations import open_folder
from producers.bulk.manifest import MANIFEST_NAME, Manifest, commit_manifest, read_manifest, verify_manifest
from producers.bulk.rows import OutputRow, RowError, RowUsage
from producers.bulk.shards import Shard, write_shard


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_folder(str(tmp_path))


@pytest.fixture
def shards(store: ObjectStore) -> list[Shard]:
    """Two chunks of three rows, of which two have failed."""
    error = RowError(code="x", message="y")
    rows = [
        OutputRow(custom_id=str(row), row=row, status="failed", error=error)
        if row in (1, 5)
        else OutputRow(custom_id=str(row), row=row, status="done", text="t", usage=RowUsage(completion_tokens=10))
        for row in range(6)
    ]
    return [write_shard(store, index, rows[3 * index : 3 * index + 3]) for index in range(2)]


def manifest(shards: list[Shard], *, hour: int = 3, config: str = "config") -> Manifest:
    times = {"started_at": datetime(2026, 11, 30, 1, tzinfo=UTC), "ended_at": datetime(2026, 11, 30, hour, tzinfo=UTC)}
    return Manifest.of(
        shards,
        source="s3://bucket/in",
        source_fingerprint="source",
        config_fingerprint=config,
        format="jsonl.zst",
        details={"date": "2026-11-30"},
        **times,
    )


def test_a_manifest_adds_its_shards_up(shards: list[Shard]) -> None:
    """
    Shards stand in the order of their chunks, with the totals of all.
    """
    made = manifest([shards[1], shards[0]])

    assert shards == list(made.shards)
    assert (6, 2, 40) == (made.num_rows, made.num_failed, made.usage.completion_tokens)


@pytest.mark.parametrize("indexes", [[1], [0, 0], [0, 0, 1]])
def test_a_manifest_with_a_gap_is_none(shards: list[Shard], indexes: list[int]) -> None:
    """
    A chunk that is missing, or there twice, cannot be committed.
    """
    with pytest.raises(OutputError, match="missing or double"):
        manifest([shards[index] for index in indexes])


def test_a_job_is_done_when_its_manifest_is_there(store: ObjectStore, shards: list[Shard]) -> None:
    """
    What was committed is read back; before, there is none.
    """
    assert read_manifest(store) is None

    committed = commit_manifest(store, manifest(shards))

    assert committed == manifest(shards) == read_manifest(store)


def test_a_second_run_finds_the_first_ones_manifest(store: ObjectStore, shards: list[Shard]) -> None:
    """
    The same output committed again, at another time, is the first one's; another output is refused.
    """
    commit_manifest(store, manifest(shards, hour=3))

    assert manifest(shards, hour=3) == commit_manifest(store, manifest(shards, hour=5))
    with pytest.raises(OutputError, match="another output"):
        commit_manifest(store, manifest(shards, config="other"))
    with pytest.raises(OutputError, match="another output"):
        commit_manifest(store, manifest(shards[:1]))


def test_a_manifest_is_checked_against_what_is_there(store: ObjectStore, shards: list[Shard]) -> None:
    """
    Shards that are missing, cut or of other bytes are named, each with what is wrong.
    """
    made = manifest(shards)
    assert [] == list(verify_manifest(store, made))

    data = store.get(shards[0].url)
    store.put(shards[0].name, data[:-1] + b"?")
    store.delete(shards[1].url)

    wrong = list(verify_manifest(store, made))
    assert [True, True] == [
        "part-000000.jsonl.zst has the SHA-256" in wrong[0],
        "000001.jsonl.zst is missing" in wrong[1],
    ]

    store.put(shards[0].name, data[:-1])
    assert "bytes: want" in next(verify_manifest(store, made))


@pytest.mark.parametrize("data", [b"", b"{}", b'{"version": 2}'])
def test_a_manifest_that_cannot_be_read(store: ObjectStore, data: bytes) -> None:
    """
    A file of its name that is none, or of a later version, is not taken for "not done yet".
    """
    store.put(MANIFEST_NAME, data)

    with pytest.raises(OutputError, match=MANIFEST_NAME):
        read_manifest(store)
