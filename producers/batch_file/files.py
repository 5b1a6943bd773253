"""Files that were uploaded, and those that batches wrote, in an object store; one FileKeeper of service.py."""

import re
import time
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b

from pagemill.errors import ObjectNotFound
from pagemill.ids import uuid7
from pagemill.object_store import ObjectStore, open_store
from pagemill.objects import ObjectStat
from producers.batch_file.many import page_of
from producers.batch_file.records import FileRecord, Page
from producers.batch_file.urls import inside
from producers.batch_file.work import Place
from producers.openai_api.errors import ApiError, bad_request

MAX_BYTES = 200 * 1024 * 1024

# read in pieces of that size: callers may be many, and slow
PIECE_BYTES = 1024 * 1024

# what callers of the API know; only files for batches are of use here
PURPOSES = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")

_ID = re.compile(r"file-[0-9a-f]{32}")


class Files:
    """
    The files of all tenants: a record of each under `files/`, written when its content is under `contents/`.

    Args:
        root: URL of the folder that all is in.
        max_bytes: Of an upload.
        ttl_s: After which a file is gone that has no other time of its own; None keeps them.
    """

    def __init__(
        self,
        root: str,
        *,
        max_bytes: int = MAX_BYTES,
        ttl_s: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._root, self._max_bytes, self._ttl_s, self._clock = root, max_bytes, ttl_s, clock
        self._store: ObjectStore = open_store(root)

    def create(
        self, tenant: str, *, filename: str, purpose: str, data: Iterable[bytes], expires_after_s: int | None = None
    ) -> FileRecord:
        """
        Keep an upload; it is there whole, or not at all.

        Raises:
            ApiError: 413 where it is too large, 400 for a purpose that is none here.
        """
        if purpose not in PURPOSES:
            message = f"the purpose is {purpose[:100]!r}: want one of {', '.join(PURPOSES)}"
            raise bad_request(message, "purpose", "invalid_value")
        place = self.place(tenant, f"file-{uuid7().replace('-', '')}")
        size = 0
        with place.store.open_writer(place.name) as writer:
            for piece in data:
                size += len(piece)
                if size > self._max_bytes:
                    message = f"the file has more than {self._max_bytes:,} bytes"
                    raise ApiError(413, message, param="file", code="file_too_large")
                writer.write(piece)
        return self.add(tenant, place, size=size, filename=filename, purpose=purpose, expires_after_s=expires_after_s)

    def get(self, tenant: str, file_id: str) -> FileRecord:
        """
        Raises:
            ApiError: 404.
        """
        if not _ID.fullmatch(file_id):
            raise _unknown(file_id)
        try:
            record = self._read(tenant, file_id)
        except ObjectNotFound:
            raise _unknown(file_id) from None
        if record.expires_at is not None and record.expires_at <= self._clock():
            self._remove(tenant, file_id)
            raise _unknown(file_id)
        return record

    def list(
        self,
        tenant: str,
        *,
        purpose: str | None = None,
        after: str | None = None,
        limit: int = 10_000,
        newest_first: bool = True,
    ) -> Page[FileRecord]:
        """
        A page of the tenant's files.

        Raises:
            ApiError: 400, for an `after` that is none.
        """
        now = self._clock()
        ids = sorted(
            (entry.name.rpartition("/")[2] for entry in self._store.list(f"files/{tenant}/")), reverse=newest_first
        )

        def wanted(record: FileRecord) -> bool:
            lives = record.expires_at is None or record.expires_at > now
            return lives and purpose in (None, record.purpose)

        return page_of(ids, lambda name: self._read(tenant, name), after=after, limit=limit, wanted=wanted)

    def read(self, tenant: str, file_id: str) -> Iterator[bytes]:
        """
        The content in pieces.

        Raises:
            ApiError: 404, now and not with the first piece.
        """
        self.get(tenant, file_id)
        place = self.place(tenant, file_id)
        try:
            stat = place.store.stat(place.url)
        except ObjectNotFound:
            raise _unknown(file_id) from None
        return _pieces(place, stat)

    def delete(self, tenant: str, file_id: str) -> None:
        """
        Raises:
            ApiError: 404.
        """
        self.get(tenant, file_id)
        self._remove(tenant, file_id)

    def place(self, tenant: str, file_id: str) -> Place:
        """Where the content of a file is, or is to be."""
        return Place(self._store, f"contents/{tenant}/{file_id}")

    def content_url(self, tenant: str, file_id: str) -> str:
        """The content's place for whoever opens it anew."""
        return inside(self._root, f"contents/{tenant}/{file_id}")

    def add(
        self,
        tenant: str,
        place: Place,
        *,
        size: int,
        filename: str,
        purpose: str,
        expires_after_s: int | None = None,
    ) -> FileRecord:
        """Make a file of content that is at its place already."""
        now, ttl_s = int(self._clock()), self._ttl_s if expires_after_s is None else expires_after_s
        record = FileRecord(
            id=place.name.rpartition("/")[2],
            bytes=size,
            created_at=now,
            expires_at=None if ttl_s is None else now + ttl_s,
            filename=filename[:255],
            purpose=purpose,
        )
        self._store.put(f"files/{tenant}/{record.id}", record.model_dump_json().encode())
        return record

    def sweep(self) -> int:
        """Delete the files of all tenants whose time is over; returns how many."""
        now, num_gone = self._clock(), 0
        for entry in self._store.list("files/"):
            _, tenant, file_id = entry.name.split("/")
            try:
                expires_at = self._read(tenant, file_id).expires_at
            except ObjectNotFound:
                # another sweeper was faster
                continue
            if expires_at is not None and expires_at <= now:
                self._remove(tenant, file_id)
                num_gone += 1
        return num_gone

    def _read(self, tenant: str, file_id: str) -> FileRecord:
        return FileRecord.model_validate_json(self._store.get(self._store.url(f"files/{tenant}/{file_id}")))

    def _remove(self, tenant: str, file_id: str) -> None:
        # the record first: nobody is shown a file without content
        self._store.delete(self._store.url(f"files/{tenant}/{file_id}"))
        place = self.place(tenant, file_id)
        place.store.delete(place.url)


def _pieces(place: Place, stat: ObjectStat) -> Iterator[bytes]:
    start = 0
    while start < stat.size:
        piece = place.store.get_range(place.url, start, min(PIECE_BYTES, stat.size - start), stat.etag)
        yield piece
        start += len(piece)


def output_id(batch_id: str, kind: str) -> str:
    """The id of a file that a batch writes: always the same, and sorted by the time of the batch."""
    digest = blake2b(f"{batch_id}\0{kind}".encode(), digest_size=10).hexdigest()
    return f"file-{batch_id.removeprefix('batch_')[:12]}{digest}"


def _unknown(file_id: str) -> ApiError:
    return ApiError(404, f"there is no file {file_id[:100]!r}", param="id", code="not_found")
