"""How far a bulk job is, as its output and its queue tell while it runs, and after."""

from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel, ConfigDict

from pagemill.bulk_client import BulkClient
from pagemill.errors import BatchNotFound, PagemillError
from producers.bulk.errors import BulkError
from producers.bulk.lease import describe, is_gone, lease_name
from producers.bulk.locations import open_folder
from producers.bulk.manifest import read_manifest
from producers.bulk.planner import PLAN, Plan, read_plan
from producers.bulk.shards import list_shards


class BulkStatus(BaseModel):
    """
    Where a job stands.

    Args:
        state: "running" where a process works on it, "stopped" where none does and it is not done.
        runner: Who works on it.
        jobs: In the queue or ended, of its newest batch; -1 where the queue does not know it (any more).
        queue_error: Why the queue could not be asked.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    state: Literal["running", "stopped", "done"]
    runner: str = ""
    num_rows: int
    num_chunks: int
    chunks_done: int
    batch: str = ""
    jobs: int = -1
    jobs_open: int = -1
    queue_error: str = ""


def look(output: str, client: BulkClient) -> BulkStatus:
    """
    Raises:
        BulkError: there is no plan in that output.
    """
    store = open_folder(output)
    plan = read_plan(store)
    if plan is None:
        raise BulkError(f"{output} has no {PLAN}: no job was planned there")
    form, is_done = plan.spec.output_format, read_manifest(store) is not None
    chunks_done = sum(1 for _ in list_shards(store, form))
    if plan.generation and not is_done:
        # those with errors run again
        chunks_done -= sum(1 for _ in list_shards(store, form, "errors"))
    found = BulkStatus(
        name=plan.spec.name,
        state="done" if is_done else "stopped",
        num_rows=plan.num_rows,
        num_chunks=plan.num_chunks,
        chunks_done=chunks_done,
    )
    try:
        return found.model_copy(update=_of_queue(plan, store.url(""), found.state, client))
    except PagemillError as error:
        return found.model_copy(update={"queue_error": str(error)})


def lines(status: BulkStatus) -> Iterator[str]:
    yield f"state     {status.state}{f', by {status.runner}' if status.runner else ''}"
    percent = f" ({status.chunks_done / status.num_chunks:.0%})" if status.num_chunks else ""
    yield f"chunks    {status.chunks_done:,} of {status.num_chunks:,}{percent}, {status.num_rows:,} rows in all"
    if status.jobs >= 0:
        yield f"jobs      {status.jobs:,} in batch {status.batch}, {status.jobs_open:,} open"
    if status.queue_error:
        yield f"queue     {status.queue_error}"


def plan_lines(plan: Plan) -> Iterator[str]:
    yield f"output    {plan.spec.output}"
    yield f"rows      {plan.num_rows:,} in {plan.num_chunks:,} chunks, {plan.size_bytes:,} bytes"
    if plan.num_duplicates:
        yield f"          {plan.num_duplicates:,} with a custom_id that an earlier row has"
    yield f"tokens    about {plan.estimated_tokens:,} at most"
    tokenizer = "the model's tokenizer" if plan.has_tokenizer else "estimated tokens, as no worker shows its tokenizer"
    yield f"context   {plan.context_tokens:,} tokens, counted by {tokenizer}"


def _of_queue(plan: Plan, place: str, state: str, client: BulkClient) -> dict[str, str | int]:
    found: dict[str, str | int] = {}
    holder = client.lease_holder(lease_name(place))
    if holder and not is_gone(holder) and state != "done":
        found |= {"state": "running", "runner": describe(holder)}
    number = 0
    while True:
        batch_id = f"{plan.batch_base}-{number}"
        try:
            batch = client.batch_status(batch_id)
        except BatchNotFound:
            return found
        found |= {"batch": batch_id, "jobs": batch.total, "jobs_open": batch.num_open}
        number += 1
