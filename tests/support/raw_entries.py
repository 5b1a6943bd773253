"""Raw entries as programs write them, and what a worker does with them, step by step."""

import json
from typing import Any

from redis import Redis

from pagemill.calls import Answer
from pagemill.client_core import prepare
from pagemill.keys import QueueKeys
from pagemill.raw import Adoption, RawEntry, Refusal, Taken
from pagemill.schema import Failure, Job
from tests.support.servers import BlockingConsumer


def write(redis: Redis, queue: str, payload: bytes | None = None, **fields: Any) -> str:
    """One XADD, as any program does it; the entry's id."""
    body = json.dumps({"prompt": "Why?"} | fields).encode() if payload is None else payload
    entry_id: bytes = redis.xadd(QueueKeys(queue).raw, {"d": body})
    return entry_id.decode()


def take(worker: BlockingConsumer) -> list[RawEntry]:
    taken: Taken = worker.run(worker.consumer.raw.take())
    return taken.entries


def adopt(worker: BlockingConsumer, *entries: RawEntry, limit: int = 0, job: Job | None = None) -> list[Answer | None]:
    adoptions = []
    for entry in entries:
        fields = {"id": entry.job_id} | json.loads(entry.payload or b"{}")
        adoptions.append(Adoption(entry.entry_id, prepare(job or Job.build(**fields))))
    answers: list[Answer | None] = worker.run(worker.consumer.raw.adopt(adoptions, limit))
    return answers


def refuse(worker: BlockingConsumer, entry: RawEntry, job_id: str, why: str = "bad") -> int:
    refusal = Refusal(entry.entry_id, job_id, Failure(code="invalid_job", message=why))
    refused: int = worker.run(worker.consumer.raw.refuse([refusal]))
    return refused


def dead_letters(redis: Redis, queue: str) -> list[dict[bytes, bytes]]:
    return [fields for _, fields in redis.xrange(f"{QueueKeys(queue).base}:dead")]


def in_stream(redis: Redis, queue: str) -> tuple[int, int]:
    """Entries that are there, and those of them that are in some worker's hands."""
    raw = QueueKeys(queue).raw
    return int(redis.xlen(raw)), int(redis.xpending(raw, "workers")["pending"])
