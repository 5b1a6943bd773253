"""What is known of each batch."""

import time
from pathlib import Path

import pytest

from pagemill.errors import ObjectNotFound
from pagemill.ids import uuid7
from pagemill.object_store import open_store
from producers.batch_file.book import Book, created_at
from producers.batch_file.records import BatchRecord


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(open_store((tmp_path / "store").as_uri()))


def a_batch() -> BatchRecord:
    name = f"batch_{uuid7().replace('-', '')}"
    return BatchRecord(
        id=name, endpoint="/v1/completions", input_file_id="file-1", completion_window="24h", created_at=1
    )


def test_an_end_is_final(book: Book) -> None:
    """
    Whoever notes progress or another end after the first end changes nothing: it was paused for too long.
    """
    batch = a_batch()
    key = ("acme", batch.id)
    book.add(key, batch)
    ended = batch.model_copy(update={"status": "completed", "completed_at": 5})
    book.end(key, ended)

    book.note(key, batch.model_copy(update={"status": "in_progress"}))
    book.end(key, batch.model_copy(update={"status": "expired"}))
    book.cancel(key, 9)

    assert ended == book.read(key)
    assert [] == book.open_keys()


def test_a_batch_may_be_added_again(book: Book) -> None:
    """
    A bucket's client makes a write again whose answer got lost: the batch is open all the same, once.
    """
    batch = a_batch()
    key = ("acme", batch.id)

    book.add(key, batch)
    book.add(key, batch)

    assert ([key], batch) == (book.open_keys(), book.read(key))


def test_a_cancel_is_seen_whatever_the_runner_writes(book: Book) -> None:
    """
    The first cancel counts, and shows over the progress of a runner that has not heard of it.
    """
    batch = a_batch()
    key = ("acme", batch.id)
    book.add(key, batch)
    book.cancel(key, 7)
    book.cancel(key, 8)

    book.note(key, batch.model_copy(update={"status": "in_progress", "in_progress_at": 3}))

    read = book.read(key)
    assert ("cancelling", 7, 3) == (read.status, read.cancelling_at, read.in_progress_at)


def test_old_batches_are_swept_but_not_open_ones(book: Book) -> None:
    """
    Only what has ended, and was created before the time, is forgotten.
    """
    old, still_open = a_batch(), a_batch()
    for batch in (old, still_open):
        book.add(("acme", batch.id), batch)
    book.end(("acme", old.id), old.model_copy(update={"status": "completed"}))
    assert created_at(old.id) == pytest.approx(time.time(), abs=5)

    assert 0 == book.sweep(created_at(old.id) - 1)
    assert 1 == book.sweep(created_at(still_open.id) + 1)

    assert [still_open.id] == book.ids("acme")
    with pytest.raises(ObjectNotFound):
        book.read(("acme", old.id))
