"""
The worker process: builds the parts, serves until told to stop.

The only place that builds things; the engine is built in its own process, as this one plans it.
"""

import asyncio
import faulthandler
import gc
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import structlog

from engine.config import USUAL_LIMITS, EngineConfig
from engine.errors import DeviceLost, EngineError, ModelNotFound, StartupError
from pagemill.connection import AsyncServers, timeout_of_a_lease
from pagemill.consumer import Consumer
from pagemill.errors import PagemillError, QueueUnavailable, SettingsError
from pagemill.keys import MODELS, QueueKeys
from pagemill.logs import bind
from pagemill.object_store import ObjectStore, open_store
from pagemill.settings import LogSettings
from pagemill.traces import exported
from pagemill.traces import stop as stop_export
from worker import exits
from worker.engine_build import EnginePlan, FakeConfig, load_tokenizer
from worker.engine_port import EngineDoor, EngineFacts, Tokenizer
from worker.engine_process import EngineEnded, EngineProcess, StepHung
from worker.engine_wire import Assignment
from worker.heartbeat import Heartbeat
from worker.intake import Intake
from worker.lifeline import DRAINED, ENGINE_ENDED, FAILED, SERVING, Lifeline, new_worker_id
from worker.measured_store import MeasuredStore
from worker.metrics import WorkerMetrics
from worker.models import resolve_model
from worker.monitor import Monitor
from worker.puller import LookAhead, default_look_ahead
from worker.results import ResultMaker
from worker.service import Service, ServiceOptions
from worker.settings import WorkerSettings
from worker.signals import heed_signals, ignore_signals
from worker.webhooks import Webhooks, read_secret

if TYPE_CHECKING:
    from pagemill.tracing import Tracer
    from worker.job_spans import JobSpans

log = structlog.get_logger("worker")

# so long a worker that has failed waits for a collector
LAST_SPANS_S = 1.0


def run(settings: WorkerSettings) -> int:
    """Be a worker to its end; returns the exit code."""
    lifeline = Lifeline.parse(settings.supervised) if settings.supervised else None
    if lifeline is not None:
        lifeline.hold()
        bind(worker=lifeline.worker_id)
    # what a library does to us shows on standard error
    faulthandler.enable()
    explain = partial(_explain, as_json=settings.log_format == "json")
    try:
        return asyncio.run(serve(settings, lifeline))
    except SettingsError as error:
        return explain(error, exits.SETTINGS)
    except QueueUnavailable as error:
        return explain(error, exits.STARTUP if lifeline is None else exits.AWAY)
    except (PagemillError, StartupError) as error:
        return explain(error, exits.STARTUP)
    except EngineError as error:
        # it may come up the next time
        if lifeline is not None:
            lifeline.tell(_note(error))
        return explain(error, _code(error))
    except KeyboardInterrupt:
        return exits.STARTUP


async def serve(settings: WorkerSettings, lifeline: Lifeline | None) -> int:
    """
    Build a worker and run it to its end; returns the exit code. A worker that failed ends the process.

    The server is asked before the model is loaded: a mistake there shows at once.

    Raises:
        PagemillError, StartupError: what the operator has to change.
    """
    worker_id = new_worker_id() if lifeline is None else lifeline.worker_id
    bind(worker=worker_id)
    monitor = Monitor(settings)
    export = exported(settings.tracing, "pagemill-worker", instance=worker_id, on_spans=monitor.metrics.spans)
    # opened first: the last spans are made when all else is closed
    with export as tracer:
        return await _serve(settings, lifeline, worker_id, monitor, tracer)


async def _serve(
    settings: WorkerSettings, lifeline: Lifeline | None, worker_id: str, monitor: Monitor, tracer: "Tracer | None"
) -> int:
    store = MeasuredStore(open_store(settings.object_store), monitor.metrics) if settings.object_store else None
    secret = read_secret(settings.webhook_secret.get_secret_value()) if settings.webhook_secret else None
    servers = AsyncServers(settings.redis_url, timeout_s=timeout_of_a_lease(settings.lease_s))
    try:
        consumer = Consumer(
            servers.at(QueueKeys(settings.queue).base),
            settings.queue,
            worker_id=worker_id,
            lease_ms=round(settings.lease_s * 1000),
            models=servers.at(MODELS),
            on_call=monitor.metrics.redis_call,
        )
        await _check_server(consumer, allow_unsafe=settings.allow_unsafe_redis)
        async with monitor.endpoints():
            engine, tokenizer = await _start_engine(settings, lifeline, worker_id)
            # what is there now stays, and the collector need not walk it
            gc.collect()
            gc.freeze()
            webhooks = Webhooks(consumer, secret=secret, allow_private=settings.allow_private_webhooks)
            spans = _job_spans(settings, tracer, worker_id, engine.facts)
            service = build_service(settings, consumer, store, webhooks, engine, tokenizer, monitor.metrics, spans)
            monitor.watch(service, engine, model=served_names(settings, engine.facts.model_name)[0])
            return await _run(service, lifeline)
    finally:
        await servers.close()


