"""Who calls, and what may be read of a request before anything is done for it."""

import contextlib
from typing import Annotated

from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.requests import ClientDisconnect

from pagemill.errors import SettingsError
from producers.gateway.api_keys import ANYBODY, ApiKey
from producers.gateway.state import Gateway
from producers.openai_api.errors import ApiError

_bearer = HTTPBearer(auto_error=False, description="An API key.")


class ClientGone(Exception):
    """Raised when nobody waits for a response any more."""


async def gateway_of(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


async def caller_of(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)]
) -> ApiKey:
    """
    The key that a request presents.

    Raises:
        ApiError: 401, there is none, or nobody knows it.
    """
    gateway = await gateway_of(request)
    if gateway.keys is None:
        return ANYBODY
    if credentials is None:
        gateway.metrics.refused.labels("no_key").inc()
        raise ApiError(401, "there is no API key: send it as `Authorization: Bearer KEY`", code="missing_api_key")
    # a file that is being written is read the next time
    with contextlib.suppress(SettingsError):
        gateway.keys.refresh()
    key = gateway.keys.find(credentials.credentials)
    if key is None:
        gateway.metrics.refused.labels("wrong_key").inc()
        raise ApiError(401, "the API key is wrong", code="invalid_api_key")
    return key


Caller = Annotated[ApiKey, Depends(caller_of)]
TheGateway = Annotated[Gateway, Depends(gateway_of)]


async def read_body(request: Request, limit: int) -> bytes:
    """
    A request's body; never more than the limit is in memory.

    Raises:
        ApiError: 413, it is larger.
        ClientGone: it was cut off.
    """
    told = request.headers.get("content-length", "")
    if told.isascii() and told.isdigit() and int(told) > 2 * limit:
        raise too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size <= limit:
                parts.append(part)
            else:
                # a client that is not much over it is heard out: it then reads the answer, and not a broken pipe
                parts.clear()
            if size > 2 * limit:
                break
    except ClientDisconnect:
        raise ClientGone from None
    if size > limit:
        raise too_large(limit)
    return b"".join(parts)


def too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request is larger than {limit:,} bytes", code="request_too_large")
