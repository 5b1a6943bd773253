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

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

from pagemill.errors import SettingsError
from pagemill.file_store import FileStore
from pagemill.objects import ObjectEntry, ObjectStat, ObjectWriter
from pagemill.s3_store import S3Store

_BUCKET = re.compile(r"arn:[^@]+|[^:@]+")
_KEYS = "keys stand in no URL, they are read from where boto3 finds them"


class ObjectStore(Protocol):
    """
    Objects by name; thread-safe, blocking.

    All methods raise ObjectStoreError; reading what is not there raises ObjectNotFound.
    """

    def url(self, name: str) -> str:
        """The URL that an object of this name has or would have."""
        ...

    def put(self, name: str, data: bytes) -> str:
        """Write an object, whole or not at all, over one of that name; return its URL."""
        ...

    def put_if_absent(self, name: str, data: bytes) -> str:
        """
        Write an object that must not be there yet; return its URL. Of several writers one is told that it wrote.

        Raises:
            ObjectExists: there is one of that name.
        """
        ...

    def open_writer(self, name: str, *, if_absent: bool = False) -> ObjectWriter:
        """
        A context manager that writes a large object piece by piece, in bounded memory.

        Args:
            if_absent: Leaving it raises ObjectExists if there is an object of that name by then.
        """
        ...

    def get(self, url: str) -> bytes: ...

    def get_range(self, url: str, start: int, length: int, etag: str | None = None) -> bytes:
        """
        At most `length` bytes from `start`; fewer at the object's end, none past it.

        Args:
            etag: What `stat` or `list` said.

        Raises:
            ObjectChanged: the object has another etag now.
        """
        ...

    def stat(self, url: str) -> ObjectStat: ...

    def list(self, prefix: str = "") -> Iterator[ObjectEntry]:
        """All objects whose names begin with `prefix`, always in the same order, page by page."""
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
        SettingsError: the URL is neither, or has a login.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        # its error would show the host, with a login before it
        raise SettingsError(f"the object store's URL has a host that is none; {_KEYS}") from None
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path.startswith("/"):
        return FileStore(Path(unquote(parts.path)))
    if parts.scheme == "s3" and _BUCKET.fullmatch(parts.netloc):
        options = dict(parse_qsl(parts.query))
        unknown = sorted(options.keys() - {"endpoint", "region"})
        if unknown:
            raise SettingsError(f"the object store's URL has {unknown[0]!r}: it takes endpoint and region")
        if "endpoint" in options and not _is_endpoint(options["endpoint"]):
            raise SettingsError(f"the object store's URL has an endpoint that is not http://host:port; {_KEYS}")
        return S3Store(parts.netloc, parts.path.strip("/"), options.get("endpoint"), options.get("region"))
    # a secret may have a slash: its end is in the path then
    has_login = "@" in url or ":" in parts.netloc
    shown = f"a URL with a login, and {_KEYS}" if has_login else repr(url)
    raise SettingsError(f"the object store is {shown}: want file:///folder or s3://bucket/prefix?endpoint=http://...")


def _is_endpoint(url: str) -> bool:
    try:
        parts = urlsplit(url)
        is_port = parts.port is None or parts.port > 0
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in url and is_port
