"""
Runs the API's batches: looks for those that are open, and works on some of them at a time.

It is a process of its own, `python -m producers.batch_file serve`, and not a thread of the gateway: the
runner is plain blocking code that parses and writes JSON all the time, and would take the interpreter
from the gateway's event loop. As all that is known of a batch lies in the object store, and a lease in
the queue says who works on it, there may be several such processes, and any of them may die.
"""

import threading
import time
from dataclasses import dataclass, field

import structlog

from pagemill.bulk_client import BulkClient
from pagemill.errors import ObjectNotFound, PagemillError
from pagemill.object_store import open_store
from producers.batch_file.book import Book, Key
from producers.batch_file.files import MAX_BYTES, Files
from producers.batch_file.records import BatchFault
from producers.batch_file.turn import Share, Turn
from producers.bulk.errors import Interrupted, Occupied
from producers.bulk.lease import LEASE_S, OutputLease

log = structlog.get_logger(__name__)

POLL_S = 1.0

# a batch that others work on, or that could not go on, is looked at again after so long
PAUSE_S = 5.0

# what has expired is looked for so often
SWEEP_S = 3600.0

# unforeseen errors in a row after which a batch has failed
MAX_CRASHES = 5


@dataclass(frozen=True, slots=True)
class Capacity:
    """
    What a server does at a time.

    Args:
        batches: That run. Those that are cancelled or late come on top: they end without new work.
        jobs, tokens: In the queue, of all of them together; each has its part of that.
        max_lines, max_bytes: Of an input file; more fails its batch.
        ttl_s: How long what batches write, and what is known of them, is kept; None for ever.
    """

    batches: int = 8
    jobs: int = 4096
    tokens: int = 8_000_000
    max_lines: int = 50_000
    max_bytes: int = MAX_BYTES
    ttl_s: int | None = None

    def share(self) -> Share:
        return Share(
            max_lines=self.max_lines,
            max_bytes=self.max_bytes,
            max_jobs=max(1, self.jobs // self.batches),
            max_tokens=max(1, self.tokens // self.batches),
        )


@dataclass(slots=True)
class _Slot:
    """A batch that is being worked on."""

    thread: threading.Thread
    turn: Turn | None = None
    # it runs, and does not just end
    counts: bool = True


@dataclass(slots=True)
class _Pauses:
    """Batches that are let alone for a while, and those that were asked lately whether they just end."""

    until: dict[Key, float] = field(default_factory=dict)
    asked: dict[Key, float] = field(default_factory=dict)
    crashes: dict[Key, int] = field(default_factory=dict)

    def over(self, key: Key) -> bool:
        return time.monotonic() >= self.until.get(key, 0.0)

    def begin(self, key: Key) -> None:
        self.until[key] = time.monotonic() + PAUSE_S

    def may_ask(self, key: Key) -> bool:
        """Whether it is time; then it is asked now."""
        now = time.monotonic()
        if now < self.asked.get(key, 0.0):
            return False
        self.asked[key] = now + PAUSE_S
        return True

    def keep(self, keys: set[Key]) -> None:
        """Know no others."""
        for known in (self.until, self.asked, self.crashes):
            for key in known.keys() - keys:
                del known[key]


class BatchServer:
    """
    Works on open batches until it is stopped.

    Args:
        root: URL of the folder that all batches and files are in.
        client: Of the queue; shared by all threads.
    """

    def __init__(
        self,
        root: str,
        client: BulkClient,
        capacity: Capacity = Capacity(),
        *,
        poll_s: float = POLL_S,
        lease_s: float = LEASE_S,
    ) -> None:
        self._root, self._client, self._capacity = root, client, capacity
        self._poll_s, self._lease_s = poll_s, lease_s
        self._book = Book(open_store(root))
        self._files = Files(root, ttl_s=capacity.ttl_s)
        self._stopping = threading.Event()
        self._lock = threading.Lock()

        # all the mutable state there is
        self._slots: dict[Key, _Slot] = {}
        self._pauses = _Pauses()
        self._sweep_at = time.monotonic()

    def run(self) -> None:
        """Work until `stop`; then what runs is left where it stands."""
        while not self._stopping.wait(self._poll_s):
            try:
                self.look()
                if time.monotonic() >= self._sweep_at:
                    self._sweep_at = time.monotonic() + SWEEP_S
                    self.sweep()
            except PagemillError as error:
                log.warning("batches.not_looked", error=str(error))
        self._wind_up()

    def sweep(self) -> None:
        """Delete files and batches whose time is over."""
        num_files, num_batches = self._files.sweep(), 0
        if self._capacity.ttl_s is not None:
            num_batches = self._book.sweep(time.time() - self._capacity.ttl_s)
        if num_files or num_batches:
            log.info("batches.swept", files=num_files, batches=num_batches)

    def stop(self) -> None:
        """Let `run` end; for signal handlers."""
        self._stopping.set()

    def look(self) -> None:
        """Begin with what is open and has room."""
        keys = self._book.open_keys()
        self._pauses.keep(set(keys))
        waiting = [key for key in keys if key not in self._slots and self._pauses.over(key)]
        for key in self._in_turn(waiting):
            with self._lock:
                has_room = sum(slot.counts for slot in self._slots.values()) < self._capacity.batches
            if has_room:
                self._begin(key, counts=True)
            elif self._pauses.may_ask(key) and self._is_ending(key):
                self._begin(key, counts=False)

    def _in_turn(self, keys: list[Key]) -> list[Key]:
        """A batch of each tenant in turn, the oldest first; those who have some running come later."""
        with self._lock:
            num_of = [tenant for tenant, _ in self._slots]
        places: dict[str, int] = {}
        order = []
        for key in keys:
            places[key[0]] = places.get(key[0], num_of.count(key[0])) + 1
            order.append((places[key[0]], key[1], key))
        return [key for _, _, key in sorted(order)]

    def _is_ending(self, key: Key) -> bool:
        """Whether nothing new is to be done for it."""
        try:
            record = self._book.read(key)
        except ObjectNotFound:
            return False
        return record.status == "cancelling" or time.time() >= (record.expires_at or 0)

    def _begin(self, key: Key, *, counts: bool) -> None:
        thread = threading.Thread(target=self._work, args=(key,), name=f"batch-{key[1]}", daemon=True)
        with self._lock:
            self._slots[key] = _Slot(thread, counts=counts)
        thread.start()

    def _work(self, key: Key) -> None:
        try:
            with OutputLease(self._client, key[1], lease_s=self._lease_s, wait=False) as lease:
                share = self._capacity.share()
                turn = Turn(key, self._root, self._client, share, book=self._book, files=self._files)
                with self._lock:
                    self._slots[key].turn = turn
                if self._stopping.is_set():
                    turn.stop()
                self._run(key, turn, lease)
        except (Occupied, Interrupted):
            self._pauses.begin(key)
        except PagemillError as error:
            log.warning("batch.waits", **_ids(key), error=str(error))
            self._pauses.begin(key)
        finally:
            with self._lock:
                del self._slots[key]

    def _run(self, key: Key, turn: Turn, lease: OutputLease) -> None:
        try:
            turn.run(lease)
            log.info("batch.ended", **_ids(key), status=self._book.read(key).status)
        except PagemillError:
            raise
        except Exception:
            crashes = self._pauses.crashes[key] = self._pauses.crashes.get(key, 0) + 1
            log.exception("batch.crashed", **_ids(key), times=crashes)
            self._pauses.begin(key)
            if crashes >= MAX_CRASHES:
                turn.fail(BatchFault(code="internal_error", message="the batch could not be run"))

    def _wind_up(self) -> None:
        with self._lock:
            slots = list(self._slots.values())
        for slot in slots:
            if slot.turn is not None:
                slot.turn.stop()
        for slot in slots:
            slot.thread.join()


def _ids(key: Key) -> dict[str, str]:
    return {"tenant": key[0], "batch_id": key[1]}
