"""The worker's side of the queue: claim, renew, finish, hand back."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from types import TracebackType
from typing import Any, Self, TypeVar

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError

from pagemill import batches, calls
from pagemill.calls import in_chunks
from pagemill.connection import send_once
from pagemill.contact import Contact
from pagemill.keys import MODELS, QueueKeys
from pagemill.messages import (
    BatchStatus,
    Checkpoint,
    DeathCause,
    Delivery,
    Finished,
    HookDelivery,
    Outcome,
    Pull,
    Renewal,
    Room,
    SweepReport,
    TokenDelta,
)
from pagemill.raw import RawEntries
from pagemill.schema import LANES, Lane
from pagemill.scripts import Call, run_async, run_many_async, translated
from pagemill.server_facts import judge, read_facts
from pagemill.shown_tokenizer import ShownTokenizer
from pagemill.versions import SCHEMA_VERSION

T = TypeVar("T")

# streams that one sweep tidies
TIDY = 32

# entries that were finished last; an older server has them still, and they are not handed back unasked
MAX_FINISHED = 1024


class Consumer:
    """
    One worker process at one queue.

    `worker_id` is unique for each process that ever runs: the server's note of who owns an
    entry is the fence. Leases and heartbeat are to be renewed every third of a lease; peers
    take back what is idle for a lease and whose owner's heartbeat has run out.

    A job of a later `version` of the wire format is left to newer workers, as long as there are some.
    In a cluster `redis` leads to the queue's slot and `models` to that of the table of models.
    `on_call` is told of each call of a script: its name, how long it took in seconds, whether it failed.

    All methods raise QueueUnavailable where the server cannot be reached or is out of memory, and
    may be repeated then; `finish` of a job that is published already says "duplicate".
    """

    def __init__(
        self,
        redis: Redis,
        queue: str,
        *,
        worker_id: str,
        lease_ms: int,
        version: int = SCHEMA_VERSION,
        models: Redis | None = None,
        on_call: Callable[[str, float, bool], None] | None = None,
    ) -> None:
        self.keys = QueueKeys(queue)
        self.worker_id = worker_id
        self.lease_ms = lease_ms
        self.version = version
        self.raw = RawEntries(redis, self.keys, worker_id)
        self.tokenizer = ShownTokenizer(redis, self.keys)
        self._redis = redis
        self._models = redis if models is None else models

        # lanes in which the last pull left jobs that wait
        self.behind: frozenset[Lane] = frozenset()

        # all other mutable state there is
        self._held: set[tuple[str, str]] = set()
        self._finished: deque[tuple[str, str]] = deque(maxlen=MAX_FINISHED)
        self._reply_lost = False
        self._in_doubt = False
        self._run_id = ""
        self._replaced = False
        self._contact = Contact(lease_s=lease_ms / 1000, on_call=on_call)
        self._turn = 0
        self._cursor = "0"
        self._registered: set[str] = set()

    def __repr__(self) -> str:
        return f"Consumer({self.worker_id} at {self.keys.queue}: {len(self._held)} held)"

    async def __aenter__(self) -> Self:
        await self.heartbeat({})
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.leave()

    async def check_server(self, *, allow_unsafe: bool = False) -> list[str]:
        """
        What the operator should know of the server, a sentence each.

        Raises:
            UnsafeServer: its settings can lose jobs; a warning where `allow_unsafe`.
        """
        return judge(await read_facts(self._redis), allow_unsafe=allow_unsafe)

    async def register_model(self, model: str) -> None:
        """
        Route jobs that ask for `model` to this queue, from now on.
        """
        with translated():
            await self._models.execute_command("HSET", MODELS, model, self.keys.queue)
        self._registered.add(model)

    async def pull(self, *, rooms: Sequence[Room], job_cap_tokens: int = 0) -> list[Delivery]:
        """
        Claim jobs that fit, in order of lane, hand-backs and tenants; never above any limit.

        Cancelled and expired jobs end here and are not returned. When a reply was lost, all that
        the call had claimed is handed back by the next one. Without any room the call only sees
        what waits, and rings for those who have some.

        Args:
            rooms: One a lane, the most urgent first. A job takes from the rooms of the lanes behind
                its own too: with less room for these, urgent jobs get what preemption would free.
            job_cap_tokens: What one job's estimate counts at most, 0 for no limit. Estimates are
                rough: with the engine's whole cache here, every job fits into an idle worker.
        """
        await self._disown()
        pulled: list[Delivery] = []
        again = True
        while again:
            # one script looks at a bounded number of entries, so that it holds up nobody
            pull = await self._pull_once(rooms, job_cap_tokens)
            rooms = _without(rooms, pull.jobs, job_cap_tokens)
            pulled += pull.jobs
            again = pull.again and any(rooms)
        self.behind = pull.behind
        # not before: what a call that fails halfway has claimed is handed back by the next one
        self._held.update((job.stream, job.entry_id) for job in pulled)
        return pulled

    async def take_suspects(self) -> list[Delivery]:
        """
        Claim one group of suspects; empty where none waits, or where a peer runs some.

        For a worker that holds nothing, and takes nothing else before they have ended: if they end
        it, the blame must be theirs. They are renewed, finished and handed back as all jobs are.
        While this worker runs some, its peers get none.
        """
        await self._disown()
        again, jobs = True, list[Delivery]()
        while again and not jobs:
            call = calls.take_suspects(self.keys, self.worker_id, lease_ms=self.lease_ms, turn=self._turn)
            again, jobs = await self._claim(call)
        self._held.update((job.stream, job.entry_id) for job in jobs)
        return jobs

    async def num_suspects_waiting(self) -> int:
        """
        Suspects that wait and that nobody looks after: 0 while a peer runs others.
        """
        with translated():
            async with self._redis.pipeline(transaction=False) as pipeline:
                pipeline.execute_command("GET", self.keys.isolation)
                pipeline.execute_command("HGET", self.keys.stats, "suspects")
                holder, waiting = await pipeline.execute()
        return 0 if holder not in (None, self.worker_id.encode()) else int(waiting or 0)

    async def _disown(self) -> None:
        if self._reply_lost or self._in_doubt:
            # in this order: should it fail too, the next one begins a later turn
            self._reply_lost, self._in_doubt = True, False
            self._turn += 1
            known = sorted(self._held.union(self._finished))
            await self._run(calls.disown(self.keys, self.worker_id, turn=self._turn, known=known))
            self._reply_lost = False

    async def _pull_once(self, rooms: Sequence[Room], job_cap_tokens: int) -> Pull:
        call = calls.pull(
            self.keys,
            self.worker_id,
            rooms=rooms,
            job_cap_tokens=job_cap_tokens,
            lease_ms=self.lease_ms,
            turn=self._turn,
            version=self.version,
        )
        return await self._claim(call)

    async def _claim(self, call: Call[T]) -> T:
        # until the reply is read, entries may be ours without our knowing
        self._reply_lost = True
        with self._contact.watched(call.script.name), translated():
            try:
                reply = await send_once(self._redis, *call.by_hash)
            except NoScriptError:
                reply = await send_once(self._redis, *call.by_source)
        answer = call.parse(reply)
        self._reply_lost = False
        return answer

    async def renew(self, held: Sequence[Delivery], checkpoints: Mapping[str, Checkpoint] | None = None) -> Renewal:
        """
        Extend the leases that are still ours, save checkpoints, and hear verdicts.

        Args:
            checkpoints: By job id; saved only for jobs in `held` that are still ours.
        """
        renewals = await self._run_many(
            calls.renew(self.keys, self.worker_id, part, checkpoints or {}, lease_ms=self.lease_ms)
            for part in in_chunks(held)
        )
        lost = frozenset[str]().union(*(renewal.lost for renewal in renewals))
        self._let_go(*(job for job in held if job.job_id in lost))
        return Renewal(
            lost=lost,
            cancelled=frozenset[str]().union(*(renewal.cancelled for renewal in renewals)),
            expired=frozenset[str]().union(*(renewal.expired for renewal in renewals)),
            stale=frozenset[str]().union(*(renewal.stale for renewal in renewals)),
        )

    async def finish(self, batch: Sequence[Finished]) -> list[Outcome]:
        """
        Publish results, each exactly once over all workers; outcomes in order.

        "done": published. "duplicate": it had ended already, by this call repeated or by a
        cancel. "fenced": another worker's now. "gone": the queue does not know it any more.
        In all four cases the job is no longer this worker's.
        """
        outcomes = await self._run_many(
            calls.finish(self.keys, self.worker_id, part, [end.record() for end in part]) for part in in_chunks(batch)
        )
        self._let_go(*(end.delivery for end in batch))
        self._finished.extend((end.delivery.stream, end.delivery.entry_id) for end in batch)
        return [outcome for part in outcomes for outcome in part]

    async def retry(
        self, delivery: Delivery, *, delay_ms: int, why: str, fault: str = "engine", counts: bool = True
    ) -> Outcome:
        """
        Put a job off after a fault that may pass; any worker takes it then, by the server's clock.

        A job that was cancelled, or whose deadline has passed, ends here instead.

        Args:
            fault: What kind it is, one word; the next delivery tells how often in a row it was that.
            counts: As an attempt.
        """
        call = calls.retry(self.keys, self.worker_id, delivery, delay_ms=delay_ms, why=why, fault=fault, counts=counts)
        outcome = await self._run(call)
        self._let_go(delivery)
        return outcome

    async def bury(self, delivery: Delivery, *, why: DeathCause, message: str) -> Outcome:
        """
        Give a job up: it ends as failed, once, and stays among the dead letters with its payload.

        Args:
            message: Why, for whoever submitted the job and for the operator.
        """
        call = calls.bury(self.keys, self.worker_id, delivery, why=why, message=message)
        outcome = await self._run(call)
        self._let_go(delivery)
        self._finished.append((delivery.stream, delivery.entry_id))
        return outcome

    async def release(self, deliveries: Sequence[Delivery]) -> int:
        """
        Hand jobs back at once, before all that wait in their lanes; the attempt does not count.

        Returns:
            How many were still this worker's.
        """
        released = await self._run_many(
            calls.release(self.keys, self.worker_id, part) for part in in_chunks(deliveries)
        )
        self._let_go(*deliveries)
        return sum(released)

    async def sweep(self, limit: int = 256) -> SweepReport:
        """
        Take back what dead workers held, promote what is due, end what waited too long or is of a
        cancelled batch, tidy up.

        Nothing is taken back within a lease of a time when the server was out of reach: its
        downtime is not held against the workers.

        Args:
            limit: Most jobs of each kind; what is left waits for the next sweep.
        """
        # short: when the sweeper dies, a peer goes on well within a lease
        hold_ms = max(1, self.lease_ms // 16)
        seen_ms = await self._run(calls.lock(self.keys, self.worker_id, hold_ms=hold_ms))
        if not seen_ms:
            return SweepReport(swept=False)
        reclaimed = await self._reclaim(limit, seen_ms) if self._contact.steady else 0
        promoted, expired = await self._run_many(
            [calls.promote(self.keys, limit=limit), calls.expire(self.keys, limit=limit)]
        )
        cancelled, cancelling = await self._run(batches.cancel_more(self.keys, limit=limit))
        self._cursor, collected = await self._run(
            calls.collect(self.keys, cursor=self._cursor, limit=TIDY, lease_ms=self.lease_ms)
        )
        return SweepReport(True, reclaimed, promoted, expired, cancelled, cancelling, collected)

    async def _reclaim(self, limit: int, seen_ms: int) -> int:
        """All streams with entries in workers' hands, some in each script."""
        cursor, reclaimed = "0", 0
        while reclaimed < limit:
            left = limit - reclaimed
            call = calls.reclaim(self.keys, lease_ms=self.lease_ms, limit=left, cursor=cursor, seen_ms=seen_ms)
            cursor, taken = await self._run(call)
            reclaimed += taken
            if cursor == "0":
                break
        return reclaimed

    async def take_orphans(self, limit: int) -> list[str]:
        """
        URLs of payloads whose jobs ended without a worker; whoever takes them deletes the objects.

        They are given once: what is then not deleted is left to the store's lifecycle rule.
        """
        with translated():
            urls = await self._redis.execute_command("LPOP", self.keys.orphans, limit)
        return [url.decode() for url in urls or ()]

    async def take_hooks(self, limit: int, *, hold_ms: int) -> list[BatchStatus]:
        """
        Ended batches whose webhooks are due; one that is not settled within `hold_ms` is due again.
        """
        return await self._run(batches.take_hooks(self.keys, limit=limit, hold_ms=hold_ms))

    async def settle_hook(self, batch_id: str, delivery: HookDelivery) -> str:
        """
        Note how a webhook's delivery went; gives its state after that, empty where it was settled before.
        """
        return await self._run(batches.settle_hook(self.keys, batch_id, delivery))

    async def heartbeat(self, fields: Mapping[str, str | int | float]) -> bool:
        """
        Say that this worker lives, and how it is; a field "model" routes that model's jobs here.

        Returns:
            True where the server is not the one of the heartbeat before: it was restarted, or a
            replica took its place, and it may not know of the last moments.
        """
        beat = calls.heartbeat(self.keys, self.worker_id, lease_ms=self.lease_ms, version=self.version, fields=fields)
        before, self._run_id = self._run_id, await self._run(beat)
        self._replaced |= before not in ("", self._run_id)
        model = fields.get("model")
        if isinstance(model, str) and not await self._is_registered(model):
            await self.register_model(model)
        replaced, self._replaced = self._replaced, False
        return replaced

    def doubt(self) -> None:
        """
        Have the next pull hand back what the server calls this worker's and is not in its hands.

        For a server that forgot that jobs had ended. Those whose results it has got again are done.
        """
        self._finished.clear()
        self._in_doubt = True

    async def _is_registered(self, model: str) -> bool:
        if model not in self._registered:
            return False
        # asked each time, as a flushed server has forgotten it; a queue that took it over keeps it
        with translated():
            return bool(await self._models.execute_command("HEXISTS", MODELS, model))

    async def leave(self) -> None:
        """
        Say that this worker is gone: peers take back at the next sweep what it still holds.
        """
        await self._run(calls.leave(self.keys, self.worker_id))

    async def wait_for_work(self, timeout_s: float, lanes: Sequence[Lane] = LANES) -> Lane | None:
        """
        Return when something may be there to pull, and after `timeout_s` at the latest.

        A ring is heard by one worker: who hears it and has no room pulls all the same, which
        rings again.

        Returns:
            The lane whose bell rang, if one did.
        """
        # 0 would wait for ever
        wait_s = max(timeout_s, 0.01)
        with translated():
            try:
                bells = {self.keys.bell(lane).encode(): lane for lane in lanes}
                rang = await send_once(self._redis, "BLPOP", *bells, wait_s, timeout_s=wait_s + 5)
                return bells[rang[0]] if rang else None
            except RedisError as error:
                # a failover ends blocked commands; the caller pulls, and hears what is the matter
                if "UNBLOCKED" not in str(error):
                    raise
                return None

    async def publish_tokens(self, delivery: Delivery, deltas: Sequence[TokenDelta]) -> bool:
        """
        Add new text to the job's token stream; False where the job is another worker's now.
        """
        [published] = await self.publish_many([(delivery, deltas)])
        return published

    async def publish_many(self, texts: Iterable[tuple[Delivery, Sequence[TokenDelta]]]) -> list[bool]:
        """As `publish_tokens`, for several jobs in one go."""
        return await self._run_many(calls.publish(self.keys, self.worker_id, *text) for text in texts)

    async def _run(self, call: Call[T]) -> T:
        with self._contact.watched(call.script.name):
            return await run_async(self._redis, call)

    async def _run_many(self, calls_: Iterable[Call[Any]]) -> list[Any]:
        many = list(calls_)
        with self._contact.watched(many[0].script.name if many else ""):
            return await run_many_async(self._redis, many)

    def _let_go(self, *jobs: Delivery) -> None:
        self._held.difference_update((job.stream, job.entry_id) for job in jobs)


def _without(rooms: Sequence[Room], jobs: Iterable[Delivery], job_cap_tokens: int) -> list[Room]:
    """The rooms when these jobs are taken."""
    taken: dict[str, list[int]] = {lane: [0, 0] for lane in LANES}
    for job in jobs:
        sums = taken[job.lane]
        sums[0] += 1
        sums[1] += min(job.tokens, job_cap_tokens or job.tokens)
    # each lane has the jobs of those before it, and its own
    ahead = accumulate(taken.values(), lambda a, b: [a[0] + b[0], a[1] + b[1]])
    return [
        Room(room.max_jobs - jobs, room.max_tokens - tokens) for room, (jobs, tokens) in zip(rooms, ahead, strict=True)
    ]
