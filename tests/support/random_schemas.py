"""Random JSON schemas and regular expressions of all that a submit lets through, and schemas that it does not."""

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

PATTERNS = (
    "^[a-z]{2,5}$",
    r"^\d{3}-\d{4}$",
    "^(a|b)+c?$",
    "^.{1,4}$",
    "^[^x]{2}$",
    # of \s the dialects differ: ECMAScript's has U+FEFF
    r"^\w+ \w+$",
    r"a\.b",
    r"^[\x20-\x7e]{3}$",
    r"^\$\d+\.\d{2}$",
)
FORMATS = ("date", "time", "date-time", "email", "uuid", "ipv4", "ipv6", "uri", "hostname", "duration", "nonsense")
NAMES = ("a", "b", "c d", 'é"q', "e\\f", "x/y")
VALUES = ("a", "bc", 1, 2.5, None, True, {"x": [1, "é"]}, [1], 'q"\\\n')
TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")


def random_schema(rng: random.Random, depth: int) -> Schema:
    """One schema; inner ones are nested `depth` deep at most."""
    plain: list[Callable[[random.Random, int], Schema]] = [_string, _number, _number, _plain, _values]
    nested = [_array, _object, _object, _combined, _of_types, lambda _rng, _depth: {}]
    return rng.choice(plain + nested if depth else plain)(rng, depth)


def _string(rng: random.Random, _depth: int) -> Schema:
    low, high = sorted((rng.randint(0, 8), rng.randint(0, 8)))
    rules = [{}, {"minLength": low}, {"maxLength": high}, {"minLength": low, "maxLength": high}]
    patterns = (rng.choice(PATTERNS), f"^(?:{random_regex(rng, 1)})$")
    rules += [{"pattern": rng.choice(patterns)}, {"format": rng.choice(FORMATS)}]
    return {"type": "string"} | rng.choice(rules)


def _number(rng: random.Random, _depth: int) -> Schema:
    if rng.random() < 0.2:
        return {"type": "integer", "multipleOf": rng.choice((1, 2, 3, 7, 10, 100, 1024))}
    whole = [0, 1, -1, 5, 10, 99, 100, 101, -100, 12345, rng.randint(-2000, 2000)]
    broken = [0.5, -0.5, 1.5, -3.25, 100.125, 0.001, 1e6]
    kind = rng.choice(("integer", "number"))
    bounds = sorted(rng.choice(whole if kind == "integer" else whole + broken) for _ in range(2))
    schema: Schema = {"type": kind}
    for names, bound in zip((("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")), bounds, strict=True):
        if rng.random() < 0.6:
            schema[rng.choice(names)] = bound
    return schema


def _plain(rng: random.Random, _depth: int) -> Schema:
    return {"type": rng.choice(("boolean", "null"))}


def _values(rng: random.Random, _depth: int) -> Schema:
    return rng.choice(({"enum": rng.sample(VALUES, rng.randint(1, 4))}, {"const": rng.choice(VALUES)}))


def _array(rng: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": "array"}
    if rng.random() < 0.3:
        schema["prefixItems"] = [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.8:
        schema["items"] = random_schema(rng, depth - 1) if rng.random() < 0.8 else rng.choice((True, False))
    low, high = sorted((rng.randint(0, 4), rng.randint(0, 4)))
    return schema | rng.choice(({}, {"minItems": low}, {"maxItems": high}, {"minItems": low, "maxItems": high}))


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(0, 4))
    schema: Schema = {"properties": {name: random_schema(rng, depth - 1) for name in names}}
    if rng.random() < 0.8:
        schema["type"] = "object"
    if rng.random() < 0.8:
        schema["required"] = rng.sample(names, rng.randint(0, len(names)))
    if rng.random() < 0.5:
        schema["additionalProperties"] = rng.choice((False, True, random_schema(rng, depth - 1)))
    return schema


def _combined(rng: random.Random, depth: int) -> Schema:
    keyword = rng.choice(("anyOf", "oneOf", "allOf"))
    return {keyword: [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 1 if keyword == "allOf" else 3))]}


def _of_types(rng: random.Random, depth: int) -> Schema:
    types = rng.sample(TYPES, 2)
    schema: Schema = {}
    for _ in range(30):
        other = random_schema(rng, depth - 1)
        if other.get("type") in types:
            schema |= other
    return schema | {"type": types}


def random_regex(rng: random.Random, depth: int) -> str:
    """Of what a submit lets through, where it means the same to Python."""
    atoms = ["a", "b", "[ab]", "[^a]", r"\d", r"[\d_-]", r"\.", "é", "[a-c]", r"\x41", r"\u6771", '"', "]", r"\\", "東"]
    parts = []
    for _ in range(rng.randint(1, 4)):
        inner = rng.choice(atoms)
        if depth and rng.random() < 0.4:
            inner = rng.choice(("({})", "(?:{})")).format(random_regex(rng, depth - 1))
        parts.append(inner + rng.choice(("", "", "*", "+", "?", "{2}", "{1,3}", "{2,}", "*?")))
    pattern = "".join(parts)
    return rng.choice((pattern, pattern, f"{pattern}|{rng.choice(atoms)}"))
