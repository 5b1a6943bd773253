"""An object store whose calls are measured."""

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from pagemill.errors import ObjectNotFound, ObjectStoreError, StoreAway
from pagemill.object_store import ObjectStore
from pagemill.objects import ObjectEntry, ObjectStat, ObjectWriter
from worker.metrics import WorkerMetrics

T = TypeVar("T")


class MeasuredStore:
    """Passes all on to another store."""

    def __init__(self, store: ObjectStore, metrics: WorkerMetrics) -> None:
        self._store = store
        self._metrics = metrics

    def __repr__(self) -> str:
        return repr(self._store)

    def put(self, name: str, data: bytes) -> str:
        url = self._timed("put", lambda: self._store.put(name, data))
        self._metrics.moved("out", len(data))
        return url

    def url(self, name: str) -> str:
        return self._store.url(name)

    def put_if_absent(self, name: str, data: bytes) -> str:
        url = self._timed("put_if_absent", lambda: self._store.put_if_absent(name, data))
        self._metrics.moved("out", len(data))
        return url

    def open_writer(self, name: str, *, if_absent: bool = False) -> ObjectWriter:
        """What is written piece by piece is not measured: a worker writes whole results."""
        return self._store.open_writer(name, if_absent=if_absent)

    def stat(self, url: str) -> ObjectStat:
        return self._timed("stat", lambda: self._store.stat(url))

    def list(self, prefix: str = "") -> Iterator[ObjectEntry]:
        """Neither are listings, which a worker does not need."""
        return self._store.list(prefix)

    def get(self, url: str) -> bytes:
        return self._read("get", lambda: self._store.get(url))

    def get_range(self, url: str, start: int, length: int, etag: str | None = None) -> bytes:
        return self._read("get_range", lambda: self._store.get_range(url, start, length, etag))

    def exists(self, url: str) -> bool:
        return self._timed("exists", lambda: self._store.exists(url))

    def delete(self, url: str) -> None:
        self._timed("delete", lambda: self._store.delete(url))

    def _read(self, name: str, action: Callable[[], bytes]) -> bytes:
        data = self._timed(name, action)
        self._metrics.moved("in", len(data))
        return data

    def _timed(self, name: str, action: Callable[[], T]) -> T:
        began, error = time.monotonic(), None
        try:
            return action()
        except ObjectStoreError as raised:
            error = _kind_of(raised)
            raise
        finally:
            self._metrics.store_call(name, time.monotonic() - began, error)


def _kind_of(error: ObjectStoreError) -> str:
    if isinstance(error, ObjectNotFound):
        return "missing"
    return "away" if isinstance(error, StoreAway) else "refused"
