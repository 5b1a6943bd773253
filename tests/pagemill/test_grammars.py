"""Which schemas, regular expressions and choices a submit lets through."""

import random
import re
from typing import Any

import pytest

from pagemill.errors import InvalidJob
from pagemill.grammars import MAX_CHOICES, check_grammar
from pagemill.json_schemas import MAX_ONE_OF, MAX_OPTIONAL, check_json_schema, with_json_patterns
from pagemill.regexes import MAX_REGEX_BYTES, check_regex, json_pattern

INTEGER = {"type": "integer"}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"type": "array", "items": schema}
    return schema


GOOD_SCHEMAS: list[dict[str, Any]] = [
    {},
    {"type": "object"},
    {"title": "t", "description": "d", "default": 3, "$schema": "s", "$id": "http://a/b", "x-own": 1, **INTEGER},
    {"type": ["string", "null"], "maxLength": 5},
    {"type": "string", "pattern": "^[a-z]+$"},
    {"type": "string", "format": "date"},
    {"type": "integer", "minimum": 3, "exclusiveMaximum": 5.0},
    {"type": "integer", "multipleOf": 5},
    {"type": "number", "minimum": 0.5, "maximum": 0.5},
    {"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 2},
    {"type": "array", "prefixItems": [INTEGER, {}], "items": False, "minItems": 2},
    {"properties": {"a": INTEGER, "b": True}, "required": ["a"], "additionalProperties": {"type": "string"}},
    {"enum": ["a", 1, None]},
    {"type": "string", "enum": ["a"]},
    {"type": "number", "const": 1},
    {"anyOf": [INTEGER, {"type": "null"}], "default": None, "title": "An optional"},
    {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": INTEGER}},
    {"$ref": "#/definitions/a", "definitions": {"a": {"$ref": "#/definitions/b"}, "b": INTEGER}},
    {"type": "object", "properties": {"child": {"$ref": "#"}}},
    {"oneOf": [INTEGER, {"type": "string"}, {"type": ["null", "boolean"]}]},
    {"oneOf": [{"const": "a"}, {"enum": ["b", "c"]}]},
    {
        "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        "discriminator": {"propertyName": "kind"},
        "$defs": {
            kind: {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]}
            for kind in ("cat", "dog")
        },
    },
    nested(64),
]


@pytest.mark.parametrize("schema", GOOD_SCHEMAS, ids=[str(schema)[:40] for schema in GOOD_SCHEMAS])
def test_schemas_that_can_be_followed_pass(schema: dict[str, Any]) -> None:
    """
    As pydantic and people write them.
    """
    check_json_schema(schema)


BAD_SCHEMAS: list[tuple[dict[str, Any], str]] = [
    ({"type": "foo"}, "at #: want type"),
    ({"type": []}, "at #: want type"),
    ({"minimum": 3}, "at #: want type"),
    ({"not": INTEGER}, "at #: not is not supported"),
    ({"type": "string", "minimum": 3}, "minimum is not supported for type string"),
    ({"type": "string", "nullable": True}, "nullable is not supported"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems is not supported"),
    ({"type": "array", "contains": {}}, "contains is not supported"),
    ({"type": "array", "items": [INTEGER]}, "at #/items: want an object"),
    ({"type": "array", "minItems": 1}, "without items"),
    ({"type": "array", "items": {}, "minItems": -1}, "want minItems from 0"),
    ({"type": "array", "items": {}, "minItems": 3, "maxItems": 2}, "minItems is 3 and maxItems 2"),
    ({"type": "array", "prefixItems": [{}, {}], "maxItems": 1}, "maxItems is 1"),
    ({"type": "array", "prefixItems": [{}], "items": False, "minItems": 2}, "minItems is 2"),
    ({"type": "array", "prefixItems": []}, "not empty"),
    ({"type": "object", "patternProperties": {}}, "patternProperties is not supported"),
    ({"type": "object", "minProperties": 1}, "minProperties is not supported"),
    ({"type": "object", "required": ["a"]}, "required names a"),
    ({"type": "object", "properties": {"a": False}}, "at #/properties/a: want an object or true"),
    ({"type": "object", "properties": []}, "at #/properties: want an object"),
    ({"if": {}, "then": {}}, "at #: if, then is not supported"),
    ({"enum": []}, "not empty"),
    ({"type": "string", "enum": ["a", 1]}, "enum has 1, which is not of its type"),
    ({"type": "integer", "const": 1.5}, "const has 1.5"),
    ({"type": "integer", "minimum": 1.5}, "whole number"),
    ({"type": "integer", "minimum": 2**63}, "whole number of 64 bits"),
    ({"type": "integer", "minimum": -(10**400)}, "a number of 401 digits"),
    ({"oneOf": [{"const": 10**400}, {"type": "string"}]}, "a number of 401 digits"),
    ({"type": "number", "minimum": True}, "want minimum as a number"),
    ({"type": "number", "minimum": 2, "maximum": 1}, "no number lies in the range"),
    ({"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2}, "no number lies in the range"),
    ({"type": "number", "multipleOf": 0.1}, "multipleOf"),
    ({"type": "integer", "multipleOf": 5000}, "multipleOf"),
    ({"type": "integer", "multipleOf": 5, "minimum": 1}, "beside a range"),
    ({"type": "string", "pattern": "(?=a)"}, "at #: pattern: regex, position 0: look-around"),
    ({"type": "string", "pattern": "a", "maxLength": 3}, "not supported together"),
    ({"type": "string", "pattern": 3}, "want pattern as a string"),
    ({"$ref": "http://example.com/a.json"}, "want a schema of this document"),
    ({"$ref": "#/$defs/a"}, "want a schema of this document"),
    ({"$ref": "#/$defs/a%20b", "$defs": {"a b": {}}}, "plain path"),
    ({"$ref": "#/x-own/a", "x-own": {"a": {}}}, "want a schema of this document"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "leads back"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {}}, "type": "string"}, "type beside"),
    ({"$dynamicRef": "#a"}, "dynamicRef is not supported"),
    ({"anyOf": []}, "not empty"),
    ({"anyOf": [INTEGER], "type": "integer"}, "type beside anyOf"),
    ({"allOf": [INTEGER, {"minimum": 3, "type": "integer"}]}, "merge them"),
    ({"oneOf": [INTEGER, {"type": "number"}]}, "use anyOf"),
    ({"oneOf": [{"properties": {}}, {"type": "string"}]}, "use anyOf"),
    ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "use anyOf"),
    ({"oneOf": [True, INTEGER]}, "use anyOf"),
    (nested(65), "nested 65 deep"),
    ({"enum": ["x" * 70_000]}, "want no more than 65,536"),
    ({"const": float("nan")}, "no JSON"),
    ({"const": {1, 2}}, "no JSON"),
]


@pytest.mark.parametrize(("schema", "words"), BAD_SCHEMAS, ids=[str(schema)[:40] for schema, _ in BAD_SCHEMAS])
def test_a_schema_that_would_not_be_enforced_is_refused(schema: dict[str, Any], words: str) -> None:
    """
    With the place and what to do: an answer that looks right and is not would be worse.
    """
    with pytest.raises(InvalidJob, match=words) as caught:
        check_grammar(schema, None, None)

    assert "invalid_grammar" == caught.value.code


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "abc|d(e|f)*g+h?",
        "(?:a|b){2}c{3,}d{0,4}?",
        r"^\d+\.\d{2}$",
        r"[a-z\d_-]+[^\]\n]",
        r"\x41\u00e9\t\\\/\-\$",
        r"[\x20-\x7e]{3}",
        "é+東京",
        "a*?b??c+?",
        "a|",
        "}]",
        "[-a][a-]",
        "[[]",
        "(" * 64 + "a" + ")" * 64,
    ],
)
def test_regular_expressions_that_can_be_followed_pass(pattern: str) -> None:
    """
    The regular part of ECMAScript's dialect.
    """
    check_regex(pattern)


