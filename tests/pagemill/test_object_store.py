"""Both object stores keep the same promises."""

import errno
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
import pytest
from botocore.config import Config
from botocore.stub import Stubber
from moto import mock_aws

from pagemill.errors import ObjectChanged, ObjectExists, ObjectNotFound, ObjectStoreError, StoreAway
from pagemill.file_store import FileStore
from pagemill.object_store import ObjectStore, open_store
from pagemill.objects import ObjectStat
from pagemill.s3_store import S3Store


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    if request.param == "file":
        yield open_store((tmp_path / "store").as_uri())
        return
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    with mock_aws():
        boto3.session.Session().client("s3", region_name="us-east-1").create_bucket(Bucket="bucket")
        yield open_store("s3://bucket/some/prefix?region=us-east-1")


def test_what_is_put_is_there(store: ObjectStore) -> None:
    """
    An object is read back by its URL, whatever its name.
    """
    for name in ("a.json", "deep/er/b c é.json"):
        url = store.put(name, b"data of " + name.encode())

        assert (True, b"data of " + name.encode()) == (store.exists(url), store.get(url))


def test_putting_again_replaces(store: ObjectStore) -> None:
    """
    A repeated put leaves the later bytes under the same URL.
    """
    first, second = store.put("a", b"one"), store.put("a", b"two")

    assert (first, b"two") == (second, store.get(first))


def test_a_range(store: ObjectStore) -> None:
    """
    A window of an object ends at its end.
    """
    url = store.put("a", b"0123456789")

    assert [b"234", b"89", b"", b""] == [store.get_range(url, *window) for window in ((2, 3), (8, 5), (10, 5), (3, 0))]


def test_what_is_deleted_is_gone(store: ObjectStore) -> None:
    """
    A deleted object is not there; deleting it again is no error.
    """
    url = store.put("a", b"one")
    store.delete(url)
    store.delete(url)

    assert not store.exists(url)
    with pytest.raises(ObjectNotFound):
        store.get(url)


def test_another_place_is_refused(store: ObjectStore) -> None:
    """
    A reference cannot lead out of the store.
    """
    inside = store.put("a", b"one")

    for url in ("file:///etc/passwd", "s3://other/some/prefix/a", "http://host/a", inside + "/../../../../../x"):
        with pytest.raises(ObjectStoreError):
            store.get(url)


def test_what_an_object_is_now(store: ObjectStore) -> None:
    """
    An object has a size, and an etag that is another one when the content is.
    """
    url = store.put("a", b"one")
    first = store.stat(url)
    again = store.stat(url)
    store.put("a", b"two")

    assert (3, first) == (first.size, again)
    assert first.etag != store.stat(url).etag
    with pytest.raises(ObjectNotFound):
        store.stat(store.url("b"))


def test_the_url_of_a_name(store: ObjectStore) -> None:
    """
    Where an object would be is known before it is there.
    """
    for name in ("a", "b c/é%20.json"):
        assert store.url(name) == store.put(name, b"x")


def test_a_range_of_an_object_that_has_changed(store: ObjectStore) -> None:
    """
    A window that is asked for with an etag is of that object, or an error.
    """
    url = store.put("a", b"0123456789")
    etag = store.stat(url).etag

    assert b"234" == store.get_range(url, 2, 3, etag)
    assert b"" == store.get_range(url, 10, 3, etag)
    store.put("a", b"9876543210")
    with pytest.raises(ObjectChanged):
        store.get_range(url, 2, 3, etag)


def test_a_listing(store: ObjectStore) -> None:
    """
    All objects whose names begin alike are listed, with what `stat` says of each.
    """
    names = ["a", "a-b", "deep/er/x", "deep/y", "deeper", "é"]
    urls = {name: store.put(name, name.encode()) for name in names}

    found = list(store.list())

    assert names == sorted(entry.name for entry in found)
    assert all(urls[entry.name] == entry.url for entry in found)
    assert [store.stat(entry.url) for entry in found] == [ObjectStat(entry.size, entry.etag) for entry in found]
    assert ["deep/er/x", "deep/y"] == [entry.name for entry in store.list("deep/")]
    assert ["deep/er/x", "deep/y", "deeper"] == [entry.name for entry in store.list("de")]
    assert [] == list(store.list("nothing/")) == list(store.list("x"))


