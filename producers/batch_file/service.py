"""
What stands behind /v1/files and /v1/batches: for a gateway's routes, which know no more than this.

All of it is kept in an object store, under the tenant's name, so that any gateway answers for what
another one took, and a restart loses nothing. All methods block, for some milliseconds or as long as
a file takes, and may be called from any thread: from an event loop through `asyncio.to_thread`.

They raise ApiError (404 for what is not there or another tenant's, 400 for what is wrong, 409 for a
batch that has ended, 413 for too much) with OpenAI's body, or a PagemillError where the store or the
queue cannot be used, which `producers.openai_api.errors.of_pagemill` translates.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from producers.batch_file.batches import Batches
from producers.batch_file.files import MAX_BYTES, Files
from producers.batch_file.records import BatchRecord, FileRecord, Page
from producers.batch_file.urls import inside


def folder_of(object_store: str, queue: str) -> str:
    """Where all of this lies in an object store: each queue's apart, as the leases of who works on it are."""
    return inside(object_store, f"openai/{queue}")


class FileKeeper(Protocol):
    """The files of all tenants."""

    def create(
        self, tenant: str, *, filename: str, purpose: str, data: Iterable[bytes], expires_after_s: int | None = None
    ) -> FileRecord:
        """
        Keep an upload; it is there whole, or not at all.

        Args:
            data: Its bytes in pieces: `iter(lambda: upload.file.read(1 << 20), b"")`.
        """
        ...

    def get(self, tenant: str, file_id: str) -> FileRecord: ...

    def list(
        self,
        tenant: str,
        *,
        purpose: str | None = None,
        after: str | None = None,
        limit: int = 10_000,
        newest_first: bool = True,
    ) -> Page[FileRecord]: ...

    def read(self, tenant: str, file_id: str) -> Iterator[bytes]:
        """The content in pieces; what is wrong is raised before the first one is asked for."""
        ...

    def delete(self, tenant: str, file_id: str) -> None: ...


class BatchRunner(Protocol):
    """
    The batches of all tenants.

    Another process does the work (`python -m producers.batch_file serve`, as many as one likes): a
    gateway creates, shows and cancels, and its event loop stays free.
    """

    def create(
        self,
        tenant: str,
        *,
        input_file_id: str,
        endpoint: str,
        completion_window: str = "24h",
        metadata: Mapping[str, str] | None = None,
    ) -> BatchRecord:
        """A new batch, in `validating`; a window of 24h, or any other number of s, m, h or d up to 30d."""
        ...

    def get(self, tenant: str, batch_id: str) -> BatchRecord: ...

    def list(self, tenant: str, *, after: str | None = None, limit: int = 20) -> Page[BatchRecord]:
        """Newest first."""
        ...

    def running(self, *, limit: int) -> tuple[tuple[tuple[str, BatchRecord], ...], int]:
        """Those of all tenants that have not ended, each with its tenant, the newest; and how many there are."""
        ...

    def cancel(self, tenant: str, batch_id: str) -> BatchRecord:
        """`cancelling` now, and `cancelled` when what it has is in its files."""
        ...


def open_service(
    object_store: str, queue: str, *, max_bytes: int = MAX_BYTES, ttl_s: int | None = None
) -> tuple[FileKeeper, BatchRunner]:
    """
    The files and batches of a queue's gateways.

    Args:
        object_store: Its URL, as `ClientSettings.object_store`.
        queue: The gateway's own.
        max_bytes: Of an upload.
        ttl_s: How long an upload is kept; None for ever.

    Raises:
        SettingsError: it is no URL of a store.
    """
    root = folder_of(object_store, queue)
    return Files(root, max_bytes=max_bytes, ttl_s=ttl_s), Batches(root)