BAD_PATTERNS = {
    "(?=a)b": "position 0: look-around",
    "(?<!a)b": "look-around",
    "(?<n>a)": "named groups",
    "(?P<n>a)": "named groups",
    "(?i)a": "flags",
    r"(a)\1": "position 3: backreferences",
    r"\bfoo": "word boundaries",
    r"\p{L}": "Unicode classes",
    r"\Aa": r"\\A is not supported",
    "a^b": "inside the pattern",
    "a$b": "inside the pattern",
    "a{2,1}": "smaller one first",
    "a{,3}": "want {n}",
    "a{x}": "want {n}",
    "a{3": "want {n}",
    "a{99999}": "up to 10,000",
    "{": "nothing to repeat",
    "*a": "nothing to repeat",
    "a**": "nothing to repeat",
    "a++": "nothing to repeat",
    "^*": "nothing to repeat",
    "(*a)": "nothing to repeat",
    "(a": "not closed",
    "a)": "not opened",
    "[a": "not closed",
    "[]": "empty class",
    "[^]": "empty class",
    "[z-a]": "before its start",
    r"[a-\d]": "no character",
    "[[:alpha:]]": "POSIX",
    "a\\": "not finished",
    r"\x4": "want .xHH",
    r"\u12g4": "want .xHH",
    r"\ud800": "surrogate",
    "a\0b": "NUL",
    "\ud800": "surrogates",
    "(" * 65 + ")" * 65: "64 deep",
    "a" * (MAX_REGEX_BYTES + 1): "want no more than 16,384",
}


@pytest.mark.parametrize(("pattern", "words"), BAD_PATTERNS.items(), ids=[text[:12] for text in BAD_PATTERNS])
def test_a_regular_expression_that_would_mean_something_else_is_refused(pattern: str, words: str) -> None:
    """
    With the position of the fault.
    """
    with pytest.raises(InvalidJob, match=words) as caught:
        check_grammar(None, pattern, None)

    assert "invalid_grammar" == caught.value.code


