"""`pagemill.submit_batch`: many rows as one batch, whose end a task of the caller's is told of."""

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from pagemill.client import Client
from pagemill.errors import InvalidJob
from pagemill.job_input import read_jsonl
from pagemill.object_store import ObjectStore
from pagemill.schema import Job
from producers.tasks.failures import failure
from producers.tasks.ids import batch_id_of, row_id
from producers.tasks.ingress import batch_fields

# of one message or file: what is larger is bulk's work, which reads in pieces
MAX_ROWS = 100_000
MAX_SOURCE_BYTES = 64 * 1024 * 1024

# what a row cannot say, as the batch says it
_RESERVED = frozenset({"id", "version", "batch", "idempotency_key"})

ARGUMENTS = ("items", "uri", "idem", "defaults", "callback", "result_ttl_s", "tenant", "model", "webhook", "metadata")


def submit_batch(
    client: Client, task_id: str, given: Mapping[str, Any], *, reply_to: str, source: ObjectStore | None
) -> dict[str, Any]:
    """
    Put all rows into the queue as one sealed batch, each once, however often this is called.

    All rows are judged before the first is submitted. The batch's id, and with it that of each row's job,
    is made of `idem`, else of the task's id.

    Args:
        given: What the task was called with (docs/celery.md).
        source: Where `uri` is read from.

    Raises:
        TaskFailure: an argument is wrong.
        InvalidJob: a row is; the message names it.
        Conflict: the same `idem` came with other rows, or another callback.
        Busy, QueueUnavailable, StoreAway: it is to be tried again.
    """
    _refuse_unknown(given)
    batch_id = batch_id_of(str(given.get("idem") or task_id))
    model = given.get("model")
    callback = given.get("callback")
    defaults = {name: given[name] for name in ("tenant", "model", "result_ttl_s") if given.get(name) is not None}
    jobs = _jobs(_rows(given, source), {"lane": "bulk", **defaults, **(given.get("defaults") or {})}, batch_id)
    status = client.create_batch(
        batch_id,
        model=model,
        tenant=given.get("tenant"),
        result_ttl_s=given.get("result_ttl_s"),
        webhook=given.get("webhook"),
        # with it the batch is another one where its rows are
        metadata={**(given.get("metadata") or {}), "rows": _digest(jobs)},
        reply_to=reply_to if callback else None,
        reply_context=_callback(callback) if callback else None,
    )
    if status.state == "open":
        client.submit_many(jobs)
        client.seal_batch(batch_id)
    return batch_fields(client, batch_id)


def _refuse_unknown(given: Mapping[str, Any]) -> None:
    unknown = sorted(set(given) - set(ARGUMENTS))
    if unknown:
        raise failure("invalid_arguments", f"{unknown[0]}: unknown argument; want {', '.join(ARGUMENTS)}")
    if (given.get("items") is None) == (given.get("uri") is None):
        raise failure("invalid_arguments", "give exactly one of items and uri")
    for name in ("defaults", "metadata"):
        if not isinstance(given.get(name) or {}, dict):
            raise failure("invalid_arguments", f"{name}: want an object")


def _rows(given: Mapping[str, Any], source: ObjectStore | None) -> Sequence[bytes]:
    """The rows as lines of JSON, whichever way they came."""
    items, uri = given.get("items"), given.get("uri")
    if items is not None:
        if not isinstance(items, list) or len(items) > MAX_ROWS:
            raise failure("invalid_arguments", f"items: want a list of no more than {MAX_ROWS:,} rows")
        return [json.dumps({"prompt": item} if isinstance(item, str) else item).encode() for item in items]
    if source is None:
        raise failure("invalid_arguments", f"uri is {uri!r}, and the ingress has no celery_batch_source to read from")
    data = source.get_range(str(uri), 0, MAX_SOURCE_BYTES + 1)
    if len(data) > MAX_SOURCE_BYTES:
        raise failure("payload_too_large", f"{uri} has more than {MAX_SOURCE_BYTES:,} bytes: make it a bulk job")
    lines = data.split(b"\n")
    if len(lines) > MAX_ROWS + 1:
        raise failure("payload_too_large", f"{uri} has more than {MAX_ROWS:,} lines: make it a bulk job")
    return lines


def _jobs(rows: Sequence[bytes], defaults: Mapping[str, Any], batch_id: str) -> list[Job]:
    jobs: list[Job] = []
    for number, job in read_jsonl(rows, defaults):
        if isinstance(job, InvalidJob):
            raise InvalidJob(job.code, f"row {number}: {job}")
        wrong = sorted(job.model_fields_set & _RESERVED)
        if wrong:
            raise InvalidJob("invalid_job", f"row {number}: {wrong[0]} is not a row's to say")
        jobs.append(Job.build(**_given(job), id=row_id(batch_id, len(jobs)), batch=batch_id))
    return jobs


def _given(job: Job) -> dict[str, Any]:
    return {name: getattr(job, name) for name in job.model_fields_set}


def _digest(jobs: Sequence[Job]) -> str:
    digest = blake2b(digest_size=16)
    for job in jobs:
        digest.update(job.body())
    return digest.hexdigest()


def _callback(callback: object) -> str:
    """What the batch's reply brings back: the signature of the task to call."""
    if isinstance(callback, str):
        callback = {"task": callback}
    if not isinstance(callback, dict) or not isinstance(callback.get("task"), str):
        raise failure("invalid_arguments", "callback: want the name of a task, or a signature")
    return json.dumps({"callback": callback})
