"""The fields of the wire format as docs/wire.md lists them: name, type with its bounds, default."""

import json
from typing import Any

from pydantic import BaseModel

from pagemill.schema import Completion, Failure, Job, Message, Options, Result, TokenLogprob, Usage

MODELS: tuple[type[BaseModel], ...] = (Job, Message, Options, Result, Completion, TokenLogprob, Usage, Failure)


def fields(model: type[BaseModel]) -> list[tuple[str, str, str]]:
    """Of one kind of object, in its order."""
    schema = model.model_json_schema(by_alias=True)
    definitions = schema.get("$defs", {})
    required = set(schema.get("required", ()))
    return [
        (name, _type(one, definitions), "needed" if name in required else _default(one))
        for name, one in schema["properties"].items()
    ]


def _default(field: dict[str, Any]) -> str:
    if "default" not in field:
        # made for each
        return "`{}`" if field.get("type") == "object" else "made"
    value = field["default"]
    # of an object whose fields all have defaults
    return "`{}`" if isinstance(value, dict) else f"`{json.dumps(value)}`"


def _type(field: dict[str, Any], definitions: dict[str, Any]) -> str:
    if "$ref" in field:
        return str(field["$ref"].rpartition("/")[2])
    if "anyOf" in field:
        return " or ".join(_type(one, definitions) for one in field["anyOf"] if one.get("type") != "null")
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    match field.get("type"):
        case "array" if "prefixItems" in field:
            return "list of " + ", ".join(_type(one, definitions) for one in field["prefixItems"])
        case "array":
            items = _type(field["items"], definitions)
            most = f", {field['maxItems']} at most" if "maxItems" in field else ""
            return f"list of {items or 'any'}{most}"
        case "object" if isinstance(field.get("additionalProperties"), dict):
            return f"object of {_type(field['additionalProperties'], definitions)}"
        case "string":
            return f"text{_length(field)}"
        case "integer" | "number" as kind:
            return f"{kind}{_bounds(field)}"
        case str(kind):
            return kind
        case _:
            return ""


def _length(field: dict[str, Any]) -> str:
    if "maxLength" in field:
        return f" of {field.get('minLength', 0):,} to {field['maxLength']:,} characters"
    return ", a name" if "pattern" in field else ", not empty" if field.get("minLength") else ""


def _bounds(field: dict[str, Any]) -> str:
    low = field.get("minimum", field.get("exclusiveMinimum"))
    high = field.get("maximum", field.get("exclusiveMaximum"))
    if low is None:
        return ""
    start = f" above {low:,}" if "exclusiveMinimum" in field else f" from {low:,}"
    if high is None:
        return start
    return f"{start} {'to below' if 'exclusiveMaximum' in field else 'to'} {high:,}"
