"""The bodies of requests in the gateway's OpenAPI document; the framework itself does not read them."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

_TEMPLATE = "#/components/schemas/{model}"
_shared: dict[str, Any] = {}


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """What a route says of its body."""
    schema = model.model_json_schema(ref_template=_TEMPLATE)
    _shared.update(schema.pop("$defs", {}))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def document(app: FastAPI) -> dict[str, Any]:
    """The whole document, made once."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        made.setdefault("components", {}).setdefault("schemas", {}).update(_shared)
        app.openapi_schema = made
    return app.openapi_schema
