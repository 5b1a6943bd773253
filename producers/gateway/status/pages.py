"""Writes the page: templates that escape all they are given, written once for each look."""

from functools import cache
from hashlib import sha256
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined

import pagemill
from producers.gateway.status.board import Board, Sight
from producers.gateway.status.view import make_view

# how often a page asks again, with its script and without
POLL_MS = 3000
RELOAD_S = 5

KINDS = {
    "status.css": "text/css; charset=utf-8",
    "status.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}


class Pages:
    """The page of one gateway, and the part of it that changes."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._written: dict[str, tuple[Sight, bytes]] = {}

    async def whole(self) -> bytes:
        """The page."""
        return await self._write("page.html")

    async def parts(self) -> bytes:
        """What is in its <main>."""
        return await self._write("parts.html")

    async def _write(self, template: str) -> bytes:
        sight = await self._board.sight()
        written = self._written.get(template)
        if written is None or written[0] is not sight:
            written = sight, write(template, sight)
            self._written[template] = written
        return written[1]


def write(template: str, sight: Sight) -> bytes:
    """
    Args:
        template: "page.html" or "parts.html".
    """
    times = {"poll_ms": POLL_MS, "reload_s": RELOAD_S}
    made = _environment().get_template(template)
    text = made.render(view=make_view(sight), static=static_url, version=pagemill.__version__, **times)
    return text.encode()


def static_url(name: str) -> str:
    """Relative to the page; another one for another content, so that browsers may keep it."""
    return f"status/static/{name}?v={sha256(static(name)).hexdigest()[:12]}"


@cache
def static(name: str) -> bytes:
    """
    Raises:
        KeyError: there is no such file.
    """
    if name not in KINDS:
        raise KeyError(name)
    return files("producers.gateway.status").joinpath("static", name).read_bytes()


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("producers.gateway.status"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
