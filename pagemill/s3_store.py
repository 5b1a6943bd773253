"""A bucket of any S3-compatible store, below one prefix."""

import contextlib
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from pagemill.errors import ObjectNotFound, ObjectStoreError, StoreAway
from pagemill.objects import ObjectEntry, ObjectStat, ObjectWriter

_MISSING = frozenset({"NoSuchKey", "NoSuchBucket", "404", "NotFound"})

# what a store says, besides statuses from 500 on, when it has too much to do
_OVERLOADED = frozenset({"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "RequestTimeout"})


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
