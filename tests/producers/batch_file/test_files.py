"""Files of the API in an object store."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from producers.batch_file.files import Files
from producers.openai_api.errors import ApiError
from tests.support.clock import Clock


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files((tmp_path / "store").as_uri(), max_bytes=1000)


def test_an_upload_comes_back_as_it_was(files: Files) -> None:
    """
    Bytes, name and size are kept; the list shows it.
    """
    record = files.create("acme", filename="a b.jsonl", purpose="batch", data=[b"one\n", b"two\n"])

    assert b"one\ntwo\n" == b"".join(files.read("acme", record.id))
    assert ("file", 8, "a b.jsonl") == (record.object, record.bytes, record.filename)
    assert record == files.get("acme", record.id)
    assert (record,) == files.list("acme").data


@pytest.mark.parametrize(
    ("purpose", "size", "status"), [("batch", 1001, 413), ("anything", 1, 400), ("batch_output", 1, 400)]
)
def test_an_upload_that_is_refused_leaves_nothing(
    files: Files, tmp_path: Path, purpose: str, size: int, status: int
) -> None:
    """
    Too large a file, or one for another purpose, is not kept, and nothing of it.
    """
    with pytest.raises(ApiError) as caught:
        files.create("acme", filename="x", purpose=purpose, data=iter([b"x"] * size))

    assert status == caught.value.status
    assert [] == [path for path in tmp_path.rglob("*") if path.is_file()]


def test_an_upload_that_breaks_off_leaves_nothing(files: Files, tmp_path: Path) -> None:
    """
    A file is there whole or not at all.
    """

    def broken() -> Iterator[bytes]:
        yield b"half"
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        files.create("acme", filename="x", purpose="batch", data=broken())

    assert [] == [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_deleted_file_is_gone(files: Files, tmp_path: Path) -> None:
    """
    Neither its record nor its content stays.
    """
    record = files.create("acme", filename="x", purpose="batch", data=[b"x"])

    files.delete("acme", record.id)

    for call in (files.get, files.read, files.delete):
        with pytest.raises(ApiError) as caught:
            call("acme", record.id)
        assert 404 == caught.value.status
    assert [] == [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_file_expires(tmp_path: Path) -> None:
    """
    After its time it is gone, for all who ask.
    """
    clock = Clock()
    files = Files((tmp_path / "store").as_uri(), clock=clock)
    record = files.create("acme", filename="x", purpose="batch", data=[b"x"], expires_after_s=3600)
    assert (record,) == files.list("acme").data

    clock.now += 3600

    assert () == files.list("acme").data
    with pytest.raises(ApiError):
        files.get("acme", record.id)


def test_lists_are_paged_and_sorted(files: Files) -> None:
    """
    Newest first, or oldest first where that is asked for.
    """
    ids = [files.create("acme", filename=str(n), purpose="batch", data=[b"x"]).id for n in range(40)]

    assert ids[::-1] == [record.id for record in files.list("acme").data]
    page = files.list("acme", newest_first=False, after=ids[4], limit=30)
    assert (ids[5:35], True) == ([record.id for record in page.data], page.has_more)
    assert () == files.list("acme", purpose="batch_output").data


def test_expired_files_are_swept(tmp_path: Path) -> None:
    """
    Of all tenants, what has expired is deleted, and nothing else.
    """
    clock = Clock()
    files = Files((tmp_path / "store").as_uri(), ttl_s=60, clock=clock)
    old = [files.create(tenant, filename="x", purpose="batch", data=[b"x"]) for tenant in ("a", "b")]
    clock.now += 30
    young = files.create("a", filename="y", purpose="batch", data=[b"y"])
    clock.now += 30

    assert len(old) == files.sweep()

    assert 0 == files.sweep()
    assert (young,) == files.list("a").data
    assert 2 == sum(path.is_file() for path in tmp_path.rglob("*"))
