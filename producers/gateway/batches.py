"""/v1/batches: files of requests, answered in the bulk lane."""

import asyncio
import re
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import Field

from pagemill.ids import uuid7
from pagemill.schema import Metadata
from producers.gateway.batch_run import ENDED
from producers.gateway.callers import Caller, TheGateway, read_body
from producers.gateway.files import known_file, listing, store_of
from producers.gateway.schemas import body_of
from producers.gateway.state import Gateway
from producers.openai_api.batch_lines import Endpoint
from producers.openai_api.errors import ApiError, bad_request
from producers.openai_api.fields import Taken, unless_null
from producers.openai_api.requests import parse, read_json

WINDOW_S = 86400

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

router = APIRouter()


class BatchCreate(Taken):
    """The body of /v1/batches."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Annotated[Metadata, unless_null({})] = Field(default_factory=dict)
    output_expires_after: Any = None


@router.post("/v1/batches", openapi_extra=body_of(BatchCreate))
async def create(request: Request, gateway: TheGateway, key: Caller) -> dict[str, Any]:
    """Have the requests of a file answered within a day."""
    store_of(gateway)
    wanted = parse(BatchCreate, read_json(await read_body(request, gateway.settings.max_body_bytes)))
    file = await known_file(gateway, key.tenant, wanted.input_file_id)
    if file["purpose"] != "batch":
        raise bad_request(f"the file's purpose is {file['purpose']}: want batch", "input_file_id", "invalid_value")
    body = batch_body(wanted)
    await asyncio.to_thread(gateway.records.add, "batch", key.tenant, body)
    gateway.batches.poke()
    return body


@router.get("/v1/batches")
async def list_batches(
    gateway: TheGateway, key: Caller, after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> dict[str, Any]:
    """The caller's batches, a page at a time, the newest first."""
    found, more = await asyncio.to_thread(gateway.records.page, "batch", key.tenant, after=after, limit=limit)
    return listing(found, more)


@router.get("/v1/batches/{name}")
async def batch(name: str, gateway: TheGateway, key: Caller) -> dict[str, Any]:
    """How far a batch is."""
    return await _known(gateway, key.tenant, name)


@router.post("/v1/batches/{name}/cancel")
async def cancel(name: str, gateway: TheGateway, key: Caller) -> dict[str, Any]:
    """End a batch: what is answered by then is in its output file."""
    body = await _known(gateway, key.tenant, name)
    if body["status"] in ENDED:
        raise ApiError(409, f"the batch has ended: it is {body['status']}", code="batch_ended")
    await asyncio.to_thread(gateway.records.flag, "batch", key.tenant, name, "cancel")
    # whoever runs it looks at the flag, and writes the rest
    return body | {"status": "cancelling", "cancelling_at": body["cancelling_at"] or int(time.time())}


async def _known(gateway: Gateway, tenant: str, name: str) -> dict[str, Any]:
    found = None
    if _NAME.fullmatch(name):
        found = await asyncio.to_thread(gateway.records.get, "batch", tenant, name)
    if found is None:
        raise ApiError(404, f"there is no batch {name[:100]!r}", param="id", code="not_found")
    return found


def batch_body(wanted: BatchCreate) -> dict[str, Any]:
    """OpenAI's object of a new batch."""
    now = int(time.time())
    marks = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    return {
        "id": f"batch_{uuid7()}",
        "object": "batch",
        "endpoint": wanted.endpoint,
        "input_file_id": wanted.input_file_id,
        "completion_window": wanted.completion_window,
        "status": "validating",
        "errors": None,
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "expires_at": now + WINDOW_S,
        **{f"{mark}_at": None for mark in marks},
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": wanted.metadata or None,
    }
