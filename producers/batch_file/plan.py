"""
The plan of a batch file, kept in the folder that its work is done in.

The chunks of the input are in the same file as those of a bulk job (producers/bulk/planner.py);
`plan.json`, written last, says what was planned from what. It is made once.
"""

import time
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict

from pagemill.bulk_client import BulkClient
from pagemill.errors import UnknownModel
from pagemill.ids import uuid7
from pagemill.object_store import ObjectStore
from producers.batch_file.errors import BatchFileError, Rejected
from producers.batch_file.lines import Survey, parse_line
from producers.batch_file.records import BatchFault
from producers.bulk.columns import Columns
from producers.bulk.jsonl import LineParser
from producers.bulk.locations import locate
from producers.bulk.planner import CHUNKS, PLAN, context_of, read_plan_of
from producers.bulk.sources import Source
from producers.openai_api.batch_lines import Endpoint

ROWS_PER_CHUNK = 256


@dataclass(frozen=True, slots=True)
class Order:
    """
    What is to be run.

    Args:
        input: s3:// or file:// URL, or path, of JSON lines; may be packed, or several by a pattern.
        name: Of the batch, in the ids of its jobs; None makes one.
        endpoint: That all lines must name; None takes the first line's that has one.
        deadline: Time of the wall clock at which what has no answer gets none.
        max_lines, max_bytes: Of the input; more fails the whole.
        max_line_bytes: A longer line fails alone, and is never in memory.
        max_jobs, max_tokens: Most jobs, and estimated tokens of them, in the queue at a time.
    """

    input: str
    name: str | None = None
    endpoint: Endpoint | None = None
    tenant: str = "default"
    deadline: float | None = None
    max_lines: int | None = None
    max_bytes: int | None = None
    max_line_bytes: int = 4 * 1024 * 1024
    rows_per_chunk: int = ROWS_PER_CHUNK
    max_jobs: int = 2048
    max_tokens: int = 4_000_000


class Plan(BaseModel):
    """
    What was found in the input.

    Args:
        name: Of the batch, and what the ids of its Pagemill batches and jobs come from.
        model: That its lines are answered by.
        context_tokens: Of prompt and answer together, which bounds answers that say no bound.
        created_at: Seconds since 1970.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    name: str
    source_fingerprint: str
    endpoint: Endpoint
    model: str
    num_rows: int
    num_chunks: int
    context_tokens: int
    created_at: float


class Input:
    """
    What an order reads; its store is opened once, with the first look.

    Raises:
        SettingsError: its URL is none.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._location = locate(order.input)

    def source(self, parse: LineParser = parse_line) -> Source:
        """
        Its lines.

        Raises:
            SourceError: there is no such object.
        """
        columns = Columns(max_bytes=self._order.max_line_bytes)
        return Source(self._location, columns, self._format(), parse=parse)

    def fingerprint(self) -> str:
        """
        Another one if the input is another.

        Raises:
            SourceError: there is no such object.
        """
        return self.source().fingerprint()

    def size(self) -> int:
        """In bytes, as it lies there."""
        return sum(entry.size for entry in self._location.objects())

    def _format(self) -> str:
        """As the name tells, where it tells of packing; else plain lines, whatever the name is."""
        names = {entry.name.lower().rpartition(".jsonl.")[2] for entry in self._location.objects()}
        packing = names.pop() if len(names) == 1 else ""
        return f"jsonl.{packing}" if packing in ("gz", "zst") else "jsonl"


def read_plan(store: ObjectStore) -> Plan | None:
    """
    The plan in a folder; None where there is none.

    Raises:
        OutputError: it cannot be read.
    """
    return read_plan_of(Plan, store)


def find_or_make(order: Order, source: Input, store: ObjectStore, client: BulkClient) -> Plan:
    """
    The plan of an order; reads all of the input where it is made.

    Raises:
        Rejected: nothing in the input can be served.
        BatchFileError: the input is not the one that was planned.
        SourceError, ObjectStoreError: the input cannot be read.
    """
    found = read_plan(store)
    if found is None:
        return _make(order, source, store, client)
    if found.source_fingerprint != source.fingerprint():
        raise BatchFileError(f"{order.input} has changed since it was begun: choose another output, or clear {store}")
    return found


def _make(order: Order, given: Input, store: ObjectStore, client: BulkClient) -> Plan:
    survey = Survey(order.endpoint, lambda model: _is_served(client, model))
    source = given.source(survey.parse)
    fingerprint = source.fingerprint()
    _check_size(order, given.size())
    num_rows = num_chunks = 0
    with store.open_writer(CHUNKS) as writer:
        for chunk in source.chunks(order.rows_per_chunk):
            writer.write(chunk.model_dump_json().encode() + b"\n")
            num_rows, num_chunks = chunk.first_row + chunk.num_rows, chunk.index + 1
    if order.max_lines is not None and num_rows > order.max_lines:
        message = f"the file has {num_rows:,} lines: want no more than {order.max_lines:,}"
        raise Rejected([BatchFault(code="too_many_lines", message=message)])
    if not num_rows:
        raise Rejected([BatchFault(code="empty_file", message="the file is empty: want one JSON object a line")])
    if survey.model is None or survey.endpoint is None:
        raise Rejected(survey.faults)
    plan = Plan(
        name=order.name or uuid7(),
        source_fingerprint=fingerprint,
        endpoint=survey.endpoint,
        model=survey.model,
        num_rows=num_rows,
        num_chunks=num_chunks,
        context_tokens=context_of(client, survey.model),
        created_at=time.time(),
    )
    store.put(PLAN, plan.model_dump_json(indent=1).encode() + b"\n")
    return plan


def _check_size(order: Order, size: int) -> None:
    if order.max_bytes is not None and size > order.max_bytes:
        message = f"the file has {size:,} bytes: want no more than {order.max_bytes:,}"
        raise Rejected([BatchFault(code="file_too_large", message=message)])


def _is_served(client: BulkClient, model: str) -> bool:
    try:
        client.gather(model)
    except UnknownModel:
        return False
    return True
