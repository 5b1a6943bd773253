"""POST /v1/chat/completions and /v1/completions."""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from pagemill.errors import PagemillError
from pagemill.schema import Job, Result
from producers.gateway.api_keys import ApiKey
from producers.gateway.callers import Caller, TheGateway, read_body
from producers.gateway.event_stream import EventStream, unless_gone
from producers.gateway.generation import Generation
from producers.gateway.schemas import body_of
from producers.gateway.state import Gateway
from producers.openai_api.chunks import ChatChunks, Chunks, CompletionChunks
from producers.openai_api.errors import ApiError, bad_request, of_pagemill
from producers.openai_api.fields import Sampling
from producers.openai_api.jobs import Terms, chat_job, completion_jobs
from producers.openai_api.requests import ChatRequest, CompletionRequest, parse, read_json
from producers.openai_api.responses import chat_body, chat_id, completion_body, completion_id

R = TypeVar("R", bound=Sampling)

# how long an answer can be asked for again under its idempotency key
RESULT_TTL_S = 3600

# how much longer than its job may take a client may read
READ_S = 120.0

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=body_of(ChatRequest))
async def chat_completions(request: Request, gateway: TheGateway, key: Caller) -> Response:
    """Answer a chat, at once or as a stream of events."""
    wanted = await _read(ChatRequest, request, gateway)
    job = chat_job(wanted, await _terms(gateway, key, wanted, request))
    return await _serve(
        request,
        gateway,
        key,
        [job],
        lambda name: ChatChunks(wanted, chat_id(name), int(time.time())) if wanted.stream else None,
        lambda results: chat_body(wanted, results[0]),
    )


@router.post("/v1/completions", openapi_extra=body_of(CompletionRequest))
async def completions(request: Request, gateway: TheGateway, key: Caller) -> Response:
    """Continue one or several prompts, at once or as a stream of events."""
    wanted = await _read(CompletionRequest, request, gateway)
    jobs = completion_jobs(wanted, await _terms(gateway, key, wanted, request))
    return await _serve(
        request,
        gateway,
        key,
        jobs,
        lambda name: CompletionChunks(wanted, completion_id(name), int(time.time())) if wanted.stream else None,
        lambda results: completion_body(wanted, results),
    )


async def _read(kind: type[R], request: Request, gateway: Gateway) -> R:
    body = await read_body(request, gateway.settings.max_body_bytes)
    try:
        return parse(kind, read_json(body))
    except ApiError:
        gateway.metrics.refused.labels("bad_request").inc()
        raise


async def _terms(gateway: Gateway, key: ApiKey, wanted: Sampling, request: Request) -> Terms:
    """What the gateway decides of a request's jobs; an unknown model ends it here."""
    try:
        facts = await gateway.catalogue.find(wanted.model)
    except PagemillError as error:
        raise of_pagemill(error) from None
    repeat = request.headers.get("idempotency-key")
    if repeat is not None and not 0 < len(repeat) <= 200:
        raise bad_request("the Idempotency-Key has no or more than 200 characters", code="invalid_value")
    settings = gateway.settings
    return Terms(
        tenant=key.tenant,
        answer_tokens=settings.answer_tokens,
        max_model_len=facts.max_model_len,
        timeout_s=settings.timeout_s,
        result_ttl_s=RESULT_TTL_S,
        idempotency_key=repeat,
        normalise=settings.normalise_system_prompts,
        drop_lines=gateway.drop_lines,
    )


async def _serve(
    request: Request,
    gateway: Gateway,
    key: ApiKey,
    jobs: Sequence[Job],
    chunks_for: Callable[[str], Chunks | None],
    body_for: Callable[[Sequence[Result]], dict[str, Any]],
) -> Response:
    state = request.scope["state"]
    generation = Generation(gateway, key, jobs, route=request.url.path, began=state["began"])
    await generation.enter()
    chunks = chunks_for(generation.name)
    streams = False
    try:
        if chunks is None:
            results = await unless_gone(request.receive, generation.results())
            return JSONResponse(body_for(results))
        events = generation.events(chunks)
        first = await unless_gone(request.receive, _first(events))
        streams = True
        return EventStream(
            _chained(first, events),
            most_s=gateway.settings.timeout_s + READ_S,
            on_close=generation.close,
            on_gone=gateway.metrics.gone.inc,
        )
    finally:
        if not streams:
            generation.close()


async def _first(events: AsyncIterator[bytes]) -> bytes:
    return await anext(events)


async def _chained(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for part in rest:
        yield part
