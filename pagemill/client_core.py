"""What the two clients share: all but the sending and the waiting."""

import json
import os
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from math import inf
from typing import TypeVar

from pagemill.calls import Answer, Submission, in_chunks, submit
from pagemill.errors import (
    Busy,
    JobFailed,
    JobNotFound,
    ObjectStoreError,
    QueueUnavailable,
    ServerAway,
    UnknownModel,
    WaitTimeout,
)
from pagemill.keys import QueueKeys, idempotency_name
from pagemill.messages import Accepted, TokenDelta
from pagemill.object_store import ObjectStore, open_store
from pagemill.schema import Job, Result
from pagemill.scripts import Call
from pagemill.trace_context import TraceContext
from pagemill.versions import SCHEMA_VERSION

T = TypeVar("T")

# payloads above this go to the object store, where there is one
INLINE_BYTES = 64 * 1024

# how often a waiter looks without having been called: messages of a lost connection are lost
POLL_S = 2.0

# of many that share a connection, which knows when it was lost
SHARED_POLL_S = 10.0

# how long a wait that has begun goes on without its server, as in a restart or a failover
OUTAGE_S = 60.0

# jobs sent or looked at in one go
CHUNK = 256

# the table of models is read again after this
ROUTES_S = 30.0

# most tokens that one job is estimated at: the scripts add them up, and their sums must stay exact
MAX_ESTIMATE = 2**40

# jobs of other queues whose queue is remembered; the others are looked for
MAX_HOMES = 100_000


def prepare(job: Job, taker: int = SCHEMA_VERSION, trace: TraceContext | None = None) -> Submission:
    """
    Make a job ready for the wire, payload inline, for workers of version `taker`; in `trace`, if it says none.

    Raises:
        InvalidJob: it cannot be written, or no worker can serve it.
    """
    job.check(taker)
    body = job.body()
    seed = job.options.seed
    return Submission(
        job_id=job.id,
        fingerprint=blake2b(body, digest_size=16).hexdigest(),
        idempotency=idempotency_name(job.tenant, job.idempotency_key) if job.idempotency_key else "",
        payload=job.wrap(body, trace),
        ref="",
        lane=job.lane,
        tenant=job.tenant,
        tokens=min(job.estimated_tokens(), MAX_ESTIMATE),
        timeout_ms=max(1, round(job.timeout_s * 1000)) if job.timeout_s is not None else 0,
        result_ttl_s=job.result_ttl_s,
        stream=int(job.stream),
        seed=int.from_bytes(os.urandom(8)) >> 1 if seed is None else seed,
        metadata=job.model_dump_json(include={"metadata"})[len('{"metadata":') : -1] if job.metadata else "",
        batch=job.batch or "",
        version=job.version,
        reply_to=job.reply_to or "",
        reply_context=job.reply_context or "",
    )


Ready = tuple[QueueKeys, Submission]


def is_large(submission: Submission) -> bool:
    return len(submission.payload) > INLINE_BYTES


def offload(submission: Submission, store: ObjectStore, queue: str) -> Submission:
    """Put the payload into the store; blocking."""
    # a name for each try: another job with this id, or a try that is refused, must not touch
    # the object of the one that is accepted
    url = store.put(f"jobs/{queue}/{submission.job_id}-{os.urandom(8).hex()}.json", submission.payload)
    return submission._replace(payload=b"", ref=url)


def discard_unused(ready: Sequence[Ready], answers: Sequence[Answer], store: ObjectStore | None) -> None:
    """Delete the payloads that no accepted job refers to; blocking."""
    for (_, submission), answer in zip(ready, answers, strict=True):
        used = isinstance(answer, Accepted) and answer.payload_ref == submission.ref
        if store is not None and submission.ref and not used:
            # the answer counts; what stays is left to the store's lifecycle rule
            with suppress(ObjectStoreError):
                store.delete(submission.ref)


def in_doubt(error: QueueUnavailable, job_id: str) -> QueueUnavailable:
    """The error of a submit that may have arrived; names the job, which the client may have made."""
    message = f"{error}; job {job_id} may be in the queue: submit the same again with that id to be sure"
    return type(error)(message, job_id=job_id)


def submit_calls(ready: Sequence[Ready], max_queued_tokens: int) -> list[tuple[list[int], Call[list[Answer]]]]:
    """Calls for these jobs, a queue and a few dozen jobs each, and the places of their jobs in `ready`."""
    groups: dict[QueueKeys, list[int]] = {}
    for place, (keys, _) in enumerate(ready):
        groups.setdefault(keys, []).append(place)
    return [
        (places, submit(keys, [ready[place][1] for place in places], max_queued_tokens))
        for keys, all_places in groups.items()
        for places in in_chunks(all_places)
    ]


