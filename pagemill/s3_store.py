"""A bucket of any S3-compatible store, below one prefix."""

from collections.abc import Iterator
from urllib.parse import quote, unquote, urlsplit

from pagemill.errors import ObjectChanged, ObjectNotFound, ObjectStoreError, StoreAway
from pagemill.objects import ObjectEntry, ObjectStat
from pagemill.s3_calls import S3Calls, s3_errors
from pagemill.s3_range import S3Range
from pagemill.s3_writer import S3Writer

# of one page of a listing; S3 gives no more
PAGE_KEYS = 1000

# of one object
MAX_BYTES = 5 * 1024**4


class S3Store:
    """Objects of one bucket, below one prefix."""

    def __init__(self, bucket: str, prefix: str, endpoint: str | None = None, region: str | None = None) -> None:
        self.bucket = bucket
        self.prefix = f"{prefix}/" if prefix else ""
        self._calls = S3Calls(endpoint, region)

    def __repr__(self) -> str:
        return f"S3Store(s3://{self.bucket}/{self.prefix})"

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"

    def url(self, name: str) -> str:
        return f"s3://{self.bucket}/{quote(self.prefix + name)}"

    def put(self, name: str, data: bytes) -> str:
        with s3_errors(f"write {self.url(name)}"):
            self._calls.send("put_object", Bucket=self.bucket, Key=self.prefix + name, Body=data)
        return self.url(name)

    def put_if_absent(self, name: str, data: bytes) -> str:
        with s3_errors(f"write {self.url(name)}"):
            self._calls.send_if_absent("put_object", Bucket=self.bucket, Key=self.prefix + name, Body=data)
        return self.url(name)

    def open_writer(self, name: str, *, if_absent: bool = False) -> S3Writer:
        return S3Writer(self._calls, self.bucket, self.prefix + name, self.url(name), if_absent=if_absent)

    def get(self, url: str) -> bytes:
        try:
            return self.get_range(url, 0, MAX_BYTES)
        except ObjectChanged as error:
            raise StoreAway(f"cannot read {url}: it was written anew when a read of it broke off") from error

    def get_range(self, url: str, start: int, length: int, etag: str | None = None) -> bytes:
        with s3_errors(f"read {url}"):
            return S3Range(self._calls, self._place(url), start, length, etag).read()

    def stat(self, url: str) -> ObjectStat:
        place = self._place(url)
        with s3_errors(f"look for {url}"):
            answer = self._calls.send("head_object", **place)
        return ObjectStat(int(answer["ContentLength"]), str(answer["ETag"]))

    def list(self, prefix: str = "") -> Iterator[ObjectEntry]:
        window = {"Bucket": self.bucket, "Prefix": self.prefix + prefix, "MaxKeys": PAGE_KEYS}
        while True:
            with s3_errors(f"list s3://{self.bucket}/{self.prefix}{prefix}"):
                page = self._calls.send("list_objects_v2", **window)
            for found in page.get("Contents", ()):
                name = str(found["Key"])[len(self.prefix) :]
                yield ObjectEntry(name, self.url(name), int(found["Size"]), str(found["ETag"]))
            if not page.get("IsTruncated"):
                return
            window["ContinuationToken"] = page["NextContinuationToken"]

    def exists(self, url: str) -> bool:
        try:
            self.stat(url)
        except ObjectNotFound:
            return False
        return True

    def delete(self, url: str) -> None:
        place = self._place(url)
        with s3_errors(f"delete {url}"):
            self._calls.send("delete_object", **place)

    def _place(self, url: str) -> dict[str, str]:
        try:
            parts = urlsplit(url)
            key = unquote(parts.path.lstrip("/"))
            key.encode()
        except ValueError:
            # a host that is none, or half a surrogate pair: no URL that a store has given
            raise ObjectStoreError(f"the object {url!r} is not in {self}") from None
        if parts.scheme != "s3" or parts.netloc != self.bucket or not key.startswith(self.prefix):
            raise ObjectStoreError(f"the object {url!r} is not in {self}")
        return {"Bucket": self.bucket, "Key": key}
