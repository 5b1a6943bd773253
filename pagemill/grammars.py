"""What an answer can be bound to: a JSON schema, a regular expression, or one of some texts."""

from typing import Any

from pagemill.errors import InvalidJob
from pagemill.json_schemas import check_json_schema
from pagemill.regexes import check_regex

MAX_CHOICES = 1024
MAX_CHOICE_BYTES = 64 * 1024


def check_grammar(json_schema: dict[str, Any] | None, regex: str | None, choice: tuple[str, ...] | None) -> None:
    """
    Refuse what no worker can follow, so that it never waits in a queue.

    Raises:
        InvalidJob: invalid_grammar.
    """
    try:
        if json_schema is not None:
            check_json_schema(json_schema)
        if regex is not None:
            check_regex(regex)
        if choice is not None:
            check_choice(choice)
    except ValueError as error:
        raise InvalidJob("invalid_grammar", f"options.{error}") from None


def check_choice(choice: tuple[str, ...]) -> None:
    """
    Raises:
        ValueError: there are none or too many, or one of them is no text.
    """
    if not 1 <= len(choice) <= MAX_CHOICES:
        raise ValueError(f"choice has {len(choice):,} texts: want 1 to {MAX_CHOICES:,}")
    num_bytes = sum(len(text.encode(errors="replace")) for text in choice)
    if num_bytes > MAX_CHOICE_BYTES:
        raise ValueError(f"choice has {num_bytes:,} bytes: want no more than {MAX_CHOICE_BYTES:,}")
    for text in choice:
        if not text or "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
            raise ValueError("choice: want texts that are not empty, without NUL and lone surrogates")