def in_order(places: Iterable[Sequence[int]], answers: Iterable[Sequence[Answer]]) -> list[Answer]:
    """The answers of several calls, by the places of their jobs."""
    by_place = {
        place: answer for part in zip(places, answers, strict=True) for place, answer in zip(*part, strict=True)
    }
    return [by_place[place] for place in range(len(by_place))]


def busy_places(answers: Sequence[Answer], patience: float) -> tuple[list[int], float]:
    """
    Which jobs to send again, and after how long; none where the time until `patience` is over.

    What the queue says is an estimate: the last try comes when patience ends. A little later than
    told, and not all producers at once.
    """
    refused = [(place, answer.retry_after_s) for place, answer in enumerate(answers) if isinstance(answer, Busy)]
    told_s = max((wait_s for _, wait_s in refused), default=0.0)
    pause_s = min(told_s * random.uniform(1.0, 1.25), patience - time.monotonic())
    return [place for place, _ in refused if pause_s > 0], pause_s


def accepted_or_raise(answers: Sequence[Answer]) -> list[Accepted]:
    """
    Raises:
        Busy, Conflict, BatchNotFound or BatchClosed: the first refusal.
    """
    done = []
    for answer in answers:
        if not isinstance(answer, Accepted):
            raise answer
        done.append(answer)
    return done


def store_of(place: str | ObjectStore | None) -> ObjectStore | None:
    return open_store(place) if isinstance(place, str) else place


def reference_in(record: bytes) -> str | None:
    """The URL in a result's record; None where the record is the result itself."""
    if not record.startswith(b'{"ref":'):
        return None
    return str(json.loads(record)["ref"])


def read_result(record: bytes, store: ObjectStore | None) -> Result:
    """
    The result behind a record; blocking where it is in the store.

    Raises:
        ObjectStoreError: it is there, and this client has no store or cannot read it.
    """
    url = reference_in(record)
    if url is None:
        return Result.model_validate_json(record)
    if store is None:
        raise ObjectStoreError(f"the result is at {url}: give the client that object_store")
    return Result.model_validate_json(store.get(url))


def answer_of(result: Result) -> str:
    """
    Raises:
        JobFailed: the job did not end as "done".
    """
    if result.status != "done":
        why = result.failure.message if result.failure else f"it was {result.status}"
        raise JobFailed(result, f"job {result.job_id} has no answer: {why}")
    return result.text


class Directory:
    """
    Which queue a job lives in: the client's own, or the one that serves its model.
    """

    def __init__(self, queue: str) -> None:
        self.own = QueueKeys(queue)
        self._queues = {queue: self.own}
        self._routes: dict[str, str] = {}
        self._read_at: float | None = None
        self._homes: dict[str, QueueKeys] = {}

    def stale(self, models: Iterable[str | None]) -> bool:
        """Whether the table of models is to be read before these jobs are routed."""
        wanted = {model for model in models if model is not None}
        if not wanted:
            return False
        return not wanted <= self._routes.keys() or self.out_of_date()

    def out_of_date(self) -> bool:
        return self._read_at is None or time.monotonic() - self._read_at > ROUTES_S

    def learn(self, table: Mapping[bytes, bytes]) -> None:
        self._routes = {model.decode(): queue.decode() for model, queue in table.items()}
        self._read_at = time.monotonic()
        for queue in self._routes.values():
            self._queues.setdefault(queue, QueueKeys(queue))

    def route(self, model: str | None) -> QueueKeys:
        """
        The queue that serves a model; the client's own for None.

        Raises:
            UnknownModel: no worker has registered it.
        """
        if model is None:
            return self.own
        queue = self._routes.get(model)
        if queue is None:
            known = ", ".join(sorted(self._routes)) or "none yet"
            raise UnknownModel(f"no worker serves the model {model!r}; registered: {known}")
        return self._queues[queue]

    def settle(self, name: str, home: QueueKeys) -> None:
        """Remember where a job, or what else has a name of its own, was put."""
        if home is not self.own:
            self._homes[name] = home
            # another thread may do the same; no lock, as one that is held during a fork stays so in the child
            with suppress(RuntimeError, StopIteration):
                while len(self._homes) > MAX_HOMES:
                    self._homes.pop(next(iter(self._homes)), None)

    def candidates(self, name: str) -> list[QueueKeys]:
        """Where it can be, likeliest first."""
        home = self._homes.get(name)
        return [home] if home else list(self._queues.values())

    def first(self, name: str, places: Sequence[QueueKeys], found: Sequence[int]) -> QueueKeys:
        """The first of the places where it was found, remembered; the likeliest where it was in none."""
        home = next((keys for keys, there in zip(places, found, strict=True) if there), places[0])
        self.settle(name, home)
        return home


