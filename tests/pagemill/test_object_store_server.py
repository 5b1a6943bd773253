"""A bucket of a real S3-compatible server, and what goes wrong on the way to it."""

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

import pytest

from pagemill.errors import ObjectChanged, ObjectExists, ObjectStoreError, StoreAway
from pagemill.ids import uuid7
from pagemill.object_store import ObjectStore, open_store
from tests.support.s3_proxy import Request, S3Proxy
from tests.support.seaweed import ACCESS_KEY, BUCKET, OLD_KEY, Seaweed


@pytest.fixture
def proxy(bucket: Seaweed) -> Iterator[S3Proxy]:
    with S3Proxy(bucket.endpoint) as proxy:
        yield proxy
        assert 0 == proxy.num_faults_left


@pytest.fixture
def folder() -> str:
    return f"store-{uuid7()}"


@pytest.fixture
def store(bucket: Seaweed, proxy: S3Proxy, folder: str) -> ObjectStore:
    """A folder of the bucket, by way of the proxy."""
    return open_store(bucket.url(folder, proxy.endpoint))


def noise(num_bytes: int) -> bytes:
    return random.Random(num_bytes).randbytes(num_bytes)


def is_part(number: int) -> Callable[[Request], bool]:
    return lambda request: request.method == "PUT" and f"partNumber={number}&" in f"{request.path}&"


def is_get(request: Request) -> bool:
    return request.method == "GET" and "Range" in request.headers


def test_30_megabytes_in_parts(store: ObjectStore, proxy: S3Proxy, bucket: Seaweed, folder: str) -> None:
    """
    A large object goes in four parts, and is there with the last; a window over two parts is read of it.
    """
    data = noise(30_000_000)
    with store.open_writer("large") as writer:
        for start in range(0, len(data), 1_000_000):
            writer.write(data[start : start + 1_000_000])

    assert 4 == sum("partNumber=" in request.path for request in proxy.requests)
    assert sha256(data).digest() == sha256(store.get(writer.url)).digest()
    stat = store.stat(writer.url)
    assert len(data) == stat.size
    assert data[8_000_000:9_000_000] == store.get_range(writer.url, 8_000_000, 1_000_000, stat.etag)
    assert [] == unfinished(bucket, folder)


def test_parts_that_come_to_nothing_are_taken_back(store: ObjectStore, bucket: Seaweed, folder: str) -> None:
    """
    After an error in the middle of a large object, the bucket holds none of its parts.
    """

    def begin() -> None:
        with store.open_writer("large") as writer:
            writer.write(bytes(9_000_000))
            assert 1 == len(unfinished(bucket, folder))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        begin()

    assert ([], False) == (unfinished(bucket, folder), store.exists(store.url("large")))


def test_a_part_that_is_refused_is_sent_again_alone(store: ObjectStore, proxy: S3Proxy) -> None:
    """
    A store that says SlowDown gets the same part once more, and no other twice.
    """
    data = noise(20_000_000)
    proxy.refuse("SlowDown", 503, is_part(2), times=2)

    with store.open_writer("large") as writer:
        writer.write(data)

    sent = [sum(is_part(number)(request) for request in proxy.requests) for number in (1, 2, 3)]
    assert [1, 3, 1] == sent
    assert data == store.get(writer.url)


def test_a_store_that_stays_away_ends_the_write(
    store: ObjectStore, proxy: S3Proxy, bucket: Seaweed, folder: str
) -> None:
    """
    A part that is refused for good is an error, and the parts before it are taken back.
    """
    proxy.refuse("AccessDenied", 403, is_part(2))

    with pytest.raises(ObjectStoreError, match="AccessDenied") as caught, store.open_writer("large") as writer:
        writer.write(bytes(20_000_000))

    assert ObjectStoreError is caught.type
    assert ([], False) == (unfinished(bucket, folder), store.exists(writer.url))


