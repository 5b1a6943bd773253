"""
JSON schemas that a worker can follow, checked without the library that follows them.

What the library does not enforce it passes over, and the answer would not validate. So a schema may
hold the keywords of `BY_TYPE` and `ANNOTATIONS` and those that combine schemas, where they mean what
they say; all else is refused here, by its place.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from math import inf, isfinite
from typing import Any, NoReturn, Self

from pagemill.json_formats import PATTERNS
from pagemill.regexes import json_pattern

MAX_SCHEMA_BYTES = 64 * 1024
# arrays and objects inside each other, in the schema's own JSON
MAX_SCHEMA_DEPTH = 64
MAX_COUNT = 100_000
# each of them is compared with each other
MAX_ONE_OF = 128
# of one object: any of them may come next, which takes the library a second for so many, and a minute for 2,000
MAX_OPTIONAL = 512
MAX_MULTIPLE = 1024
# integers of the library
_INT_BOUND = 2**63

_RANGE = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
BY_TYPE: Mapping[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": _RANGE | {"multipleOf"},
    "number": _RANGE,
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "boolean": frozenset(),
    "null": frozenset(),
}
_TYPED = frozenset({"type"}).union(*BY_TYPE.values())
# what says nothing of the value
ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}) | {
    "discriminator",
    "$comment",
    "$schema",
}
_DEFINITIONS = frozenset({"$defs", "definitions"})
# each of these decides alone what a schema takes
_DECIDING = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")


def check_json_schema(schema: dict[str, Any]) -> None:
    """
    Raises:
        ValueError: where and why no worker can follow it.
    """
    try:
        text = json.dumps(schema, allow_nan=False, ensure_ascii=False)
        num_bytes = len(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"json_schema is no JSON: {error}") from None
    if num_bytes > MAX_SCHEMA_BYTES:
        raise ValueError(f"json_schema has {num_bytes:,} bytes: want no more than {MAX_SCHEMA_BYTES:,}")
    depth = _depth(schema)
    if depth > MAX_SCHEMA_DEPTH:
        raise ValueError(f"json_schema is nested {depth} deep: want no more than {MAX_SCHEMA_DEPTH}")
    # workers read whole numbers as floats, too, where they are long
    json.loads(text, parse_int=_check_size)
    _Checker().check(schema)


def _check_size(digits: str) -> None:
    if not isfinite(float(digits)):
        raise ValueError(
            f"json_schema has a number of {len(digits.lstrip('-')):,} digits: want no more than a float holds"
        )


def with_json_patterns(schema: Any) -> Any:
    """
    A schema that passed the check, as the library is to follow it: patterns as they are matched inside JSON
    (regexes.json_pattern), and for some formats patterns as well.
    """
    if not isinstance(schema, dict):
        return schema
    changed = dict(schema)
    if "pattern" in schema:
        changed["pattern"] = json_pattern(schema["pattern"])
    if schema.get("format") in PATTERNS:
        changed["pattern"] = json_pattern(PATTERNS[changed.pop("format")])
    for name in ("items", "additionalProperties"):
        if name in schema:
            changed[name] = with_json_patterns(schema[name])
    for name in ("prefixItems", "anyOf", "oneOf", "allOf"):
        if name in schema:
            changed[name] = [with_json_patterns(one) for one in schema[name]]
    for name in ("properties", *_DEFINITIONS):
        if name in schema:
            changed[name] = {key: with_json_patterns(one) for key, one in schema[name].items()}
    return changed


class _Checker:
    """Walks a schema; knows then which places a reference may name."""

    def __init__(self) -> None:
        self._schemas: dict[str, Any] = {}
        self._refs: dict[str, str] = {}
        self._one_ofs: dict[str, list[Any]] = {}

    def check(self, root: dict[str, Any]) -> None:
        self._schema(root, "#")
        for place, target in self._refs.items():
            if target not in self._schemas:
                _refuse(place, f"$ref is {target!r}: want a schema of this document, such as '#/$defs/name'")
            self._resolve(root if place == "#" else self._schemas[place], place)
        for place, branches in self._one_ofs.items():
            marks = [_Marks.of(self._resolve(branch, "#")) for branch in branches]
            for one, other in combinations(marks, 2):
                if not one.excludes(other):
                    _refuse(place, "oneOf of schemas that one value may satisfy both is not supported: use anyOf")

    def _schema(self, schema: Any, place: str) -> None:
        self._schemas[place] = schema
        if schema is True:
            return
        if not isinstance(schema, dict):
            _refuse(place, "want an object or true")
        for name in _DEFINITIONS & schema.keys():
            self._all(_object(schema[name], f"{place}/{name}"), f"{place}/{name}")
        said = schema.keys() - ANNOTATIONS - _DEFINITIONS
        said = {name for name in said if not name.startswith("x-") and not (name == "$id" and place == "#")}
        deciding = [name for name in _DECIDING if name in said]
        if deciding:
            others = said - {deciding[0]} - ({"type"} if deciding[0] in ("const", "enum") else set())
            if others:
                _refuse(place, f"{_words(others)} beside {deciding[0]} is not supported")
            self._deciding(deciding[0], schema, place)
        else:
            self._typed(schema, said, place)

    def _all(self, schemas: Mapping[str, Any], place: str) -> None:
        for name, schema in schemas.items():
            self._schema(schema, f"{place}/{name}")

    def _deciding(self, keyword: str, schema: dict[str, Any], place: str) -> None:
        value = schema[keyword]
        if keyword == "$ref":
            if not isinstance(value, str) or "~" in value or "%" in value:
                _refuse(place, "want $ref as a plain path, such as '#/$defs/name'")
            self._refs[place] = value
        elif keyword in ("const", "enum"):
            values = [value] if keyword == "const" else _array(value, f"{place}/enum")
            types = set(_types(schema, place)) if "type" in schema else set(BY_TYPE)
            wrong = [one for one in values if not _type_of(one) & types]
            if wrong:
                _refuse(place, f"{keyword} has {_shown(wrong[0])}, which is not of its type")
        else:
            branches = _array(value, f"{place}/{keyword}")
            if keyword == "allOf" and len(branches) > 1:
                _refuse(place, "allOf of several schemas is not supported: merge them")
            self._all({str(index): branch for index, branch in enumerate(branches)}, f"{place}/{keyword}")
            if keyword == "oneOf":
                if len(branches) > MAX_ONE_OF:
                    _refuse(place, f"oneOf has {len(branches):,} schemas: want up to {MAX_ONE_OF}, or enum, or anyOf")
                self._one_ofs[place] = branches

    def _typed(self, schema: dict[str, Any], said: set[str], place: str) -> None:
        if not said:
            return
        if strange := said - _TYPED:
            _refuse(place, f"{_words(strange)} is not supported")
        types = _types(schema, place)
        unknown = said - {"type"} - frozenset().union(*(BY_TYPE[name] for name in types))
        if unknown:
            _refuse(place, f"{_words(unknown)} is not supported for type {', '.join(types)}")
        if "string" in types:
            _check_string(schema, place)
        if {"integer", "number"} & set(types):
            _check_number(schema, types, place)
        if "array" in types:
            self._array(schema, place)
        if "object" in types:
            self._object(schema, place)

    def _array(self, schema: dict[str, Any], place: str) -> None:
        _check_counts(schema, "minItems", "maxItems", place)
        prefix = _array(schema["prefixItems"], f"{place}/prefixItems") if "prefixItems" in schema else []
        self._all({str(index): item for index, item in enumerate(prefix)}, f"{place}/prefixItems")
        items = schema.get("items", True)
        if items is not False:
            self._schema(items, f"{place}/items")
        counted = {"minItems", "maxItems"} & schema.keys()
        if counted and not prefix and "items" not in schema:
            _refuse(place, f"{_words(counted)} without items is not supported: {{}} is any item")
        if schema.get("maxItems", MAX_COUNT) < len(prefix):
            _refuse(place, f"maxItems is {schema['maxItems']} and there are {len(prefix)} prefixItems")
        if schema.get("minItems", 0) > len(prefix) and schema.get("items", False) is False:
            _refuse(
                place, f"minItems is {schema['minItems']} and there are {len(prefix)} prefixItems and no other items"
            )

    def _object(self, schema: dict[str, Any], place: str) -> None:
        properties = _object(schema.get("properties", {}), f"{place}/properties")
        self._all(properties, f"{place}/properties")
        others = schema.get("additionalProperties", True)
        if others is not False:
            self._schema(others, f"{place}/additionalProperties")
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            _refuse(place, "want required as an array of names")
        missing = set(required) - properties.keys()
        if missing:
            _refuse(place, f"required names {_words(missing)}, which properties does not have")
        optional = properties.keys() - set(required)
        if len(optional) > MAX_OPTIONAL:
            _refuse(place, f"{len(optional):,} properties are not required: want up to {MAX_OPTIONAL}, require others")

    def _resolve(self, schema: Any, place: str) -> Any:
        """What a schema is behind its references."""
        seen = set()
        while isinstance(schema, dict) and "$ref" in schema:
            target = schema["$ref"]
            if target in seen:
                _refuse(place, f"$ref is {target!r}, which leads back to itself")
            seen.add(target)
            schema = self._schemas.get(target, True)
        return schema


@dataclass(frozen=True, slots=True)
class _Marks:
    """
    What tells the values of a schema from those of others.

    Args:
        values: All that there are, each as JSON; None where they are not listed.
        types: Empty where the schema does not say.
        tags: By required property of an object, the values that it may have.
    """

    values: frozenset[str] | None = None
    types: frozenset[str] = frozenset()
    tags: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, schema: Any) -> Self:
        if schema is True:
            return cls()
        types = frozenset(_wide_types(schema))
        tags = {}
        if types == {"object"}:
            for name in set(schema.get("required", [])):
                if (values := _values_of(schema["properties"][name])) is not None:
                    tags[name] = frozenset(values)
        values = _values_of(schema)
        return cls(frozenset(values) if values is not None else None, types, tags)

    def excludes(self, other: "_Marks") -> bool:
        """Whether it is plain that no value satisfies both."""
        if self.values is not None and other.values is not None:
            return self.values.isdisjoint(other.values)
        if self.types and other.types and self.types.isdisjoint(other.types):
            return True
        return any(self.tags[name].isdisjoint(other.tags[name]) for name in self.tags.keys() & other.tags.keys())


def _check_string(schema: dict[str, Any], place: str) -> None:
    _check_counts(schema, "minLength", "maxLength", place)
    rules = [name for name in ("pattern", "format") if name in schema]
    if len(rules) > 1 or (rules and {"minLength", "maxLength"} & schema.keys()):
        _refuse(place, "pattern, format and bounds of the length are not supported together")
    for name in rules:
        if not isinstance(schema[name], str):
            _refuse(place, f"want {name} as a string")
    if "pattern" in schema:
        try:
            json_pattern(schema["pattern"])
        except ValueError as error:
            _refuse(place, f"pattern: {error}")


def _check_number(schema: dict[str, Any], types: list[str], place: str) -> None:
    for name in _RANGE & schema.keys():
        value = schema[name]
        if isinstance(value, bool) or not isinstance(value, int | float):
            _refuse(place, f"want {name} as a number")
        if "integer" in types and (not float(value).is_integer() or not -_INT_BOUND < value < _INT_BOUND):
            _refuse(place, f"want {name} of an integer as a whole number of 64 bits")
    if _is_empty_range(schema, whole="number" not in types):
        _refuse(place, "no number lies in the range")
    if "multipleOf" in schema:
        value = schema["multipleOf"]
        if type(value) is not int or not 1 <= value <= MAX_MULTIPLE or "number" in types:
            _refuse(place, f"multipleOf is supported for integers, from 1 to {MAX_MULTIPLE:,}")
        if _RANGE & schema.keys():
            _refuse(place, "multipleOf beside a range is not supported")


def _is_empty_range(schema: dict[str, Any], *, whole: bool) -> bool:
    low, high = schema.get("minimum", -inf), schema.get("maximum", inf)
    above, below = schema.get("exclusiveMinimum", -inf), schema.get("exclusiveMaximum", inf)
    if whole:
        # finite bounds are whole here
        return bool(max(low, above + 1) > min(high, below - 1))
    return bool(low > high or above >= below or above >= high or low >= below)


def _check_counts(schema: dict[str, Any], low: str, high: str, place: str) -> None:
    for name in (low, high):
        value = schema.get(name, 0)
        if type(value) is not int or not 0 <= value <= MAX_COUNT:
            _refuse(place, f"want {name} from 0 to {MAX_COUNT:,}")
    if low in schema and high in schema and schema[low] > schema[high]:
        _refuse(place, f"{low} is {schema[low]:,} and {high} {schema[high]:,}")


def _types(schema: dict[str, Any], place: str) -> list[str]:
    said = schema.get("type", "object" if "properties" in schema else None)
    types = [said] if isinstance(said, str) else said
    if not isinstance(types, list) or not types or not all(isinstance(one, str) and one in BY_TYPE for one in types):
        _refuse(place, f"want type as one or several of {', '.join(BY_TYPE)}")
    return types


def _wide_types(schema: dict[str, Any]) -> set[str]:
    """The types that a schema's values may have, a whole number as a number; empty where it does not say."""
    said = schema.get("type", [])
    values = _values_of(schema)
    if values is not None:
        said = [name for value in values for name in _type_of(json.loads(value))]
    types = {said} if isinstance(said, str) else set(said)
    return {"number" if name == "integer" else name for name in types}


def _values_of(schema: Any) -> set[str] | None:
    """The values of a const or an enum, each as JSON; None for another schema."""
    if not isinstance(schema, dict) or not {"const", "enum"} & schema.keys():
        return None
    values = [schema["const"]] if "const" in schema else schema["enum"]
    # 1 and 1.0 are one value
    return {json.dumps(int(one) if isinstance(one, float) and one.is_integer() else one) for one in values}


def _type_of(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"integer", "number"} if float(value).is_integer() else {"number"}
    kinds = {str: "string", list: "array", dict: "object", type(None): "null"}
    return {kinds[type(value)]}


def _object(value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        _refuse(place, "want an object")
    return value


def _array(value: Any, place: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        _refuse(place, "want an array that is not empty")
    return value


def _depth(value: Any) -> int:
    """Arrays and objects inside each other; json.dumps has been through it, so it ends."""
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        level = [part for one in level for part in (one.values() if isinstance(one, dict) else one)]
    return depth


def _words(names: Iterable[str]) -> str:
    return ", ".join(_shown(name) for name in sorted(names)[:8])


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _refuse(place: str, why: str) -> NoReturn:
    raise ValueError(f"json_schema at {_shown(place)}: {why}")
