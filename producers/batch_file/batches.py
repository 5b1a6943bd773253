"""Batches as the API's callers create, watch and cancel them; the BatchRunner of service.py."""

import contextlib
import re
import time
from collections.abc import Callable, Mapping

from pydantic import ValidationError

from pagemill.errors import ObjectNotFound
from pagemill.ids import uuid7
from pagemill.object_store import open_store
from producers.batch_file.book import Book
from producers.batch_file.files import Files
from producers.batch_file.many import page_of
from producers.batch_file.records import FINAL, BatchRecord, Page
from producers.openai_api.batch_lines import ENDPOINTS
from producers.openai_api.errors import ApiError, bad_request, of_validation

MAX_WINDOW_S = 30 * 86400

_ID = re.compile(r"batch_[0-9a-f]{32}")
_WINDOW = re.compile(r"([1-9]\d{0,7})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class Batches:
    """
    The batches of all tenants, in the folder that their files are in.

    Args:
        root: URL of the folder.
    """

    def __init__(self, root: str, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._files = Files(root, clock=clock)
        self._book = Book(open_store(root))

    def create(
        self,
        tenant: str,
        *,
        input_file_id: str,
        endpoint: str,
        completion_window: str = "24h",
        metadata: Mapping[str, str] | None = None,
    ) -> BatchRecord:
        """
        Have a file run; its lines are looked at later.

        Raises:
            ApiError: 400, or 404 for the file.
        """
        if endpoint not in ENDPOINTS:
            raise bad_request(f"the endpoint is {endpoint[:100]!r}: want {' or '.join(ENDPOINTS)}", "endpoint")
        now = int(self._clock())
        file = self._files.get(tenant, input_file_id)
        if file.purpose != "batch":
            raise bad_request(f"the purpose of {file.id} is {file.purpose!r}: want 'batch'", "input_file_id")
        try:
            record = BatchRecord.model_validate(
                {
                    "id": f"batch_{uuid7().replace('-', '')}",
                    "endpoint": endpoint,
                    "input_file_id": file.id,
                    "completion_window": completion_window,
                    "created_at": now,
                    "expires_at": now + window_s(completion_window),
                    "metadata": metadata,
                }
            )
        except ValidationError as error:
            raise of_validation(error) from None
        self._book.add((tenant, record.id), record)
        return record

    def get(self, tenant: str, batch_id: str) -> BatchRecord:
        """
        Raises:
            ApiError: 404.
        """
        unknown = ApiError(404, f"there is no batch {batch_id[:100]!r}", param="id", code="not_found")
        if not _ID.fullmatch(batch_id):
            raise unknown
        try:
            return self._book.read((tenant, batch_id))
        except ObjectNotFound:
            raise unknown from None

    def list(self, tenant: str, *, after: str | None = None, limit: int = 20) -> Page[BatchRecord]:
        """
        A page of the tenant's batches, newest first.

        Raises:
            ApiError: 400, for an `after` that is none.
        """
        ids = self._book.ids(tenant)
        return page_of(ids, lambda name: self._book.read((tenant, name)), after=after, limit=limit)

    def running(self, *, limit: int) -> tuple[tuple[tuple[str, BatchRecord], ...], int]:
        """
        The newest batches of all tenants that have not ended, each with its tenant; and how many there are.
        """
        keys = self._book.open_keys()[::-1]
        found = []
        for key in keys[:limit]:
            # one that ends meanwhile may be forgotten
            with contextlib.suppress(ObjectNotFound):
                found.append((key[0], self._book.read(key)))
        return tuple(found), len(keys)

    def cancel(self, tenant: str, batch_id: str) -> BatchRecord:
        """
        Have it ended early; what it has by then is in its files.

        Raises:
            ApiError: 404, or 409 where it has ended.
        """
        record = self.get(tenant, batch_id)
        if record.status in FINAL:
            raise ApiError(409, f"{record.id} cannot be cancelled: it is {record.status}", code="batch_ended")
        self._book.cancel((tenant, batch_id), int(self._clock()))
        return self.get(tenant, batch_id)


def window_s(text: str) -> int:
    """
    The seconds of a completion window.

    Raises:
        ApiError: it is none, or too long.
    """
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * _SECONDS[found[2]] if found else 0
    if not 0 < seconds <= MAX_WINDOW_S:
        raise bad_request(
            f"the completion_window is {text[:100]!r}: want 24h, or another number of s, m, h or d up to 30d",
            "completion_window",
            "invalid_value",
        )
    return seconds
