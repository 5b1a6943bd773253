"""What those who run the gateway ask it: is it up, can it serve, how much did it do."""

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from pagemill.errors import PagemillError
from producers.gateway.callers import TheGateway

router = APIRouter(include_in_schema=True)


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(gateway: TheGateway) -> JSONResponse:
    """The queue can be reached, and a worker lives; 503 otherwise."""
    try:
        facts = await gateway.catalogue.models(fresh_s=1.0)
    except PagemillError:
        return JSONResponse({"status": "the queue cannot be reached", "workers": 0}, 503)
    # two names may stand for one queue
    workers = sum({one.queue: one.num_workers for one in facts.values()}.values())
    if not workers:
        return JSONResponse({"status": "no worker lives", "workers": 0}, 503)
    return JSONResponse({"status": "ready", "workers": workers})


@router.get("/metrics")
async def metrics(gateway: TheGateway) -> Response:
    """Counters, as Prometheus reads them."""
    return Response(gateway.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")