def test_credentials_that_expire_between_parts(
    bucket: Seaweed, proxy: S3Proxy, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    The part that comes too late is sent again with new credentials; the parts before it count.
    """
    data = noise(20_000_000)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", OLD_KEY)

    def rotate() -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)

    def too_late(request: Request) -> bool:
        return is_part(2)(request) and f"Credential={OLD_KEY}/" in request.headers["Authorization"]

    proxy.refuse("ExpiredToken", 400, too_late, then=rotate)
    store = open_store(bucket.url(folder, proxy.endpoint))
    with store.open_writer("large") as writer:
        writer.write(data)

    assert 2 == sum(is_part(2)(request) for request in proxy.requests)
    assert data == store.get(writer.url)


def test_the_answer_that_an_object_is_whole_gets_lost(store: ObjectStore, proxy: S3Proxy) -> None:
    """
    An object that the store has made is taken as made, though it knows nothing of its parts any more.
    """
    data = noise(9_000_000)
    proxy.lose_reply(lambda request: request.method == "POST" and "uploadId=" in request.path)

    with store.open_writer("large") as writer:
        writer.write(data)

    assert data == store.get(writer.url)


def test_a_read_that_breaks_off_goes_on_where_it_was(store: ObjectStore, proxy: S3Proxy) -> None:
    """
    What has come of a window is kept, and only the rest of the same object is asked for.
    """
    data = noise(3_000_000)
    url = store.put("a", data)
    proxy.cut(1_000_000, is_get, times=2)

    assert data[500_000:2_900_000] == store.get_range(url, 500_000, 2_400_000)

    asked = [request.headers for request in proxy.requests if is_get(request)]
    assert ["bytes=500000-2899999", "bytes=1500000-2899999", "bytes=2500000-2899999"] == [
        headers["Range"] for headers in asked
    ]
    assert [None, store.stat(url).etag, store.stat(url).etag] == [headers.get("If-Match") for headers in asked]


def test_a_whole_object_that_breaks_off_goes_on_too(store: ObjectStore, proxy: S3Proxy) -> None:
    """
    Plans, records and answers are read whole, and a cut costs no more than it does a window; nothing is nothing.
    """
    data = noise(3_000_000)
    url, empty = store.put("a", data), store.put("empty", b"")
    proxy.cut(1_000_000, is_get)

    assert (data, b"") == (store.get(url), store.get(empty))


def test_a_read_that_breaks_off_while_the_object_changes(
    store: ObjectStore, proxy: S3Proxy, bucket: Seaweed, folder: str
) -> None:
    """
    A window is never half of one object and half of another.
    """
    url = store.put("a", bytes(3_000_000))
    proxy.cut(1_000_000, is_get)
    direct = open_store(bucket.url(folder))
    proxy.refuse("SlowDown", 503, is_get, then=lambda: direct.put("a", noise(3_000_000)))

    with pytest.raises(ObjectChanged):
        store.get_range(url, 0, 3_000_000)


def test_a_read_that_never_gets_anywhere(store: ObjectStore, proxy: S3Proxy) -> None:
    """
    A read that breaks off again and again without a byte more is given up.
    """
    url = store.put("a", bytes(3_000_000))
    proxy.cut(1_000_000, is_get)
    proxy.cut(0, is_get, times=5)

    with pytest.raises(StoreAway, match=url):
        store.get_range(url, 0, 3_000_000)


def test_slow_down_is_waited_for(store: ObjectStore, proxy: S3Proxy) -> None:
    """
    Reading and looking outlast a SlowDown each.
    """
    url = store.put("a", b"data")
    for method in ("GET", "HEAD"):
        proxy.refuse("SlowDown", 503, lambda request, method=method: request.method == method)

    assert (b"data", 4) == (store.get(url), store.stat(url).size)


def write_at_once(store: ObjectStore, data: list[bytes]) -> list[bytes]:
    """Several writers of one object that must not be there; what those wrote that were told so."""
    together = threading.Barrier(len(data))

    def write(mine: bytes) -> bytes | None:
        try:
            with store.open_writer("a", if_absent=True) as writer:
                writer.write(mine)
                together.wait(20)
        except ObjectExists:
            return None
        return mine

    with ThreadPoolExecutor(len(data)) as threads:
        return [mine for mine in threads.map(write, data) if mine is not None]


def test_of_two_writers_at_once_one_wins(bucket: Seaweed, folder: str) -> None:
    """
    Of several that write an object that must not be there, one is told that it wrote, and its bytes are there.
    """
    store = open_store(bucket.url(folder))

    told = write_at_once(store, [b"%d" % number for number in range(8)])

    assert [store.get(store.url("a"))] == told


def test_of_two_writers_of_large_objects_at_once_none_is_mixed(bucket: Seaweed, folder: str) -> None:
    """
    In parts, this server may tell two that they wrote, when they end in the same moment: the object is one of theirs,
    whole, and whoever comes later is refused.
    """
    store = open_store(bucket.url(folder))
    data = [b"%d" % number * 9_000_000 for number in range(3)]

    told = write_at_once(store, data)

    assert store.get(store.url("a")) in told
    assert [] == write_at_once(store, data[:1])


def unfinished(bucket: Seaweed, folder: str) -> list[str]:
    """Keys of uploads that have begun; others that share the bucket may have left some."""
    found = bucket.client().list_multipart_uploads(Bucket=BUCKET)
    keys = (str(upload["Key"]) for upload in found.get("Uploads", ()))
    return [key for key in keys if key.startswith(f"{folder}/")]
