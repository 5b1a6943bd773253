"""
Replies: a stream that is told of each job and batch that asked for it, when that ends.

A job says `reply_to`, the stream's name in its queue, and `reply_context`, a text that comes back. The
reply is written in the script that ends the job, so that there is one for each end, and stays until a
reader has acknowledged it. Several readers share a stream; what one of them took and did not acknowledge
in time, another one gets, so that a reply may be dealt with twice.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from redis import Redis
from redis.exceptions import ResponseError

from pagemill.calls import in_chunks
from pagemill.ids import uuid7
from pagemill.keys import MODELS, QueueKeys
from pagemill.scripts import Arg, Call, load, run, run_many, translated

GROUP = "workers"

# a reader that has held nothing for so long is gone
FORGET_MS = 86_400_000

# entries that one call acknowledges
ACK = 512


class Reply(NamedTuple):
    """
    That a job or a batch has ended.

    Args:
        entry_id: Names the reply in its stream.
        job_id: The job; empty where it is of a batch.
        batch_id: The batch; empty where it is of a job.
        status: How it ended: a ResultStatus of a job, "ended" of a batch.
        context: The `reply_context` that it was submitted with; may be empty.
    """

    entry_id: str
    job_id: str
    batch_id: str
    status: str
    context: str


class Replies:
    """
    One reader of a stream of replies; for one thread.

    All methods raise QueueUnavailable, and may be repeated then: what was read and not acknowledged
    comes again.

    Args:
        name: What jobs say as `reply_to`.
        block_s: Most seconds that `take` waits; the connection's time-out must be longer.
        claim_s: Seconds after which a reply that was not acknowledged is another reader's.
    """

    def __init__(
        self,
        redis: Redis,
        queue: str,
        name: str,
        *,
        reader: str | None = None,
        block_s: float = 2.0,
        claim_s: float = 60.0,
    ) -> None:
        self._redis = redis
        self._keys = QueueKeys(queue)
        self._name = name
        self._reader = reader or uuid7()
        self._block_ms = max(1, round(block_s * 1000))
        self._claim_s = claim_s
        self._claim_at = 0.0

    def take(self, count: int = 64) -> list[Reply]:
        """
        The next replies: first those that others have had for too long, then new ones.

        Waits for new ones where there are none; gives an empty list where none came.
        """
        if time.monotonic() >= self._claim_at:
            claimed = run(self._redis, self._claim(count))
            # a full page may not be all
            self._claim_at = time.monotonic() + (0.0 if len(claimed) == count else self._claim_s / 4)
            if claimed:
                return claimed
        command = ("XREADGROUP", "GROUP", GROUP, self._reader, "COUNT", count, "BLOCK", self._block_ms)
        with translated():
            try:
                read: Any = self._redis.execute_command(*command, "STREAMS", self._keys.replies(self._name), ">")
            except ResponseError as error:
                # a flush or a failover took the group away: the next call makes it anew
                if not str(error).startswith(("NOGROUP", "UNBLOCKED")):
                    raise
                self._claim_at = 0.0
                return []
        return [_read(entry_id, fields) for _, entries in read or () for entry_id, fields in entries]

    def ack(self, replies: Sequence[Reply]) -> None:
        """They have been dealt with, and go."""
        ids: list[Arg] = [reply.entry_id for reply in replies]
        script = load("ack_replies")
        run_many(self._redis, [Call(script, self._keys.base, [self._name, *part], int) for part in in_chunks(ids, ACK)])

    def _claim(self, count: int) -> Call[list[Reply]]:
        args: list[Arg] = [self._name, self._reader, count, round(self._claim_s * 1000), FORGET_MS]

        def parse(rows: list[list[bytes]]) -> list[Reply]:
            return [_read(row[0], dict(zip(row[1::2], row[2::2], strict=True))) for row in rows]

        return Call(load("claim_replies"), self._keys.base, args, parse)


def _read(entry_id: bytes, fields: Mapping[bytes, bytes]) -> Reply:
    def text(name: bytes) -> str:
        return fields.get(name, b"").decode(errors="replace")

    return Reply(entry_id.decode(), text(b"j"), text(b"b"), text(b"st"), text(b"context"))


def queues_with_models(redis: Redis) -> frozenset[str]:
    """The queues that serve a model by name: jobs that ask for it are there."""
    with translated():
        table: Any = redis.hgetall(MODELS)
    return frozenset(queue.decode() for queue in table.values())
