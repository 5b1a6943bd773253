"""
What is kept of files and batches: small JSON records in the queue's server, a tenant's apart from another's.

    <base>:<kind>:<tenant>:<id>   hash   body, and flags beside it     expires
    <base>:<kind>s:<tenant>       zset   ids by creation, in ms        expires with the last record
    <base>:open                   zset   batches that have not ended   expires with the last record
    <base>:parts:<batch>          hash   parts that are written        expires

The base is pagemill:gateway:{<queue>}: gateways of one queue, and of one server, share what they keep.
Blocking: routes call it on threads, and batches run on threads anyway.
"""

import json
import time
from collections.abc import Mapping
from typing import Any, Literal

from redis import Redis

from pagemill.scripts import translated

Kind = Literal["file", "batch"]


class Records:
    """All methods raise QueueUnavailable where the server cannot be reached."""

    def __init__(self, redis: Redis, queue: str, ttl_s: int) -> None:
        self._redis = redis
        self._base = f"pagemill:gateway:{{{queue}}}"
        self._open = f"{self._base}:open"
        self._ttl_s = ttl_s

    def add(self, kind: Kind, tenant: str, body: Mapping[str, Any]) -> None:
        """Keep a new record; a batch is also listed among those that have not ended."""
        now_ms = round(time.time() * 1000)
        with translated(), self._redis.pipeline() as pipeline:
            self._write(pipeline, kind, tenant, body)
            pipeline.zadd(self._index(kind, tenant), {body["id"]: now_ms})
            pipeline.expire(self._index(kind, tenant), self._ttl_s + 60)
            if kind == "batch":
                pipeline.zadd(self._open, {f"{tenant} {body['id']}": now_ms})
                pipeline.expire(self._open, self._ttl_s + 60)
            pipeline.execute()

    def write(self, kind: Kind, tenant: str, body: Mapping[str, Any]) -> None:
        """Replace a record's body; its flags stay."""
        with translated(), self._redis.pipeline() as pipeline:
            self._write(pipeline, kind, tenant, body)
            pipeline.execute()

    def _write(self, pipeline: Any, kind: Kind, tenant: str, body: Mapping[str, Any]) -> None:
        name = self._key(kind, tenant, body["id"])
        pipeline.hset(name, "body", json.dumps(body))
        pipeline.expire(name, self._ttl_s)

    def get(self, kind: Kind, tenant: str, name: str) -> dict[str, Any] | None:
        with translated():
            return _read(self._redis.hget(self._key(kind, tenant, name), "body"))

    def flag(self, kind: Kind, tenant: str, name: str, flag: str) -> None:
        """Note something beside a record that is there."""
        with translated():
            self._redis.hset(self._key(kind, tenant, name), flag, "1")

    def has(self, kind: Kind, tenant: str, name: str, flag: str) -> bool:
        with translated():
            return self._redis.hexists(self._key(kind, tenant, name), flag) is True

    def remove(self, kind: Kind, tenant: str, name: str) -> None:
        with translated(), self._redis.pipeline() as pipeline:
            pipeline.delete(self._key(kind, tenant, name))
            pipeline.zrem(self._index(kind, tenant), name)
            pipeline.execute()

    def page(
        self, kind: Kind, tenant: str, *, after: str | None, limit: int, newest_first: bool = True
    ) -> tuple[list[dict[str, Any]], bool]:
        """The records behind `after`, and whether there are more; those that have expired are passed over."""
        index = self._index(kind, tenant)
        with translated():
            rank = None if after is None else self._rank(index, after, newest_first)
            start = 0 if rank is None else rank + 1
            walk: Any = self._redis.zrevrange if newest_first else self._redis.zrange
            ids = [name.decode() for name in walk(index, start, start + limit)]
            with self._redis.pipeline(transaction=False) as pipeline:
                for name in ids[:limit]:
                    pipeline.hget(self._key(kind, tenant, name), "body")
                found = [_read(body) for body in pipeline.execute()]
        return [body for body in found if body is not None], len(ids) > limit

    def _rank(self, index: str, name: str, newest_first: bool) -> int | None:
        rank: Any = self._redis.zrevrank(index, name) if newest_first else self._redis.zrank(index, name)
        return None if rank is None else int(rank)

    def open_batches(self) -> list[tuple[str, str]]:
        """Tenant and id of batches that have not ended, the oldest first."""
        with translated():
            names: Any = self._redis.zrange(self._open, 0, -1)
        return [(tenant, name) for tenant, _, name in (one.decode().partition(" ") for one in names)]

    def close_batch(self, tenant: str, name: str) -> None:
        """A batch has ended."""
        with translated(), self._redis.pipeline() as pipeline:
            pipeline.zrem(self._open, f"{tenant} {name}")
            pipeline.delete(self._parts(name))
            pipeline.execute()

    def note_part(self, batch: str, index: int, num_good: int, num_bad: int) -> None:
        """A part of a batch's output is written, with so many lines of either kind."""
        with translated(), self._redis.pipeline() as pipeline:
            pipeline.hset(self._parts(batch), str(index), f"{num_good} {num_bad}")
            pipeline.expire(self._parts(batch), self._ttl_s)
            pipeline.execute()

    def parts(self, batch: str) -> dict[int, tuple[int, int]]:
        with translated():
            found: Any = self._redis.hgetall(self._parts(batch))
        return {int(index): (int(value.split()[0]), int(value.split()[1])) for index, value in found.items()}

    def _key(self, kind: Kind, tenant: str, name: str) -> str:
        return f"{self._base}:{kind}:{tenant}:{name}"

    def _index(self, kind: Kind, tenant: str) -> str:
        return f"{self._base}:{kind}s:{tenant}"

    def _parts(self, batch: str) -> str:
        return f"{self._base}:parts:{batch}"


def _read(body: Any) -> dict[str, Any] | None:
    if body is None:
        return None
    found: dict[str, Any] = json.loads(body)
    return found