class Deadline:
    """A time to wait, or none."""

    def __init__(self, wait_s: float | None, what: str) -> None:
        self._what = what
        self._wait_s = wait_s
        self.end = None if wait_s is None else time.monotonic() + wait_s

    def left_s(self, poll_s: float = POLL_S) -> float:
        """
        Seconds to wait before the next look, `poll_s` at most.

        Raises:
            WaitTimeout: there are none.
        """
        if self.end is None:
            return poll_s
        left = self.end - time.monotonic()
        if left <= 0:
            raise WaitTimeout(f"{self._what} after {self._wait_s:g} s; it goes on")
        return min(left, poll_s)


class Outage:
    """
    How long calls are repeated while the server is away.

    Args:
        end: A time of `time.monotonic` that none goes beyond.
        most_s: Seconds of one outage.
    """

    def __init__(self, end: float | None, *, most_s: float = OUTAGE_S) -> None:
        self._end = inf if end is None else end
        self._most_s = most_s
        self._began: float | None = None

    def over(self) -> None:
        """The server was there."""
        self._began = None

    def pause_s(self, error: ServerAway) -> float:
        """
        Seconds until the next try.

        Raises:
            ServerAway: this one, where there is no time left.
        """
        now = time.monotonic()
        if self._began is None:
            self._began = now
        left_s = min(self._end, self._began + self._most_s) - now
        if left_s <= 0:
            raise error
        return min(left_s, random.uniform(0.1, 0.5))


class TextCursor:
    """
    Follows a job's token stream and gives each character of each answer once.

    A worker that takes a job over starts at its checkpoint, so that text comes again; what was
    trimmed from the stream is missing. Both are told by the offsets.
    """

    def __init__(self, offsets: Mapping[int, int] | None = None) -> None:
        self.entry_id = "0-0"
        self.ended = False
        self._have = dict(offsets or {})
        self._tokens: dict[int, int] = {}

    def feed(self, entries: Sequence[tuple[bytes, Mapping[bytes, bytes]]]) -> Iterator[TokenDelta]:
        """New text in these entries; sets `ended` at the last one."""
        for entry_id, fields in entries:
            self.entry_id = entry_id.decode()
            if b"end" in fields:
                self.ended = True
                return
            index, offset, tokens = (int(fields[name]) for name in (b"i", b"o", b"n"))
            self._tokens[index] = tokens
            yield from self._advance(index, offset, fields[b"x"].decode(), tokens)

    def rest(self, result: Result) -> Iterator[TokenDelta]:
        """What the stream did not have of the answers."""
        for answer in result.completions:
            tokens = max(len(answer.token_ids), self._tokens.get(answer.index, 0))
            yield from self._advance(answer.index, 0, answer.text, tokens)

    def _advance(self, index: int, offset: int, text: str, tokens: int) -> Iterator[TokenDelta]:
        have = self._have.get(index, 0)
        if offset <= have < offset + len(text):
            self._have[index] = offset + len(text)
            yield TokenDelta(index, have, text[have - offset :], tokens)


@dataclass(slots=True)
class Awaited:
    """Jobs whose end is awaited, by the queue they are in; `job_ids` None awaits all."""

    keys: QueueKeys
    job_ids: set[str] | None
    entry_id: str = "$"
    # named by an event, and not yet looked at
    heard: dict[str, None] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        return self.job_ids is not None and not self.job_ids

    def hear(self, entries: Sequence[tuple[bytes, Mapping[bytes, bytes]]]) -> None:
        """Note the awaited jobs among these events."""
        for entry_id, fields in entries:
            self.entry_id = entry_id.decode()
            job_id = fields.get(b"j", b"").decode()
            # batches have events too
            if job_id:
                self.note(job_id)

    def note(self, job_id: str) -> None:
        """A job has ended: to be looked at, where it is awaited."""
        if self.job_ids is None or job_id in self.job_ids:
            self.heard[job_id] = None

    def taken(self, job_id: str) -> None:
        """Its result is there."""
        if self.job_ids is not None:
            self.job_ids.discard(job_id)
        self.heard.pop(job_id, None)


def by_server(servers: Sequence[T]) -> list[tuple[T, list[int]]]:
    """The servers, each once, and the places that it stands at."""
    groups: dict[int, tuple[T, list[int]]] = {}
    for place, server in enumerate(servers):
        groups.setdefault(id(server), (server, []))[1].append(place)
    return list(groups.values())


def not_found(job_id: str) -> JobNotFound:
    return JobNotFound(f"there is no job {job_id}, or its result has expired")