def test_a_listing_of_a_folder_that_changes(tmp_path: Path) -> None:
    """
    What is deleted while a folder is listed is left out, and nothing else is.
    """
    store = FileStore(tmp_path)
    for name in ("a", "b", "c/d", "e/f", "g"):
        store.put(name, b"")
    found = store.list()
    names = [next(found).name]

    (tmp_path / "b").unlink()
    shutil.rmtree(tmp_path / "c")
    names += [entry.name for entry in found]

    assert ["a", "e/f", "g"] == names


LIST_TRACED = """
import sys, tracemalloc
from pathlib import Path
from pagemill.file_store import FileStore

store = FileStore(Path(sys.argv[1]))
tracemalloc.start()
print(sum(1 for _ in store.list()), tracemalloc.get_traced_memory()[1])
"""


def test_a_listing_of_many_files_holds_their_names_alone(tmp_path: Path) -> None:
    """
    A folder may have a million files.
    """
    for number in range(5000):
        (tmp_path / f"document-{number:07d}.txt").touch()

    # alone in a process: threads of other tests take memory too
    told = subprocess.run([sys.executable, "-c", LIST_TRACED, tmp_path], check=True, capture_output=True, timeout=60)

    num_found, peak = map(int, told.stdout.split())
    assert 5000 == num_found
    assert peak < 5000 * 150


