"""/v1/files: kept in the object store, streamed in and out in bounded memory."""

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from pagemill.errors import ObjectStoreError
from pagemill.ids import uuid7
from pagemill.object_store import ObjectStore
from producers.gateway.callers import Caller, ClientGone, TheGateway, too_large
from producers.gateway.file_objects import PIECE_BYTES, file_body, object_name
from producers.gateway.state import Gateway
from producers.openai_api.errors import ApiError, bad_request, of_pagemill

PURPOSES = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")

_NAME = re.compile(r"[A-Za-z0-9-]{1,64}")

_UPLOAD = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": list(PURPOSES)},
                    },
                }
            }
        },
    }
}

router = APIRouter()


@router.post("/v1/files", openapi_extra=_UPLOAD)
async def upload(request: Request, gateway: TheGateway, key: Caller) -> dict[str, Any]:
    """Keep a file."""
    store = store_of(gateway)
    file, purpose = await _parse(request, gateway.settings.max_file_bytes)
    try:
        name = f"file-{uuid7()}"
        size = await asyncio.to_thread(_store, store, object_name(key.tenant, name), file)
        body = file_body(name, size, file.filename or "file", purpose, gateway.settings.file_ttl_s)
        await asyncio.to_thread(gateway.records.add, "file", key.tenant, body)
    except ObjectStoreError as error:
        raise of_pagemill(error) from None
    finally:
        await file.close()
    return body


@router.get("/v1/files")
async def list_files(
    gateway: TheGateway,
    key: Caller,
    purpose: str | None = None,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, Any]:
    """The caller's files, a page at a time."""
    newest = order == "desc"
    found, more = await asyncio.to_thread(
        gateway.records.page, "file", key.tenant, after=after, limit=limit, newest_first=newest
    )
    return listing([one for one in found if purpose in (None, one["purpose"])], more)


@router.get("/v1/files/{name}")
async def file(name: str, gateway: TheGateway, key: Caller) -> dict[str, Any]:
    """One of them."""
    return await known_file(gateway, key.tenant, name)


@router.delete("/v1/files/{name}")
async def delete(name: str, gateway: TheGateway, key: Caller) -> dict[str, Any]:
    """Forget a file."""
    store = store_of(gateway)
    await known_file(gateway, key.tenant, name)
    try:
        # before its record, so that a call that fails can be repeated
        await asyncio.to_thread(store.delete, store.url(object_name(key.tenant, name)))
    except ObjectStoreError as error:
        raise of_pagemill(error) from None
    await asyncio.to_thread(gateway.records.remove, "file", key.tenant, name)
    return {"id": name, "object": "file", "deleted": True}


@router.get("/v1/files/{name}/content")
async def content(name: str, gateway: TheGateway, key: Caller) -> StreamingResponse:
    """What is in it."""
    store = store_of(gateway)
    body = await known_file(gateway, key.tenant, name)
    url = store.url(object_name(key.tenant, name))
    try:
        first = await asyncio.to_thread(store.get_range, url, 0, PIECE_BYTES)
    except ObjectStoreError as error:
        raise of_pagemill(error) from None

    async def pieces() -> AsyncIterator[bytes]:
        piece, start = first, 0
        while piece:
            yield piece
            start += len(piece)
            piece = await asyncio.to_thread(store.get_range, url, start, PIECE_BYTES) if start < body["bytes"] else b""

    headers = {"content-length": str(body["bytes"])}
    return StreamingResponse(pieces(), media_type="application/octet-stream", headers=headers)


def store_of(gateway: Gateway) -> ObjectStore:
    """
    Raises:
        ApiError: 501, there is none.
    """
    if gateway.store is None:
        message = "this gateway keeps no files: it was started without an object store"
        raise ApiError(501, message, code="no_object_store")
    return gateway.store


async def known_file(gateway: Gateway, tenant: str, name: str) -> dict[str, Any]:
    """
    Raises:
        ApiError: 404, the caller has no such file.
    """
    found = None
    if _NAME.fullmatch(name):
        found = await asyncio.to_thread(gateway.records.get, "file", tenant, name)
    if found is None:
        raise ApiError(404, f"there is no file {name[:100]!r}", param="id", code="not_found")
    return found


def listing(data: list[dict[str, Any]], more: bool) -> dict[str, Any]:
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, **ends, "has_more": more}


async def _parse(request: Request, limit: int) -> tuple[UploadFile, str]:
    """The file, spooled to the disk where it is large, and its purpose."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise bad_request("want multipart/form-data with file and purpose", code="invalid_value")
    try:
        form = await MultiPartParser(request.headers, _limited(request, limit), max_files=1, max_fields=16).parse()
    except MultiPartException as error:
        raise bad_request(f"the form cannot be read: {error.message}", code="invalid_value") from None
    except (KeyError, ValueError) as error:
        raise bad_request(f"the form cannot be read: {error}", code="invalid_value") from None
    except ClientDisconnect:
        raise ClientGone from None
    file, purpose = form.get("file"), form.get("purpose")
    if not isinstance(file, UploadFile):
        await form.close()
        raise bad_request("file: want a file", "file", "invalid_value")
    if (file.size or 0) > limit:
        await form.close()
        raise too_large(limit)
    if purpose not in PURPOSES:
        await form.close()
        raise bad_request(f"purpose: want one of {', '.join(PURPOSES)}", "purpose", "invalid_value")
    return file, str(purpose)


async def _limited(request: Request, limit: int) -> AsyncGenerator[bytes, None]:
    # what is around the file in the form is small
    limit += 65536
    size = 0
    async for piece in request.stream():
        size += len(piece)
        # as in `read_body`, a client that is not much over it is heard out
        if size > 2 * limit:
            break
        if size <= limit:
            yield piece
    if size > limit:
        raise too_large(limit)


def _store(store: ObjectStore, name: str, file: UploadFile) -> int:
    size = 0
    with store.open_writer(name) as writer:
        while piece := file.file.read(PIECE_BYTES):
            size += writer.write(piece)
    return size
