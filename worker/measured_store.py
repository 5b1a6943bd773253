"""An object store whose calls are measured."""

import time
from collections.abc import Callable
from typing import TypeVar

from pagemill.errors import ObjectNotFound, ObjectStoreError, StoreAway
from pagemill.object_store import ObjectStore
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

    def get(self, url: str) -> bytes:
        return self._read("get", lambda: self._store.get(url))

    def get_range(self, url: str, start: int, length: int) -> bytes:
        return self._read("get_range", lambda: self._store.get_range(url, start, length))

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
