"""Grammars for models without text: a vocabulary of pieces that spell JSON, and grammars that it can follow."""

import json
import re
import string

import jsonschema

from engine.grammar import Grammar
from engine.grammar_compiler import GrammarCompiler
from tests.support.tiny_models import VOCAB

EOS = 3
# first some that mean much, then every printable character, then pairs of letters
_PIECES = ['{"', '": ', '", "', '"}', "}}", ", ", "null", "true", "false", "10", " ", "\n", "ab", "ba"]
_PIECES += list(map(chr, range(0x21, 0x7F)))
_PIECES += [one + other for one in "abcde" for other in string.ascii_lowercase]

SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "name": {"type": "string", "maxLength": 6},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["id", "name"],
    "additionalProperties": False,
}

JSON = Grammar("json_schema", json.dumps(SCHEMA))
DIGITS = Grammar("regex", r"\d{3}-[a-e]{2,6}")
# may end after every token
LETTERS = Grammar("regex", "[a-e]+")
CHOICE = Grammar("choice", json.dumps(["abba", "abab", "cab", "10"]))
GRAMMARS = (JSON, DIGITS, LETTERS, CHOICE)


def pieces() -> list[bytes]:
    """The bytes of each token of the tiny models; none for the first four, of which one is EOS."""
    found = [b""] * 4 + [piece.encode() for piece in _PIECES]
    return (found + [b""] * VOCAB)[:VOCAB]


def compiler() -> GrammarCompiler:
    """A compiler for that vocabulary."""
    return GrammarCompiler(pieces, {EOS})


def spell(token_ids: tuple[int, ...]) -> str:
    """The text of such tokens."""
    vocabulary = pieces()
    return b"".join(vocabulary[token] for token in token_ids).decode()


def follows(grammar: Grammar, text: str) -> bool:
    """Whether a text is one of the grammar's, by others than the library that the engine has."""
    if grammar.kind == "choice":
        return text in json.loads(grammar.text)
    if grammar.kind == "regex":
        return re.fullmatch(grammar.text, text) is not None
    jsonschema.Draft202012Validator(json.loads(grammar.text)).validate(json.loads(text))
    return True
