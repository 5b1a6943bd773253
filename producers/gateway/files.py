"""/v1/files: kept in the object store, streamed in and out in bounded memory."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from producers.batch_file.files import PIECE_BYTES, PURPOSES
from producers.batch_file.service import FileKeeper
from producers.gateway.callers import Caller, ClientGone, TheGateway, too_large
from producers.gateway.state import Gateway
from producers.openai_api.errors import ApiError, bad_request

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
    files = files_of(gateway)
    file, purpose = await _parse(request, gateway.settings.max_file_bytes)
    try:
        made = await asyncio.to_thread(
            files.create,
            key.tenant,
            filename=file.filename or "file",
            purpose=purpose,
            data=iter(lambda: file.file.read(PIECE_BYTES), b""),
        )
    finally:
        await file.close()
    return made.model_dump()


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
    page = await asyncio.to_thread(
        files_of(gateway).list, key.tenant, purpose=purpose, after=after, limit=limit, newest_first=order == "desc"
    )
    return page.model_dump()


@router.get("/v1/files/{name}")
async def file(name: str, gateway: TheGateway, key: Caller) -> dict[str, Any]:
    """One of them."""
    found = await asyncio.to_thread(files_of(gateway).get, key.tenant, name)
    return found.model_dump()


@router.delete("/v1/files/{name}")
async def delete(name: str, gateway: TheGateway, key: Caller) -> dict[str, Any]:
    """Forget a file."""
    await asyncio.to_thread(files_of(gateway).delete, key.tenant, name)
    return {"id": name, "object": "file", "deleted": True}


@router.get("/v1/files/{name}/content")
async def content(name: str, gateway: TheGateway, key: Caller) -> StreamingResponse:
    """What is in it."""
    files = files_of(gateway)
    found = await asyncio.to_thread(files.get, key.tenant, name)
    pieces = await asyncio.to_thread(files.read, key.tenant, name)
    headers = {"content-length": str(found.bytes)}
    return StreamingResponse(pieces, media_type="application/octet-stream", headers=headers)


def files_of(gateway: Gateway) -> FileKeeper:
    """
    Raises:
        ApiError: 501, there is no store for them.
    """
    if gateway.files is None:
        message = "this gateway keeps no files: it was started without an object store"
        raise ApiError(501, message, code="no_object_store")
    return gateway.files


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
