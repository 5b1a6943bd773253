"""A model's chat template, rendered in a sandbox with the helpers that such templates expect."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from engine.errors import ChatTemplateFailed


class ChatTemplate:
    """
    Turns messages into the text that the model was trained on; safe to share between threads.

    A template comes with the model and is not trusted: it runs in Jinja's immutable sandbox
    and sees plain JSON values alone.

    Args:
        source: The Jinja text.
        special_tokens: Name to text, such as bos_token to "<s>"; variables of the template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """
        Render a conversation, by default up to where the model's answer begins.

        Raises:
            ChatTemplateFailed: when the template has a fault or refuses the messages.
        """
        try:
            # a null means the same as a missing key, which alone all templates can take
            plain = [
                {key: value for key, value in message.items() if value is not None}
                for message in json.loads(json.dumps(list(messages)))
            ]
            return self._compiled.render(
                messages=plain,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
        # untrusted code on untrusted values: whatever comes of it is this request's failure
        except Exception as error:
            raise ChatTemplateFailed(
                f"the model's chat template does not take these messages: {error or type(error).__name__}"
            ) from error

    @cached_property
    def _compiled(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(
            raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_PublicNamespace
        )
        return environment.from_string(self.source)


class _GenerationBlock(Extension):
    """`{% generation %}` marks the answers for training; here its body is text like any other."""

    tags = {"generation"}  # noqa: RUF012, declared so by jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PublicNamespace(Namespace):
    """Jinja's namespace without names that begin with an underscore, which lead out of the sandbox."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for name in dict(*args, **kwargs):
            _check_public(name)
        super().__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: str) -> None:
    # outside the class, whose instances find template variables where methods would be
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template may not set {name!r} on a namespace")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own escapes HTML, which a model never saw
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)