def test_a_listing_of_several_pages(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A listing goes on after the objects that a page has.
    """
    monkeypatch.setattr("pagemill.s3_store.PAGE_KEYS", 3)
    for number in range(10):
        store.put(f"many/{number}", b"")

    assert [f"many/{number}" for number in range(10)] == [entry.name for entry in store.list("many/")]


def test_the_second_writer_is_refused(store: ObjectStore) -> None:
    """
    What must not be there is written once, and stays as it was.
    """
    url = store.put_if_absent("a/b", b"one")

    with pytest.raises(ObjectExists, match="a/b"):
        store.put_if_absent("a/b", b"two")
    assert b"one" == store.get(url)


@pytest.mark.parametrize("num_bytes", [0, 10, 20_000_000])
def test_an_object_in_pieces(store: ObjectStore, num_bytes: int) -> None:
    """
    Pieces of any size become one object when the writer is left.
    """
    data = bytes(range(256)) * (num_bytes // 256 + 1)
    with store.open_writer("large") as writer:
        for start in range(0, num_bytes, 3_000_000):
            piece = data[start : min(start + 3_000_000, num_bytes)]
            assert len(piece) == writer.write(memoryview(piece))
        assert not store.exists(store.url("large"))

    assert store.url("large") == writer.url
    assert data[:num_bytes] == store.get(writer.url)


@pytest.mark.parametrize("num_bytes", [10, 20_000_000])
def test_an_object_that_comes_to_nothing(store: ObjectStore, num_bytes: int) -> None:
    """
    What was being written when an error came is gone, and what was there before is not.
    """
    url = store.put("a", b"before")

    def begin() -> None:
        with store.open_writer("a") as writer:
            writer.write(bytes(num_bytes))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        begin()

    assert b"before" == store.get(url)
    assert ["a"] == [entry.name for entry in store.list()]


@pytest.mark.parametrize("num_bytes", [10, 20_000_000])
def test_an_object_in_pieces_that_is_there_already(store: ObjectStore, num_bytes: int) -> None:
    """
    Whoever ends second with an object that must not be there is refused.
    """

    def come_second() -> None:
        with store.open_writer("a", if_absent=True) as writer:
            writer.write(bytes(num_bytes))
            store.put("a", b"other")

    with pytest.raises(ObjectExists):
        come_second()

    assert b"other" == store.get(store.url("a"))
    assert ["a"] == [entry.name for entry in store.list()]


def test_of_two_writers_at_once_one_wins(tmp_path: Path) -> None:
    """
    Of many threads that write a file that must not be there, one is told that it wrote, and its bytes are there.
    """
    store = FileStore(tmp_path)

    def write(number: int) -> int | None:
        try:
            store.put_if_absent("a", b"%d" % number)
        except ObjectExists:
            return None
        return number

    with ThreadPoolExecutor(8) as threads:
        winners = [number for number in threads.map(write, range(64)) if number is not None]

    assert [store.get(store.url("a"))] == [b"%d" % number for number in winners]


def test_others_may_read_what_was_written(tmp_path: Path) -> None:
    """
    A file of a store has the rights that the process gives its files.
    """
    (tmp_path / "plain").write_bytes(b"x")
    FileStore(tmp_path).put("a", b"x")

    assert (tmp_path / "plain").stat().st_mode == (tmp_path / "a").stat().st_mode


def test_a_link_does_not_lead_out(tmp_path: Path) -> None:
    """
    Not even a link inside a folder reaches what lies outside.
    """
    secret = tmp_path / "secret"
    secret.write_text("x")
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(secret)

    with pytest.raises(ObjectStoreError, match="is not in"):
        FileStore(root).get((root / "link").as_uri())


def test_links_in_a_listing(tmp_path: Path) -> None:
    """
    A listing goes round no circle and shows nothing of what lies outside.
    """
    store = FileStore(tmp_path / "root")
    url = store.put("deep/a", b"x")
    (tmp_path / "root" / "b").symlink_to(tmp_path / "root" / "deep" / "a")
    (tmp_path / "root" / "deep" / "circle").symlink_to(tmp_path / "root")

    assert ["b", "deep/a"] == [entry.name for entry in store.list()]
    assert store.get(url) == store.get(store.url("b"))

    (tmp_path / "secret").write_text("x")
    (tmp_path / "root" / "c").symlink_to(tmp_path / "secret")
    with pytest.raises(ObjectStoreError, match="is not in"):
        list(store.list())


def test_a_failed_put_leaves_no_object(tmp_path: Path) -> None:
    """
    What cannot be written whole is not there at all.
    """
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(ObjectStoreError, match="cannot write"):
        FileStore(tmp_path).put("file/a", b"x")


def test_a_missing_bucket_is_said() -> None:
    """
    A bucket that is not there is an ObjectStoreError that names the object.
    """
    with mock_aws(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        with pytest.raises(ObjectStoreError, match="s3://nowhere/a"):
            S3Store("nowhere", "", region="us-east-1").put("a", b"x")


def bucket_with(monkeypatch: pytest.MonkeyPatch, endpoint: str | None = None) -> tuple[S3Store, Stubber]:
    """A bucket whose client asks once, and gives the answers that are put into the stubber."""
    session = boto3.session.Session("key", "secret", region_name="us-east-1")
    client = session.client("s3", endpoint_url=endpoint, config=Config(retries={"max_attempts": 0}, connect_timeout=1))
    monkeypatch.setattr("pagemill.s3_calls._s3_client", lambda *_: client)
    return S3Store("bucket", ""), Stubber(client)


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("SlowDown", 503, StoreAway),
        ("InternalError", 500, StoreAway),
        ("Throttling", 400, StoreAway),
        ("AccessDenied", 403, ObjectStoreError),
        ("ExpiredToken", 400, ObjectStoreError),
        ("NoSuchKey", 404, ObjectNotFound),
    ],
)
def test_a_store_that_is_away_is_told_from_one_that_refuses(
    code: str, status: int, kind: type[ObjectStoreError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    What may come back by itself has its own error; what only an operator can mend has not.
    """
    store, answers = bucket_with(monkeypatch)
    answers.add_client_error("get_object", code, http_status_code=status)

    with answers, pytest.raises(ObjectStoreError) as caught:
        store.get("s3://bucket/a")

    assert kind is caught.type


def test_a_store_out_of_reach_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Nobody listens there now.
    """
    store, _ = bucket_with(monkeypatch, endpoint="http://127.0.0.1:1")

    with pytest.raises(StoreAway, match="s3://bucket/a"):
        store.get("s3://bucket/a")


def test_a_folder_that_fails_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A folder of a network may come back; one that lies where a file is will not.
    """
    (tmp_path / "file").write_text("in the way")
    store = FileStore(tmp_path)
    with pytest.raises(ObjectStoreError) as wrong:
        store.get((tmp_path / "file" / "a").as_uri())

    def stale(*_: object) -> bytes:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "read_bytes", stale)
    with pytest.raises(StoreAway, match="Stale"):
        store.get((tmp_path / "a").as_uri())
    assert ObjectStoreError is wrong.type


@pytest.mark.parametrize("odd", ["file://[", "s3://b]/x", "{}a%00b", "{}\0", "{}\ud800"])
def test_a_url_that_is_none_is_in_no_store(store: ObjectStore, odd: str) -> None:
    """
    Callers name objects: what no store has given is refused as what lies elsewhere.
    """
    with pytest.raises(ObjectStoreError):
        store.get(odd.format(store.url("")))
