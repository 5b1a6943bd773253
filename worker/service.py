"""
The worker's loops; its end is told in drain.py.

Everything runs on one event loop; the engine has its own process, the intake a pool of threads. Each
job is in the table of leases from its pull to its result, and leaves it in one of three ways:
finished, handed back, or lost to another worker.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import structlog

from pagemill.consumer import Consumer
from pagemill.errors import QueueUnavailable, UnsafeServer
from pagemill.logs import logs_prompts
from pagemill.messages import Delivery, Outcome
from pagemill.object_store import ObjectStore
from pagemill.schema import Result
from worker.doorbell import Doorbell
from worker.drain import Drain
from worker.engine_port import EngineDoor, EngineGone, Tokenizer, Turn
from worker.heap import give_back_forever
from worker.heartbeat import Heartbeat
from worker.intake import Intake
from worker.isolation import Isolation
from worker.jobs import Jobs, tell_end
from worker.leases import Held, Leases
from worker.metrics import WorkerMetrics
from worker.puller import NOTHING, Ask, LookAhead, decide
from worker.raw_intake import RawIntake
from worker.results import ResultMaker
from worker.retries import POLICIES, Fault, Policy
from worker.returns import FLUSH_S, Returns
from worker.shown_tokenizer import show_forever
from worker.sinks import Sink
from worker.streams import TokenStreams
from worker.sweeper import sweep_forever
from worker.webhooks import Webhooks

if TYPE_CHECKING:
    from worker.job_spans import JobSpans

log = structlog.get_logger(__name__)

# a full sink, or so many jobs put off, means that a server is away: what is pulled then has to wait
MAX_UNWRITTEN = 512
# an idle worker looks around as often
IDLE_WAIT_S = 1.0
# of a lease: what a dead worker held is to run elsewhere within a quarter of a lease after it, and waits for a
# place there too
SWEEP_EVERY = 1 / 32
# deadlines and retries are looked at in a sweep as well, however long the leases are
MAX_SWEEP_S = 5.0
# beats between two registrations of the names that this worker answers to: a flushed server has forgotten them
BEATS_PER_REGISTRATION = 30


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """
    How the service treats its jobs.

    Args:
        lease_s: A worker that is silent for so long loses its jobs.
        drain_s: How long running jobs may go on after SIGTERM.
        inline_result_bytes: Larger results go to the object store.
        max_attempts: A job that was tried so many times without an end is failed.
        intake_threads: Threads that read and tokenise.
        step_timeout_s: A worker whose step runs for longer is not healthy.
        policies: How often jobs are tried again, by kind of fault.
        aliases: More names of the model that are routed to this queue.
        supervised: A supervisor tells the queue how this worker died: what a failed engine had is left to it.
        max_queued_tokens: Raw entries are not adopted while more tokens wait; 0 for no limit.
    """

    lease_s: float
    drain_s: float
    look_ahead: LookAhead
    inline_result_bytes: int = 65536
    max_attempts: int = 8
    intake_threads: int = 2
    step_timeout_s: float = 300.0
    policies: Mapping[Fault, Policy] = field(default_factory=lambda: POLICIES)
    aliases: tuple[str, ...] = ()
    supervised: bool = False
    max_queued_tokens: int = 0


class Service:
    """
    Serves a queue with one engine until it is told to stop.

    `stop` may be called at any time, as from a signal handler; called twice, running jobs go
    back to the queue at once.
    """

    def __init__(
        self,
        *,
        consumer: Consumer,
        engine: EngineDoor,
        intake: Intake,
        results: ResultMaker,
        store: ObjectStore | None,
        webhooks: Webhooks | None = None,
        heartbeat: Heartbeat,
        tokenizer: Tokenizer,
        options: ServiceOptions,
        metrics: WorkerMetrics | None = None,
        spans: "JobSpans | None" = None,
    ) -> None:
        self.num_done = 0
        self._metrics, self._spans = metrics or WorkerMetrics(), spans
        self._tells_ends = logs_prompts() or log.is_enabled_for(logging.DEBUG)
        self._consumer, self._store, self._webhooks, self._options = consumer, store, webhooks, options
        self._tokenizer, self._heartbeat, self._engine = tokenizer, heartbeat, engine
        self._leases = Leases(consumer, self._engine, intake, lease_s=options.lease_s)
        self._sink = Sink(
            consumer, store, results, inline_bytes=options.inline_result_bytes, on_settled=self._on_settled
        )
        self._streams = TokenStreams(consumer, self._sink)
        self._pool = ThreadPoolExecutor(options.intake_threads, thread_name_prefix="intake")
        self._raw = RawIntake(
            consumer.raw, self._pool, version=consumer.version, max_queued_tokens=options.max_queued_tokens
        )
        self._isolation = Isolation(consumer, lease_s=options.lease_s)
        self._changed, self._stopping, self._hurry = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._crash: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._doorbell = Doorbell(consumer, start=self._start, on_change=self._on_change)
        self._returns = Returns(
            consumer,
            policies=options.policies,
            take=lambda held: self._jobs.take(held),
            on_settled=self._on_settled,
            start=self._start,
            on_left=self._on_left,
        )
        self._jobs = Jobs(
            leases=self._leases,
            intake=intake,
            pool=self._pool,
            engine=self._engine,
            sink=self._sink,
            streams=self._streams,
            max_attempts=options.max_attempts,
            on_change=self._on_change,
            put_off=self._returns.put_off,
            bury=self._returns.bury,
            spans=spans,
        )

    @property
    def held(self) -> Iterable[Held]:
        """The jobs in this worker's hands."""
        return self._leases

    @property
    def num_unwritten(self) -> int:
        """Jobs that have ended, and payloads that are not deleted yet."""
        return len(self._sink)

    @property
    def healthy(self) -> bool:
        return self._engine.alive and self._engine.step_age_s <= self._options.step_timeout_s

    @property
    def ready(self) -> bool:
        return self._engine.alive and not self._stopping.is_set()

    def stop(self) -> None:
        """Begin to drain; a second call skips the waiting."""
        if self._stopping.is_set():
            self.hurry()
        else:
            self.drain()

    def drain(self) -> None:
        """Begin to drain, or go on with it."""
        self._stopping.set()
        self._changed.set()

    def hurry(self) -> None:
        """Drain, and have running jobs go back to the queue at once."""
        log.warning("drain.hurried", held=len(self._leases))
        self._hurry.set()
        self.drain()

    async def run(self) -> None:
        """
        Work until stopped, then drain.

        Raises:
            The exception that ended the engine or one of the loops, after all jobs were handed back.
        """
        # a callback that fails leaves a job in mid-air: as fatal as a loop that fails
        asyncio.get_running_loop().set_exception_handler(self._on_loop_error)
        self._engine.start(on_turns=self._on_turns, on_crash=self._fail)
        log.info("worker.started", lease_s=self._options.lease_s)
        pulling = self._start(self._pull())
        for loop in (
            self._renew(),
            self._beat(),
            self._sink.run(),
            self._sink.tidy_forever(),
            self._streams.run(),
            self._raw.run(),
            give_back_forever(),
            show_forever(self._consumer, self._tokenizer),
            sweep_forever(
                self._consumer,
                self._store,
                self._webhooks,
                every_s=min(MAX_SWEEP_S, self._options.lease_s * SWEEP_EVERY),
            ),
        ):
            self._start(loop)
        await self._stopping.wait()
        try:
            await self._drain(pulling)
        finally:
            await self._close()
        if self._crash is not None:
            raise self._crash

    async def _drain(self, pulling: "asyncio.Task[None]") -> None:
        log.info("drain.started", held=len(self._leases), grace_s=self._options.drain_s)
        await asyncio.wait([pulling])
        self._doorbell.stop()
        drain = Drain(
            engine=self._engine,
            leases=self._leases,
            jobs=self._jobs,
            returns=self._returns,
            changed=self._changed,
            hurry=self._hurry,
            grace_s=self._options.drain_s,
            supervised=self._options.supervised,
        )
        await drain.run(lambda: self._crash)
        log.info("drain.finished", jobs_done=self.num_done, unwritten=len(self._sink))

    async def _close(self) -> None:
        if not self._crash:
            await self._engine.stop()
        if self._webhooks is not None:
            self._webhooks.close()
        # a cancel that meets a reply just read can get lost inside the Redis client: ask until all have ended
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks, timeout=0.2)
        self._pool.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await self._sink.close()
        # whoever starts next wants its device
        await self._engine.kill()
        if self._crash and self._options.supervised:
            return
        # a server that is silent would keep us for many times as long: without a word the heartbeat runs out
        with contextlib.suppress(QueueUnavailable, TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await self._consumer.leave()

    async def _pull(self) -> None:
        """Claim what fits, as often as something has changed."""
        pause_s = 0.1
        while not self._stopping.is_set():
            self._changed.clear()
            try:
                if not await self._claim():
                    await self._wait_for_change(IDLE_WAIT_S)
                pause_s = 0.1
            except QueueUnavailable as error:
                log.warning("pull.failed", error=str(error), retry_s=pause_s)
                await self._wait_for_change(pause_s)
                pause_s = min(5.0, 2 * pause_s)
        self._metrics.pulled_nothing("draining")

    async def _claim(self) -> bool:
        """Claim suspects, if some wait and nothing is held, else what fits; False where nothing was there to claim."""
        if not len(self._leases) and (suspects := await self._isolation.take()):
            self._receive(suspects)
            return True
        ask, why_not = self._ask()
        self._metrics.asked(ask.rooms)
        self._doorbell.listen(ask.starting)
        if not self._doorbell.calls_for(ask):
            self._metrics.pulled_nothing(why_not)
            return False
        deliveries = await self._consumer.pull(rooms=ask.rooms, job_cap_tokens=self._engine.capacity.total_tokens)
        self._doorbell.pulled(self._consumer.behind)
        if deliveries:
            self._receive(deliveries)
        else:
            # what did not fit may fit when something changes here
            self._doorbell.listen(ask.starting)
            self._metrics.pulled_nothing("no_blocks" if self._consumer.behind and ask else why_not)
        return bool(deliveries)

    def _receive(self, deliveries: Sequence[Delivery]) -> None:
        self._metrics.pulled(deliveries)
        self._jobs.receive(deliveries)

    def _ask(self) -> tuple[Ask, str]:
        """What to ask for, and why nothing comes where nothing does."""
        if max(len(self._sink), len(self._returns)) > MAX_UNWRITTEN:
            return NOTHING, "unwritten"
        if self._isolation.closed(len(self._leases)):
            return NOTHING, "solo"
        ask = decide(self._engine.capacity, self._jobs.transit, self._options.look_ahead)
        return ask, "no_jobs" if ask else "no_blocks"

    async def _wait_for_change(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)

    async def _renew(self) -> None:
        """Keep the leases, and act on what the queue says of our jobs."""
        pause_s, clock = self._leases.renew_every_s, asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(pause_s)
            began = clock()
            try:
                renewal = await self._leases.renew()
                if renewal.lost:
                    log.warning("leases.lost", jobs=len(renewal.lost))
                    self._metrics.lost(len(renewal.lost))
                    await self._jobs.forget(renewal.lost)
                await self._jobs.stop(renewal.cancelled, "cancelled")
                await self._jobs.stop(renewal.expired, "expired")
                await self._isolation.look()
                # it waited for the engine's step to end: what is done again after a kill must not grow by that
                pause_s = max(0.0, self._leases.renew_every_s - (clock() - began))
            except QueueUnavailable as error:
                log.warning("leases.not_renewed", error=str(error))
                pause_s = self._leases.renew_every_s / 4
            except EngineGone:
                return

    async def _beat(self) -> None:
        for beat in itertools.count():
            fields = self._heartbeat.fields(
                self._engine.stats,
                self._engine.capacity,
                num_held=len(self._leases),
                num_done=self.num_done,
                draining=self._stopping.is_set(),
            )
            try:
                if await self._consumer.heartbeat(fields):
                    self._start(self._remind())
                if beat % BEATS_PER_REGISTRATION == 0:
                    for name in self._options.aliases:
                        await self._consumer.register_model(name)
            except QueueUnavailable as error:
                log.warning("heartbeat.failed", error=str(error))
            await asyncio.sleep(min(1.0, self._leases.renew_every_s))

    async def _remind(self) -> None:
        """
        Tell a server that was replaced what it may have missed: the last results, and whose the jobs are.

        In this order, so that what has ended does not run again. A replica may be set up otherwise, too.
        """
        log.warning("server.replaced", held=len(self._leases))
        await self._sink.write_again()
        self._consumer.doubt()
        try:
            for warning in await self._consumer.check_server(allow_unsafe=True):
                log.warning("server.warning", message=warning)
        except (QueueUnavailable, UnsafeServer) as error:
            log.error("server.unsafe", error=str(error))

    def _on_turns(self, turns: Sequence[Turn]) -> None:
        self._jobs.on_turns(turns)

    def _on_change(self) -> None:
        self._changed.set()

    def _on_settled(self, held: Held, outcome: Outcome, result: Result | None = None) -> None:
        job_id = held.delivery.job_id
        self._metrics.settled(held.delivery, held.since, outcome, result)
        if self._spans is not None:
            self._spans.settled(held, outcome, result)
        if self._tells_ends:
            tell_end(held, outcome, result)
        if self._leases.get(job_id) is held:
            self._leases.drop(job_id)
        if outcome in ("done", "duplicate"):
            self.num_done += 1
        else:
            log.warning("result.dropped", **held.ids, outcome=outcome)
        self._changed.set()

    def _on_left(self, held: Held, how: str, fault: str) -> None:
        if self._spans is not None:
            self._spans.left(held, how, fault)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if isinstance(error := context.get("exception"), Exception):
            self._fail(error)
        else:
            loop.default_exception_handler(context)

    def _fail(self, error: BaseException) -> None:
        """The engine or a loop is broken: hand everything back and end."""
        log.critical("worker.failed", error=str(error), exc_info=error)
        self._crash = self._crash or error
        self._hurry.set()
        self._stopping.set()
        self._changed.set()
