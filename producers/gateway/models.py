"""GET /v1/models: what the queue's workers have registered."""

from typing import Any

from fastapi import APIRouter

from pagemill.catalogue import ModelFacts
from pagemill.errors import PagemillError
from producers.gateway.callers import Caller, TheGateway
from producers.openai_api.errors import of_pagemill

router = APIRouter()


@router.get("/v1/models")
async def models(gateway: TheGateway, key: Caller) -> dict[str, Any]:  # noqa: ARG001  the key is checked
    """All models that can be asked for."""
    try:
        facts = await gateway.catalogue.models()
    except PagemillError as error:
        raise of_pagemill(error) from None
    return {"object": "list", "data": [_entry(one) for one in facts.values()]}


@router.get("/v1/models/{name:path}")
async def model(name: str, gateway: TheGateway, key: Caller) -> dict[str, Any]:  # noqa: ARG001
    """One of them."""
    try:
        return _entry(await gateway.catalogue.find(name))
    except PagemillError as error:
        raise of_pagemill(error) from None


def _entry(facts: ModelFacts) -> dict[str, Any]:
    # nobody notes when a model was made; clients want a number
    return {
        "id": facts.name,
        "object": "model",
        "created": 0,
        "owned_by": "pagemill",
        "max_model_len": facts.max_model_len,
    }
