"""
What is known of each batch, in an object store: by whom it is written, nobody's write undoes another's.

    batches/<tenant>/<id>/created    once, by who creates it
    batches/<tenant>/<id>/cancel     once, by who cancels it
    batches/<tenant>/<id>/progress   by its runner, over and over
    batches/<tenant>/<id>/ended      once, by the runner that is first to end it
    open/<tenant>/<id>               while it has not ended: what runners look for
"""

import contextlib

from pagemill.errors import ObjectExists, ObjectNotFound
from pagemill.object_store import ObjectStore
from producers.batch_file.records import FINAL, BatchRecord

Key = tuple[str, str]


class Book:
    """The batches of all tenants; a key is a tenant and a batch's id."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def add(self, key: Key, record: BatchRecord) -> None:
        # no other has its id, so that a write whose answer got lost may be made again; the mark last: who finds it
        # finds the batch
        self._store.put(_name(key, "created"), _packed(record))
        self._store.put(_mark(key), b"")

    def read(self, key: Key) -> BatchRecord:
        """
        Raises:
            ObjectNotFound: there is no such batch.
        """
        for part in ("ended", "progress", "created"):
            try:
                record = BatchRecord.model_validate_json(self._get(_name(key, part)))
            except ObjectNotFound:
                if part == "created":
                    raise
                continue
            return record if record.status in FINAL else self._with_cancel(key, record)
        raise AssertionError("one of them is returned, or raises")

    def ids(self, tenant: str) -> list[str]:
        """The tenant's batches, newest first."""
        return sorted({entry.name.split("/")[2] for entry in self._store.list(f"batches/{tenant}/")}, reverse=True)

    def open_keys(self) -> list[Key]:
        """The batches that have not ended, oldest first."""
        keys = [(parts[1], parts[2]) for parts in (entry.name.split("/") for entry in self._store.list("open/"))]
        return sorted(keys, key=lambda key: key[1])

    def note(self, key: Key, record: BatchRecord) -> None:
        """Let others see how far it is."""
        self._store.put(_name(key, "progress"), _packed(record))

    def end(self, key: Key, record: BatchRecord) -> None:
        """Write its last state, unless another was first, and take its mark away."""
        with contextlib.suppress(ObjectExists):
            self._store.put_if_absent(_name(key, "ended"), _packed(record))
        self.close(key)

    def close(self, key: Key) -> None:
        """Take away the mark of a batch that has ended."""
        self._store.delete(self._store.url(_mark(key)))

    def sweep(self, before: float) -> int:
        """Forget the batches of all tenants that were created before a time and have ended; returns how many."""
        open_keys = set(self.open_keys())
        gone: set[Key] = set()
        for entry in self._store.list("batches/"):
            _, tenant, batch_id, _ = entry.name.split("/")
            if created_at(batch_id) < before and (tenant, batch_id) not in open_keys:
                self._store.delete(entry.url)
                gone.add((tenant, batch_id))
        return len(gone)

    def cancel(self, key: Key, now: int) -> None:
        """Ask its runner to end it; the first time counts."""
        try:
            self._store.put_if_absent(_name(key, "cancel"), str(now).encode())
        except ObjectExists:
            return

    def cancelled_at(self, key: Key) -> int | None:
        """When it was cancelled first; None where it was not."""
        try:
            return int(self._get(_name(key, "cancel")))
        except ObjectNotFound:
            return None

    def _with_cancel(self, key: Key, record: BatchRecord) -> BatchRecord:
        at = self.cancelled_at(key)
        return record if at is None else record.model_copy(update={"status": "cancelling", "cancelling_at": at})

    def _get(self, name: str) -> bytes:
        return self._store.get(self._store.url(name))


def created_at(batch_id: str) -> float:
    """Seconds since 1970, as its id tells."""
    return int(batch_id.removeprefix("batch_")[:12], 16) / 1000


def _name(key: Key, part: str) -> str:
    return f"batches/{key[0]}/{key[1]}/{part}"


def _mark(key: Key) -> str:
    return f"open/{key[0]}/{key[1]}"


def _packed(record: BatchRecord) -> bytes:
    return record.model_dump_json().encode()
