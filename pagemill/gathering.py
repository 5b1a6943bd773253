"""The results of very many jobs, gathered while more of them are submitted."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagemill.client_core import CHUNK, POLL_S, Awaited, read_result
from pagemill.connection import Servers
from pagemill.errors import QueueUnavailable, StoreAway
from pagemill.keys import QueueKeys
from pagemill.messages import TERMINAL_STATES, Accepted
from pagemill.object_store import ObjectStore
from pagemill.schema import Result
from pagemill.scripts import translated

# events may be trimmed before they are read, and a server may be replaced: all are looked at as often
LOOK_S = 10 * POLL_S


@dataclass(slots=True)
class Gathered:
    """
    What has ended since the last call.

    Args:
        lost: Jobs that the queue does not know (any more): they have no result.
    """

    results: list[Result] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


class Gathering:
    """
    Follows the events of one queue and fetches the results of the jobs that were added.

    Make it before the jobs are submitted: it sees what ends from then on. For one thread.
    """

    def __init__(
        self,
        servers: Servers,
        pipeline: Callable[..., list[Any]],
        keys: QueueKeys,
        store: ObjectStore | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._servers, self._pipeline, self._keys, self._store, self._clock = servers, pipeline, keys, store, clock
        [entries] = pipeline(("XREVRANGE", keys.events, "+", "-", "COUNT", 1))
        self._open: set[str] = set()
        self._awaited = Awaited(keys, self._open, entries[0][0].decode() if entries else "0-0")
        # not to be waited for: they have ended, or what they gave could not be read
        self._ended: list[str] = []
        self._look_at = clock() + LOOK_S

    def __len__(self) -> int:
        return len(self._open)

    def add(self, accepted: Iterable[Accepted]) -> None:
        """Gather these too, as a submit has answered; those that had ended before come with the next call."""
        for one in accepted:
            self._open.add(one.job_id)
            if one.state in TERMINAL_STATES:
                self._ended.append(one.job_id)

    def take(self, wait_s: float) -> Gathered:
        """
        What has ended; waits for a first one.

        Raises:
            QueueUnavailable: nothing is lost by that; call again.
            StoreAway: results are in a store that cannot be read now; call again.
            ObjectStoreError: they are in a store that this client cannot read.
        """
        gathered = Gathered()
        if not self._ended:
            self._awaited.hear(self._events(wait_s))
            self._ended = list(self._awaited.heard)
            self._awaited.heard.clear()
        if self._clock() >= self._look_at:
            self._ended = sorted(self._open)
            self._look_at = self._clock() + LOOK_S
        while self._ended:
            chunk = self._ended[:CHUNK]
            try:
                self._fetch(chunk, gathered)
            except QueueUnavailable:
                if not gathered.results and not gathered.lost:
                    raise
                # first what could be read, which nobody would read again; these with the next call
                break
            del self._ended[: len(chunk)]
        return gathered

    def _events(self, wait_s: float) -> list[Any]:
        block = ("BLOCK", max(1, round(wait_s * 1000))) if wait_s > 0 else ()
        command = ("XREAD", "COUNT", 512, *block, "STREAMS", self._keys.events, self._awaited.entry_id)
        with translated():
            reply: Any = self._servers.at(self._keys.base).execute_command(*command)
        return reply[0][1] if reply else []

    def _fetch(self, job_ids: Sequence[str], gathered: Gathered) -> None:
        wanted = [job_id for job_id in job_ids if job_id in self._open]
        # the job first: one that ends in between then shows its result
        known = (("EXISTS", self._keys.job(job_id)) for job_id in wanted)
        records = (("GET", self._keys.result(job_id)) for job_id in wanted)
        replies = self._pipeline(*known, *records)
        for job_id, there, record in zip(wanted, replies[: len(wanted)], replies[len(wanted) :], strict=True):
            if record is not None:
                try:
                    gathered.results.append(read_result(record, self._store))
                except StoreAway:
                    if not gathered.results and not gathered.lost:
                        raise
                    # first what could be read; this one again with the next look
                    self._look_at = self._clock()
                    continue
            elif not there:
                gathered.lost.append(job_id)
            else:
                continue
            self._open.discard(job_id)
