"""Deliveries and an intake for tests of the worker that need no queue."""

from typing import Any

from pagemill.messages import Delivery
from pagemill.object_store import ObjectStore
from worker.fake_engine import ByteTokenizer
from worker.intake import Intake


def delivery(payload: bytes | None = None, **fields: Any) -> Delivery:
    values: dict[str, Any] = {
        "job_id": "job",
        "lane": "standard",
        "tenant": "default",
        "stream": "s",
        "entry_id": "1-1",
        "attempt": 1,
        "payload": payload,
        "payload_ref": None,
        "tokens": 10,
        "seed": 77,
        "accepted_ms": 0,
        "started_ms": 0,
        "deadline_ms": 0,
        "result_ttl_s": 60,
        "stream_tokens": False,
    }
    return Delivery(**values | fields)


def intake(store: ObjectStore | None = None) -> Intake:
    return Intake(ByteTokenizer(), frozenset({"fake"}), 100, "print-1", store)
