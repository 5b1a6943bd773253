"""GET /status: for operators, in a browser."""

import binascii
import contextlib
from base64 import b64decode

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from pagemill.errors import SettingsError
from producers.gateway.callers import TheGateway
from producers.gateway.state import Gateway
from producers.gateway.status.pages import KINDS, static
from producers.openai_api.errors import ApiError

router = APIRouter(include_in_schema=False)

# nothing but files of this place; no script or style inside of the page
_POLICY = "; ".join(
    (
        *("default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self'", "connect-src 'self'"),
        *("base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
    )
)
_SAFE = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_HEADERS = _SAFE | {"Cache-Control": "no-store"}
_CHALLENGE = 'Basic realm="Pagemill status", charset="UTF-8"'


@router.get("/")
async def root(request: Request) -> Response:
    """Leads browsers to the page."""
    if "text/html" not in request.headers.get("accept", ""):
        raise ApiError(404, "there is no route GET /")
    return RedirectResponse("status", 307, _HEADERS)


@router.get("/status")
async def status(request: Request, gateway: TheGateway) -> Response:
    """The page."""
    return refusal(request, gateway) or _html(await gateway.pages.whole())


@router.get("/status/parts")
async def parts(request: Request, gateway: TheGateway) -> Response:
    """What its script puts into it."""
    return refusal(request, gateway) or _html(await gateway.pages.parts())


@router.get("/status/static/{name}")
async def static_file(name: str) -> Response:
    """Style, script and icon; anybody may have them."""
    try:
        content = static(name)
    except KeyError:
        raise ApiError(404, "there is no such file") from None
    headers = _SAFE | {"Cache-Control": "public, max-age=31536000, immutable"}
    return Response(content, media_type=KINDS[name], headers=headers)


def refusal(request: Request, gateway: Gateway) -> Response | None:
    """What is answered to whoever presents no operator's key; None lets in."""
    if gateway.keys is None:
        return None
    presented = presented_key(request.headers.get("authorization", ""))
    if presented is None:
        # a browser asks its user then: no reason to count it as refused
        return _text(401, "This page needs the key of an operator: give it as the password, with any name.")
    # a file that is being written is read the next time
    with contextlib.suppress(SettingsError):
        gateway.keys.refresh()
    key = gateway.keys.find(presented)
    if key is None:
        gateway.metrics.refused.labels("wrong_key").inc()
        return _text(401, "The key is wrong.")
    if not key.operator:
        gateway.metrics.refused.labels("no_operator").inc()
        return _text(403, "This key is no operator's. `pagemill gateway keys create --name NAME --operator` makes one.")
    return None


def presented_key(authorization: str) -> str | None:
    """The key in a header: of Bearer as in the API, or the password of Basic as browsers send it."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() != "basic":
        return None
    try:
        name_and_password = b64decode(value.strip(), validate=True).decode(errors="replace")
    except (binascii.Error, ValueError):
        return None
    return name_and_password.partition(":")[2]


def _html(content: bytes) -> Response:
    return Response(content, media_type="text/html; charset=utf-8", headers=_HEADERS)


def _text(status: int, message: str) -> Response:
    challenge = {"WWW-Authenticate": _CHALLENGE} if status == 401 else {}
    return Response(message + "\n", status, _HEADERS | challenge, "text/plain; charset=utf-8")
