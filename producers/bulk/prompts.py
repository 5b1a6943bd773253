"""
Prompts from Jinja templates: those that come with Pagemill, and files of the user's own.

A template has a block `user`, and may have a block `system`; one without blocks is all user. It
sees `text`, `custom_id`, `fields` (the other columns), what `params` give, and of a document in parts
`level` ("whole", "map" or "reduce"), `part` and `parts`. It runs in Jinja's sandbox, and a name that
nothing gives is an error of that row.
"""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pagemill.schema import Message
from producers.bulk.errors import SpecError
from producers.bulk.rows import Document
from producers.extras import how_to_get

if TYPE_CHECKING:
    from jinja2 import Template

FOLDER = Path(__file__).with_name("templates")
BUILT_IN = ("summarise", "classify", "extract", "translate")

# what a built-in template cannot do without
NEEDS = {"classify": "labels", "extract": "schema", "translate": "language"}

# names that a document or its place gives
_OURS = frozenset({"text", "custom_id", "fields", "level", "part", "parts"})


class TemplateFailed(Exception):
    """Raised when a template cannot be rendered for a document."""


class Place(NamedTuple):
    """Which part of a document is asked about; parts count from 1."""

    level: str = "whole"
    part: int = 1
    parts: int = 1


def read_template(template: str) -> str:
    """
    The source of a built-in template, or of a file.

    Raises:
        SpecError: there is no such file.
    """
    path = FOLDER / f"{template}.j2" if template in BUILT_IN else Path(template)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        names = ", ".join(BUILT_IN)
        raise SpecError(f"there is no template {template!r} ({error}): give one of {names}, or a file") from None


class Prompter:
    """
    Makes the messages for documents.

    Raises:
        SpecError: the source is no template, or what it needs is not in `params`.
    """

    def __init__(self, name: str, source: str, params: Mapping[str, Any]) -> None:
        self._source, self._params = source, dict(params)
        taken = sorted(_OURS & self._params.keys())
        if taken:
            raise SpecError(f"params has {taken[0]!r}, which each document gives: choose another name")
        needed = NEEDS.get(name)
        if needed is not None and not self._params.get(needed):
            raise SpecError(f"the template {name} needs params.{needed}")
        if needed == "labels" and not isinstance(self._params[needed], list | tuple):
            raise SpecError(f'params.labels is {self._params[needed]!r}: want a list, as ["good", "bad"]')
        # a fault of the source shows before any document is read
        self._template  # noqa: B018

    @cached_property
    def _template(self) -> "Template":
        try:
            from jinja2 import StrictUndefined, TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise SpecError(how_to_get("jinja2", "bulk")) from None
        try:
            return ImmutableSandboxedEnvironment(undefined=StrictUndefined).from_string(self._source)
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            raise SpecError(f"the template cannot be read{f' at line {line}' if line else ''}: {error}") from None

    def messages(self, document: Document, text: str, place: Place = Place()) -> tuple[Message, ...]:  # noqa: B008
        """
        The chat for a text of this document: the system's part, where the template has one, and the user's.

        Raises:
            TemplateFailed: the template uses what is not there, or fails otherwise.
        """
        values = {
            **self._params,
            "text": text,
            "custom_id": document.custom_id,
            "fields": document.fields,
            **place._asdict(),
        }
        system, user = self._render(values)
        if not user:
            raise TemplateFailed("the template gave nothing for the user's part")
        spoken = (Message(role="user", content=user),)
        return (Message(role="system", content=system), *spoken) if system else spoken

    def _render(self, values: dict[str, Any]) -> tuple[str, str]:
        """What stands for the system, and for the user."""
        template = self._template
        try:
            if not template.blocks:
                return "", template.render(values).strip()
            context = template.new_context(values)
            blocks = (template.blocks.get(name) for name in ("system", "user"))
            system, user = ("".join(block(context)).strip() if block else "" for block in blocks)
        # a template is a program: whatever it raises is a fault of this row
        except Exception as error:
            raise TemplateFailed(f"the template failed: {type(error).__name__}: {error}") from None
        return system, user
