"""How long the jobs of a worker that was ended stay in nobody's hands."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from redis import Redis
from redis.exceptions import ResponseError

from pagemill.keys import QueueKeys
from pagemill.messages import TERMINAL_STATES

# a worker of the fake engine holds fewer
_MOST_JOBS = 1000


@dataclass(slots=True)
class _Gone:
    kind: str
    worker_id: str
    at: float
    job_ids: set[str]


class Resumes:
    """
    Watches the jobs of workers that were ended. Time in which no worker was there to take them does not count.

    Args:
        longest: Written: seconds by kind of end.
        lease_s: Nothing is taken back within a lease of a time when the server was away.
    """

    def __init__(self, redis: Redis, queue: str, longest: dict[str, float], *, lease_s: float) -> None:
        self._redis = redis
        self._keys = QueueKeys(queue)
        self._longest = longest
        self._gone: list[_Gone] = []
        self._lease_s = lease_s
        self._restarted_at: float | None = None
        self._looked_at = time.monotonic()

    def held_by(self, worker_id: str) -> set[str]:
        """The jobs that a worker has claimed and not ended."""
        found: set[str] = set()
        for stream in self._redis.smembers(f"{self._keys.base}:pending"):
            for row in self._pending(stream, worker_id):
                body = self._redis.xrange(stream, row["message_id"], row["message_id"])
                found.update(fields[b"j"].decode() for _, fields in body)
        return found

    def _pending(self, stream: bytes, worker_id: str) -> list[dict[str, Any]]:
        try:
            return list(self._redis.xpending_range(stream, "workers", "-", "+", _MOST_JOBS, consumername=worker_id))
        except ResponseError as error:
            # a stream that has become empty since it was listed is gone, its group too
            if not str(error).startswith("NOGROUP"):
                raise
            return []

    def ended(self, kind: str, worker_id: str, job_ids: set[str]) -> None:
        """Note that a worker was just ended, and what it held."""
        now = time.monotonic()
        if self._restarted_at is None or now - self._restarted_at > self._lease_s:
            self._gone.append(_Gone(kind, worker_id, now, job_ids))

    def look(self, anybody_serves: Callable[[], bool]) -> None:
        """See which of the jobs are in other hands by now."""
        now = time.monotonic()
        passed_s, self._looked_at = now - self._looked_at, now
        nobody_serves = bool(self._gone) and not anybody_serves()
        for gone in list(self._gone):
            if nobody_serves:
                gone.at += min(passed_s, now - gone.at)
            gone.job_ids = self._waiting(gone)
            if not gone.job_ids:
                self._gone.remove(gone)
                self._longest[gone.kind] = max(self._longest.get(gone.kind, 0.0), round(now - gone.at, 2))

    def forget(self) -> None:
        """The server was away: what waits now waits for it, and for a lease to pass."""
        self._gone.clear()
        self._restarted_at = time.monotonic()

    def _waiting(self, gone: _Gone) -> set[str]:
        job_ids = sorted(gone.job_ids)
        with self._redis.pipeline(transaction=False) as pipeline:
            for job_id in job_ids:
                pipeline.hmget(self._keys.job(job_id), "st", "own")
            found = pipeline.execute()
        return {job_id for job_id, fields in zip(job_ids, found, strict=True) if _waits(*fields, gone.worker_id)}


def _waits(state: bytes | None, owner: bytes | None, worker_id: str) -> bool:
    if state is None or state.decode() in {*TERMINAL_STATES, "suspect"}:
        return False
    return state != b"running" or owner == worker_id.encode()
