"""/v1/batches: files of requests, answered in the bulk lane."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from producers.batch_file.service import BatchRunner
from producers.gateway.callers import Caller, TheGateway, read_body
from producers.gateway.schemas import body_of
from producers.gateway.state import Gateway
from producers.openai_api.batch_lines import Endpoint
from producers.openai_api.errors import ApiError
from producers.openai_api.fields import Taken
from producers.openai_api.requests import parse, read_json

router = APIRouter()


class BatchCreate(Taken):
    """The body of /v1/batches."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: Any = None


@router.post("/v1/batches", openapi_extra=body_of(BatchCreate))
async def create(request: Request, gateway: TheGateway, key: Caller) -> dict[str, Any]:
    """Have the requests of a file answered within a day."""
    batches = batches_of(gateway)
    wanted = parse(BatchCreate, read_json(await read_body(request, gateway.settings.max_body_bytes)))
    made = await asyncio.to_thread(
        batches.create,
        key.tenant,
        input_file_id=wanted.input_file_id,
        endpoint=wanted.endpoint,
        completion_window=wanted.completion_window,
        metadata=wanted.metadata or None,
    )
    return made.model_dump()


@router.get("/v1/batches")
async def list_batches(
    gateway: TheGateway, key: Caller, after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> dict[str, Any]:
    """The caller's batches, a page at a time, the newest first."""
    page = await asyncio.to_thread(batches_of(gateway).list, key.tenant, after=after, limit=limit)
    return page.model_dump()


@router.get("/v1/batches/{name}")
async def batch(name: str, gateway: TheGateway, key: Caller) -> dict[str, Any]:
    """How far a batch is."""
    found = await asyncio.to_thread(batches_of(gateway).get, key.tenant, name)
    return found.model_dump()


@router.post("/v1/batches/{name}/cancel")
async def cancel(name: str, gateway: TheGateway, key: Caller) -> dict[str, Any]:
    """End a batch: what is answered by then is in its output file."""
    ending = await asyncio.to_thread(batches_of(gateway).cancel, key.tenant, name)
    return ending.model_dump()


def batches_of(gateway: Gateway) -> BatchRunner:
    """
    Raises:
        ApiError: 501, there is no store for them.
    """
    if gateway.batches is None:
        message = "this gateway keeps no batches: it was started without an object store"
        raise ApiError(501, message, code="no_object_store")
    return gateway.batches
