"""
Where large payloads and results live: a folder, or a bucket of any S3-compatible store.

An object has a name inside the store and a URL, which is what travels. A store gives only what
lies under its own root: a reference in a job cannot make a worker read another place.

Payloads are under `jobs/<queue>/`, results under `results/<queue>/`. The worker that ends a job
deletes its payload; payloads of jobs that ended without a worker are deleted in a sweep, and
results by `Client.forget`. Nobody knows any more of what a crash left behind, or of a result whose
record has expired: give the bucket a lifecycle rule that expires objects, or the folder a cron job.
Let it wait for the longest time that a job may queue and run plus its `result_ttl_s`; the schema's
limits for both together are 60 days, where jobs have a deadline.
"""

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from pagemill.errors import ObjectNotFound, ObjectStoreError, SettingsError, StoreAway

_MISSING = frozenset({"NoSuchKey", "NoSuchBucket", "404", "NotFound"})

# what a store says, besides statuses from 500 on, when it has too much to do
_OVERLOADED = frozenset({"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "RequestTimeout"})

# what a folder says for ever
_WRONG_PLACE = (PermissionError, NotADirectoryError, IsADirectoryError)


class ObjectStore(Protocol):
    """
    Objects by name; thread-safe, blocking.

    All methods raise ObjectStoreError; reading what is not there raises ObjectNotFound.
    """

    def put(self, name: str, data: bytes) -> str:
        """Write an object, whole or not at all, over one of that name; return its URL."""
        ...

    def get(self, url: str) -> bytes: ...

    def get_range(self, url: str, start: int, length: int) -> bytes:
        """At most `length` bytes from `start`; fewer at the object's end, none past it."""
        ...

    def exists(self, url: str) -> bool: ...

    def delete(self, url: str) -> None:
        """Remove an object; one that is not there is no error."""
        ...


def open_store(url: str) -> ObjectStore:
    """
    The store at `file:///folder` or `s3://bucket/prefix`.

    An S3 URL takes `?endpoint=http://host:port` and `?region=...`; credentials come from where
    boto3 finds them. Nothing is opened yet.

    Raises:
        SettingsError: the URL is neither.
    """
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path.startswith("/"):
        return FileStore(Path(unquote(parts.path)))
    if parts.scheme == "s3" and parts.netloc:
        options = dict(parse_qsl(parts.query))
        unknown = sorted(options.keys() - {"endpoint", "region"})
        if unknown:
            raise SettingsError(f"the object store's URL has {unknown[0]!r}: it takes endpoint and region")
        return S3Store(parts.netloc, parts.path.strip("/"), options.get("endpoint"), options.get("region"))
    raise SettingsError(f"the object store is {url!r}: want file:///folder or s3://bucket/prefix?endpoint=http://...")


class FileStore:
    """Objects as files below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()

    def __repr__(self) -> str:
        return f"FileStore({self.root})"

    def put(self, name: str, data: bytes) -> str:
        path = self._inside(self.root / name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".put-", delete=False) as file:
                self._fill(file.name, file, data)
            Path(file.name).replace(path)
        except OSError as error:
            raise _kind_of(error)(f"cannot write {path}: {error}") from error
        return path.as_uri()

    @staticmethod
    def _fill(name: str, file: Any, data: bytes) -> None:
        try:
            file.write(data)
            file.flush()
            # the name must not appear before the bytes are safe
            os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                Path(name).unlink()
            raise

    def get(self, url: str) -> bytes:
        path = self._path(url)
        with _file_errors(path):
            return path.read_bytes()

    def get_range(self, url: str, start: int, length: int) -> bytes:
        path = self._path(url)
        with _file_errors(path), path.open("rb") as file:
            file.seek(start)
            return file.read(length)

    def exists(self, url: str) -> bool:
        return self._path(url).is_file()

    def delete(self, url: str) -> None:
        path = self._path(url)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise _kind_of(error)(f"cannot delete {path}: {error}") from error

    def _path(self, url: str) -> Path:
        parts = urlsplit(url)
        if parts.scheme != "file":
            raise ObjectStoreError(f"the object {url!r} is not in {self}")
        return self._inside(Path(unquote(parts.path)))

    def _inside(self, path: Path) -> Path:
        # resolved: neither dots nor links lead out
        if not path.resolve().is_relative_to(self.root.resolve()):
            raise ObjectStoreError(f"the object {str(path)!r} is not in {self}")
        return path


@contextlib.contextmanager
def _file_errors(path: Path) -> Any:
    try:
        yield
    except FileNotFoundError:
        raise ObjectNotFound(f"there is no object {path}") from None
    except OSError as error:
        raise _kind_of(error)(f"cannot read {path}: {error}") from error


def _kind_of(error: OSError) -> type[ObjectStoreError]:
    return ObjectStoreError if isinstance(error, _WRONG_PLACE) else StoreAway


class S3Store:
    """Objects of one bucket, below one prefix."""

    def __init__(self, bucket: str, prefix: str, endpoint: str | None = None, region: str | None = None) -> None:
        self.bucket = bucket
        self.prefix = f"{prefix}/" if prefix else ""
        self._endpoint = endpoint
        self._region = region
        self._made: Any = None

    def __repr__(self) -> str:
        return f"S3Store(s3://{self.bucket}/{self.prefix})"

    def put(self, name: str, data: bytes) -> str:
        key = self.prefix + name
        with _s3_errors(f"write s3://{self.bucket}/{key}"):
            self._client.put_object(Bucket=self.bucket, Key=key, Body=data)
        return f"s3://{self.bucket}/{quote(key)}"

    def get(self, url: str) -> bytes:
        key = self._key(url)
        with _s3_errors(f"read {url}"):
            data: bytes = self._client.get_object(Bucket=self.bucket, Key=key)["Body"].read()
        return data

    def get_range(self, url: str, start: int, length: int) -> bytes:
        if length <= 0:
            return b""
        key = self._key(url)
        with _s3_errors(f"read {url}"):
            try:
                window = f"bytes={start}-{start + length - 1}"
                data: bytes = self._client.get_object(Bucket=self.bucket, Key=key, Range=window)["Body"].read()
            except self._client.exceptions.ClientError as error:
                if _code(error) in ("InvalidRange", "416"):
                    return b""
                raise
        return data

    def exists(self, url: str) -> bool:
        key = self._key(url)
        try:
            with _s3_errors(f"look for {url}"):
                self._client.head_object(Bucket=self.bucket, Key=key)
        except ObjectNotFound:
            return False
        return True

    def delete(self, url: str) -> None:
        key = self._key(url)
        with _s3_errors(f"delete {url}"):
            self._client.delete_object(Bucket=self.bucket, Key=key)

    def _key(self, url: str) -> str:
        parts = urlsplit(url)
        key = unquote(parts.path.lstrip("/"))
        if parts.scheme != "s3" or parts.netloc != self.bucket or not key.startswith(self.prefix):
            raise ObjectStoreError(f"the object {url!r} is not in {self}")
        return key

    @property
    def _client(self) -> Any:
        if self._made is None:
            self._made = _s3_client(self._endpoint, self._region)
        return self._made


def _s3_client(endpoint: str | None, region: str | None) -> Any:
    # 80 ms of imports that a store in a folder need not pay
    import boto3
    from botocore.config import Config

    options: dict[str, Any] = {}
    if endpoint:
        options["s3"] = {"addressing_style": "path"}
        # boto3's checksum trailers break many stores that are not AWS (boto3#4392)
        options["request_checksum_calculation"] = "when_required"
        options["response_checksum_validation"] = "when_required"
    config = Config(
        retries={"mode": "adaptive", "max_attempts": 10},
        max_pool_connections=32,
        connect_timeout=5,
        read_timeout=60,
        tcp_keepalive=True,
        **options,
    )
    # a session of our own: the default one is not safe to make clients from in threads
    return boto3.session.Session().client("s3", endpoint_url=endpoint, region_name=region, config=config)


@contextlib.contextmanager
def _s3_errors(action: str) -> Any:
    from botocore import exceptions as errors

    out_of_reach = (errors.ConnectionError, errors.HTTPClientError, errors.IncompleteReadError, OSError)
    try:
        yield
    except errors.ClientError as error:
        raise _kind_of_answer(error)(f"cannot {action}: {error}") from error
    except out_of_reach as error:
        raise StoreAway(f"cannot {action}: {error}") from error
    except errors.BotoCoreError as error:
        # no credentials, a setting that is wrong
        raise ObjectStoreError(f"cannot {action}: {error}") from error


def _kind_of_answer(error: Any) -> type[ObjectStoreError]:
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if _code(error) in _MISSING:
        return ObjectNotFound
    return StoreAway if status >= 500 or _code(error) in _OVERLOADED else ObjectStoreError


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