async def _check_server(consumer: Consumer, *, allow_unsafe: bool) -> None:
    try:
        warnings = await consumer.check_server(allow_unsafe=allow_unsafe)
    except QueueUnavailable as error:
        reason = str(error).rstrip(".")
        raise QueueUnavailable(f"{reason}. Is a Redis running there? --redis-url says where to look") from None
    for warning in warnings:
        log.warning("server.warning", message=warning)


async def _run(service: Service, lifeline: Lifeline | None) -> int:
    heed_signals(service, lifeline)
    if lifeline is not None:
        lifeline.tell(SERVING)
    try:
        await service.run()
    except Exception as error:
        # what had ended is written; what had not has been handed back, or goes to other workers
        log.critical("worker.ended", error=f"{type(error).__name__}: {error}", exc_info=error)
        _end_failed(error, lifeline)
    finally:
        ignore_signals()
    if lifeline is not None:
        lifeline.tell(DRAINED)
    return exits.DRAINED


def _end_failed(error: Exception, lifeline: Lifeline | None) -> NoReturn:
    """Leave at once: a thread that hangs may keep an orderly end from coming."""
    if lifeline is not None:
        lifeline.tell(_note(error))
    stop_export(LAST_SPANS_S)
    sys.stderr.flush()
    os._exit(_code(error))


def _note(error: Exception) -> str:
    if isinstance(error, EngineEnded):
        # the supervisor finds out whether a job has done it
        return f"{ENGINE_ENDED}{error.code}"
    return f"{FAILED}{type(error).__name__}: {error}"


def _code(error: Exception) -> int:
    codes: dict[type[Exception], int] = {StepHung: exits.HUNG, DeviceLost: exits.DEVICE_LOST}
    return codes.get(type(error), exits.FAILED)


async def _start_engine(
    settings: WorkerSettings, lifeline: Lifeline | None, worker_id: str
) -> tuple[EngineDoor, Tokenizer]:
    """
    Raises:
        StartupError: the device cannot be used, or the model is not there or does not fit.
        EngineError: the engine's process has ended for another reason.
    """
    # a .gguf file is converted first, which takes a while
    plan = await asyncio.to_thread(plan_engine, settings)
    logging = LogSettings.model_construct(**{name: getattr(settings, name) for name in LogSettings.model_fields})
    assignment = Assignment(plan, settings.step_timeout_s, logging, {"queue": settings.queue, "worker": worker_id})
    # beside the engine, which has one too
    loading = asyncio.create_task(asyncio.to_thread(load_tokenizer, plan))
    try:
        # the supervisor waits for both of us to let go of its pipe, and so of the device
        engine = await EngineProcess.launch(assignment, inherited=[] if lifeline is None else [lifeline.pipe])
    except BaseException:
        # what the engine says comes first
        await asyncio.wait([loading])
        loading.exception()
        raise
    return engine, await loading


def plan_engine(settings: WorkerSettings) -> EnginePlan:
    """
    What the engine's process is told to build.

    Raises:
        ModelNotFound: no model is set, or it is not there.
    """
    if settings.engine == "fake":
        usual = USUAL_LIMITS["cpu"]
        return FakeConfig(
            model_name=settings.served_model_name or "fake",
            max_num_seqs=settings.max_num_seqs or usual.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens or usual.max_num_batched_tokens,
            max_model_len=settings.max_model_len or 8192,
            kv_tokens=settings.fake_kv_tokens,
            tokens_per_s=settings.fake_tokens_per_s,
            poison=settings.fake_poison,
        )
    if settings.model is None:
        raise ModelNotFound("no model is set: give --model a folder, a .gguf file or a name of `pagemill models list`")
    return _engine_config(settings, resolve_model(settings.model))