@pytest.mark.parametrize(
    ("pattern", "inside"),
    [
        ("^(ab|c)*?$", "(?:[a][b]|[c])*"),
        ("a??b?c{0,2}?", "[a]?[b]?[c]{0,2}"),
        ('["x]', "[x]"),
        (r"[!\\A]{2}", r"[\u0021A]{2}"),
        (".", r"[\u0020-\u0021\u0023-\u005b\u005d-\u2027\u202a-\ud7ff\ue000-" + "\U0010ffff]"),
        (r"[^\x20-\x7e]", r"[\u007f-\ud7ff\ue000-" + "\U0010ffff]"),
    ],
)
def test_a_pattern_inside_json_matches_nothing_that_is_escaped(pattern: str, inside: str) -> None:
    """
    Each place becomes a class without quotes, backslashes, control characters and surrogates.
    """
    assert inside + "[é]{0}" == json_pattern(pattern)


@pytest.mark.parametrize("seed", range(200))
def test_a_class_inside_json_keeps_its_other_characters(seed: int) -> None:
    """
    Whatever runs it has, also such as lie in each other, and whether it is negated.
    """
    draw = random.Random(seed)
    starts = [draw.randrange(0x21, 0x7E) for _ in range(draw.randrange(1, 8))]
    runs = [(start, min(0x7E, start + draw.randrange(12))) for start in starts]
    members = "".join(f"\\x{low:02x}-\\x{high:02x}" for low, high in runs)
    pattern = f"[{draw.choice(['', '^'])}{members}]"
    chars = [chr(code) for code in range(0x20, 0x100) if chr(code) not in '"\\']
    expected = [char for char in chars if re.fullmatch(pattern, char)]
    if not expected:
        return

    inside = json_pattern(pattern)

    assert expected == [char for char in map(chr, range(0x100)) if re.fullmatch(inside, char)]


def test_a_class_of_thousands_of_runs_is_one_pass() -> None:
    """
    Each run was once compared with each other: a minute of a gateway's event loop for one request.
    """
    chars = "".join(chr(0x4E00 + 2 * index) for index in range(5000))
    between = "".join(chr(0x4E01 + 2 * index) for index in range(4999))

    assert between in json_pattern(f"[^{chars}]")
    # it ends where it is too long, not where the last class has been written
    with pytest.raises(ValueError, match="more than 65,536"):
        json_pattern(r"\S" * 8000)


def test_properties_that_may_be_left_out_are_bounded() -> None:
    """
    They are what a grammar takes long to compile for; required ones are not.
    """
    properties = {f"p{index}": {} for index in range(MAX_OPTIONAL + 100)}
    check_json_schema({"properties": properties, "required": [f"p{index}" for index in range(100)]})
    with pytest.raises(ValueError, match="want up to 512"):
        check_json_schema({"properties": properties, "required": ["p0"]})


def test_a_one_of_is_compared_with_itself_within_bounds() -> None:
    """
    By pairs; more than 128 are refused before the first.
    """
    check_json_schema({"oneOf": [{"const": index} for index in range(MAX_ONE_OF)]})
    with pytest.raises(ValueError, match="want up to 128, or enum"):
        check_json_schema({"oneOf": [{"const": index} for index in range(MAX_ONE_OF + 1)]})


@pytest.mark.parametrize("pattern", ['a"', r"\\", r"\n", '["\\\\]', r"\x01"])
def test_a_pattern_that_asks_for_what_is_escaped_is_refused(pattern: str) -> None:
    """
    As a regex of its own it is fine.
    """
    check_regex(pattern)
    with pytest.raises(InvalidJob, match="quotes, backslashes and control characters"):
        check_grammar({"type": "string", "pattern": pattern}, None, None)


def test_patterns_are_changed_where_they_are_patterns() -> None:
    """
    And not where they are names or values.
    """
    schema = {
        "properties": {"pattern": {"type": "string", "pattern": "x"}, "a": {"enum": [{"pattern": "x"}]}},
        "$defs": {"b": {"anyOf": [{"type": "string", "pattern": "x"}, {"type": "array", "items": True}]}},
    }

    changed = with_json_patterns(schema)

    assert str(schema).replace("'type': 'string', 'pattern': 'x'", "'type': 'string', 'pattern': '[x][é]{0}'") == str(
        changed
    )


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ((), "0 texts"),
        (tuple(map(str, range(MAX_CHOICES + 1))), "1,025 texts"),
        (("a", ""), "not empty"),
        (("a\0",), "NUL"),
        (("\ud800",), "surrogates"),
        (("x" * 70_000,), "70,000 bytes"),
    ],
)
def test_choices_are_texts_and_bounded(choice: tuple[str, ...], words: str) -> None:
    """
    One at least, and not a book.
    """
    with pytest.raises(InvalidJob, match=words):
        check_grammar(None, None, choice)

    check_grammar(None, None, ("yes", "no", 'it "depends"\n'))