def build_service(
    settings: WorkerSettings,
    consumer: Consumer,
    store: ObjectStore | None,
    webhooks: Webhooks,
    engine: EngineDoor,
    tokenizer: Tokenizer,
    metrics: WorkerMetrics,
    spans: "JobSpans | None" = None,
) -> Service:
    facts = engine.facts
    model, *aliases = served_names(settings, facts.model_name)
    look_ahead = _look_ahead(settings, facts)
    log.info(
        "engine.ready",
        model=model,
        aliases=aliases,
        kv_cache_tokens=facts.kv_tokens,
        max_model_len=facts.max_model_len,
        concurrency_at_max_model_len=round(facts.kv_tokens / facts.max_model_len, 1),
        max_num_seqs=facts.max_num_seqs,
        look_ahead_jobs=look_ahead.jobs,
    )
    return Service(
        consumer=consumer,
        engine=engine,
        intake=Intake(
            tokenizer=tokenizer,
            models=frozenset({model, *aliases}),
            max_model_len=facts.max_model_len,
            fingerprint=facts.fingerprint,
            store=store,
            shared_tenants=settings.shared_tenants,
            traced=spans is not None,
        ),
        results=ResultMaker(tokenizer=tokenizer, model=model, worker_id=consumer.worker_id),
        store=store,
        webhooks=webhooks,
        heartbeat=Heartbeat(
            {"model": model, "max_model_len": facts.max_model_len, "engine": settings.engine}, engine.stats
        ),
        tokenizer=tokenizer,
        options=_service_options(settings, look_ahead, tuple(aliases)),
        metrics=metrics,
        spans=spans,
    )


def _job_spans(
    settings: WorkerSettings, tracer: "Tracer | None", worker_id: str, facts: EngineFacts
) -> "JobSpans | None":
    if tracer is None:
        return None
    from worker.job_spans import JobSpans

    return JobSpans(
        tracer,
        queue=settings.queue,
        worker_id=worker_id,
        model=served_names(settings, facts.model_name)[0],
        as_child=settings.trace_jobs == "child",
        with_content=settings.trace_content,
    )


def _service_options(settings: WorkerSettings, look_ahead: LookAhead, aliases: tuple[str, ...]) -> ServiceOptions:
    return ServiceOptions(
        lease_s=settings.lease_s,
        drain_s=settings.drain_s,
        look_ahead=look_ahead,
        inline_result_bytes=settings.inline_result_bytes,
        max_attempts=settings.max_attempts,
        intake_threads=settings.intake_threads,
        step_timeout_s=settings.step_timeout_s,
        aliases=aliases,
        max_queued_tokens=settings.max_queued_tokens,
        supervised=settings.supervised is not None,
    )


def served_names(settings: WorkerSettings, folder_name: str) -> list[str]:
    """
    The names that jobs may ask for, the one that results carry first.

    A name that the operator chose stands alone: another queue may serve the same folder.
    """
    if settings.served_model_name is not None:
        return [settings.served_model_name]
    if settings.model is None or settings.engine == "fake":
        return [folder_name]
    path = Path(settings.model).expanduser()
    given = path.stem if path.suffix == ".gguf" else settings.model
    if path.is_dir():
        given = path.resolve().name
    return [given] if given == folder_name else [given, folder_name]


def _look_ahead(settings: WorkerSettings, facts: EngineFacts) -> LookAhead:
    usual = default_look_ahead(
        max_num_seqs=facts.max_num_seqs,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        max_model_len=facts.max_model_len,
    )
    if settings.look_ahead_jobs is None:
        return usual
    return LookAhead(jobs=settings.look_ahead_jobs, tokens=usual.tokens)


def _engine_config(settings: WorkerSettings, folder: Path) -> EngineConfig:
    return EngineConfig(
        model=folder,
        device=settings.device,
        dtype=settings.dtype,
        kv_cache_dtype=settings.kv_cache_dtype,
        block_size=settings.block_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        kv_cache_bytes=settings.kv_cache_bytes,
        swap_space_bytes=settings.swap_space_bytes,
        cuda_graphs=settings.cuda_graphs,
        prefix_caching=settings.prefix_caching,
        shared_tenants=settings.shared_tenants,
        cascade=settings.cascade,
        cascade_min_seqs=settings.cascade_min_seqs,
        cascade_min_tokens=settings.cascade_min_tokens,
        preemption=settings.preemption,
        policy=settings.policy,
        load_format=settings.load_format,
        num_threads=settings.num_threads,
    )


def _explain(error: Exception, code: int, *, as_json: bool) -> int:
    """Say why the worker does not start, as a sentence unless JSON is asked for by name."""
    if as_json:
        log.critical("worker.not_started", why=str(error), code=code)
    else:
        print(f"pagemill worker: {error}", file=sys.stderr)
    return code
