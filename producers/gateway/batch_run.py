"""
One batch from its input file to its output and error files; blocking, on a thread of its own.

The order of things makes it safe to be killed anywhere. Lines are read in parts that are the same each
time; of each part the answers are written as an object, it is noted, and only then are its jobs
forgotten in the queue. Job ids are made of the batch and the line, so that whoever goes on finds what
was submitted. The files come last, out of the parts.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from math import inf
from typing import Any, Literal, NamedTuple

from pagemill.client import Client
from pagemill.errors import ObjectNotFound, PagemillError, UnknownModel
from pagemill.ids import uuid7
from pagemill.object_store import ObjectStore
from pagemill.schema import Job, Result
from producers.bulk.lines import LineSplitter, LongLine
from producers.bulk.rows import Document, RowFault
from producers.bulk.runner import Runner
from producers.bulk.windows import windows
from producers.bulk.work import Limits, Work
from producers.gateway.file_objects import PIECE_BYTES, file_body, object_name
from producers.gateway.records import Records
from producers.openai_api.batch_lines import BadLine, Endpoint, error_line, output_line, read_line
from producers.openai_api.errors import ApiError, bad_request
from producers.openai_api.jobs import Terms

ENDED = frozenset({"failed", "completed", "expired", "cancelled"})

MAX_REQUESTS = 50_000
MAX_LINE_BYTES = 4 * 1024 * 1024

# lines of a part, and their bytes
PART_LINES = 256
PART_BYTES = 4 * 1024 * 1024

# the record is written again while it counts
REPORT_S = 0.5

# results must be there when a run goes on that was interrupted
RESULT_TTL_S = 7 * 86400


class Row(NamedTuple):
    """One line for the output or the error file."""

    line: bytes
    is_good: bool


@dataclass(slots=True)
class Part:
    """Lines that are answered and written together, each with its number in the file."""

    index: int
    lines: list[tuple[int, bytes | LongLine]] = field(default_factory=list)
    size: int = 0


class BatchFailed(Exception):
    """Raised for a batch that cannot run at all."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Place:
    """
    Where a batch lives.

    Args:
        max_model_len: Asks for the context of a model; raises UnknownModel.
        ttl_s: How long its files are known.
    """

    client: Client
    store: ObjectStore
    records: Records
    tenant: str
    max_model_len: Callable[[str], int | None]
    ttl_s: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What the first reading found: how many lines, which model, and where each custom_id came first."""

    total: int
    model: str
    first: dict[bytes, int]


Cut = Literal["cancelled", "expired"]


class BatchTask:
    """
    Makes each line's jobs, and of their results its line.

    Args:
        cut: Why what has no answer has none, where the batch was cut short.
    """

    def __init__(
        self, batch: str, endpoint: Endpoint, facts: Facts, terms: Terms, cut: Callable[[], Cut | None]
    ) -> None:
        self._batch, self._endpoint, self._facts, self._terms, self._cut = batch, endpoint, facts, terms, cut

    def work(self, document: Document) -> Work[Row]:
        name, custom_id = f"{self._batch}-{document.row}", ""
        try:
            request = read_line(document.text.encode(errors="surrogateescape"), self._endpoint)
            custom_id = request.custom_id
            if self._facts.first.get(_hash(custom_id)) != document.row:
                raise bad_request("the custom_id was used before in this file", "custom_id", "duplicate_custom_id")
            if request.request.model != self._facts.model:
                message = f"the model is {request.request.model!r}: the file's first request has {self._facts.model!r}"
                raise bad_request(message, "body.model", "mismatched_model")
            jobs = [self._named(job, document.row, place) for place, job in enumerate(request.jobs(self._terms))]
        except BadLine as error:
            return Row(error_line(error.custom_id, name, error), False)
        except ApiError as error:
            return Row(error_line(custom_id, name, error), False)
        results = yield jobs
        return Row(*output_line(request, [self._ended(result) for result in results]))

    def fault(self, fault: RowFault) -> Row:
        error = bad_request(fault.message, code=fault.code)
        return Row(error_line("", f"{self._batch}-{fault.row}", error), False)

    def _named(self, job: Job, row: int, place: int) -> Job:
        text = f"{self._batch}\0{row}\0{place}\0".encode() + job.body()
        return job.model_copy(update={"id": f"batch-{blake2b(text, digest_size=16).hexdigest()}"})

    def _ended(self, result: Result) -> Result:
        # the runner ends what waits with it as expired, and the queue what it has as cancelled
        cut = self._cut()
        if cut is not None and result.status in ("cancelled", "expired"):
            return result.model_copy(update={"status": cut, "failure": None})
        return result


class BatchRun:
    """
    Runs one batch until it has ended, or until `stop`.

    Args:
        body: OpenAI's object of the batch; written to the records as it changes.
    """

    def __init__(self, place: Place, body: dict[str, Any]) -> None:
        self._place = place
        self._body = body
        self._queue_batch = f"gateway-{body['id']}"
        self._runner: Runner[Part, Row] | None = None
        self._stopped = False
        # why the rest is not answered
        self._cut: Cut | None = None
        self._model = ""
        self._check: Callable[[], object] = lambda: None
        self._report_at = 0.0
        self._counts = {"total": 0, "completed": 0, "failed": 0}

    def stop(self) -> None:
        """Go on another time; for another thread."""
        self._stopped = True
        if self._runner is not None:
            self._runner.stop()

    def run(self, check: Callable[[], object] = lambda: None) -> None:
        """
        Args:
            check: Called now and then; what it raises ends the run, as where another process took it over.

        Raises:
            PagemillError: the queue or the store is away for long; running it again goes on.
        """
        self._check = check
        try:
            self._run()
        except BatchFailed as error:
            faults = [{"code": error.code, "message": str(error), "param": None, "line": None}]
            self._set(status="failed", failed_at=_now(), errors={"object": "list", "data": faults})
            self._place.records.close_batch(self._place.tenant, self._body["id"])

    def _run(self) -> None:
        facts = self._validate()
        self._model, self._counts["total"] = facts.model, facts.total
        self._add_up()
        if self._body["status"] == "validating":
            self._set(status="in_progress", in_progress_at=_now())
        self._heed_cancel()
        self._answer(facts)
        if not self._stopped:
            self._finish()

    def _validate(self) -> Facts:
        total, model = 0, ""
        first: dict[bytes, int] = {}
        for number, line in self._lines():
            total += 1
            if total > MAX_REQUESTS:
                raise BatchFailed("too_many_requests", f"the file has more than {MAX_REQUESTS:,} requests")
            if isinstance(line, LongLine):
                continue
            try:
                request = read_line(line, self._body["endpoint"])
            except BadLine as error:
                if error.custom_id:
                    first.setdefault(_hash(error.custom_id), number)
                continue
            model = model or request.request.model
            first.setdefault(_hash(request.custom_id), number)
        if not model:
            raise BatchFailed("invalid_file", f"none of the file's {total:,} lines is a request of the endpoint")
        return Facts(total, model, first)

    def _answer(self, facts: Facts) -> None:
        place = self._place
        try:
            context = place.max_model_len(facts.model)
            self._open()
        except UnknownModel as error:
            raise BatchFailed("model_not_found", str(error)) from None
        terms = Terms(
            tenant=place.tenant,
            lane="bulk",
            max_model_len=context,
            result_ttl_s=RESULT_TTL_S,
            batch=self._queue_batch,
        )
        done = place.records.parts(self._body["id"])
        self._runner = Runner(
            place.client,
            BatchTask(self._body["id"], self._body["endpoint"], facts, terms, lambda: self._cut),
            _items,
            self._write,
            model=facts.model,
            limits=Limits(deadline=self._body["expires_at"]),
            reopen=self._open,
            end_late=self._end_late,
            on_turn=lambda _: self._look(),
            # a batch that is cancelled is one whose time is over at once
            clock=lambda: inf if self._cut == "cancelled" else time.time(),
        )
        if not self._stopped:
            self._runner.run(part for part in self._parts() if part.index not in done)

    def _open(self) -> None:
        self._place.client.create_batch(self._queue_batch, tenant=self._place.tenant, model=self._model)

    def _end_late(self) -> None:
        self._cut = self._cut or "expired"
        self._place.client.cancel_batch(self._queue_batch)

    def _look(self) -> None:
        if time.monotonic() < self._report_at:
            return
        self._report_at = time.monotonic() + REPORT_S
        self._check()
        self._heed_cancel()
        self._add_up()

    def _heed_cancel(self) -> None:
        name = self._body["id"]
        if self._cut is None and self._place.records.has("batch", self._place.tenant, name, "cancel"):
            self._cut = "cancelled"
            self._set(status="cancelling", cancelling_at=self._body["cancelling_at"] or _now())

    def _add_up(self) -> None:
        parts = self._place.records.parts(self._body["id"]).values()
        self._counts.update(completed=sum(good for good, _ in parts), failed=sum(bad for _, bad in parts))
        if self._counts != self._body["request_counts"]:
            self._set(request_counts=dict(self._counts))

    def _write(self, part: Part, rows: list[Row]) -> None:
        for kind, is_good in (("output", True), ("error", False)):
            data = b"".join(row.line for row in rows if row.is_good is is_good)
            if data:
                self._place.store.put(self._part_name(kind, part.index), data)
        good = sum(row.is_good for row in rows)
        self._place.records.note_part(self._body["id"], part.index, good, len(rows) - good)

    def _finish(self) -> None:
        place, name = self._place, self._body["id"]
        self._add_up()
        if self._cut is None:
            self._set(status="finalizing", finalizing_at=_now())
        parts = sorted(place.records.parts(name).items())
        output = self._join("output", [index for index, (good, _) in parts if good])
        errors = self._join("error", [index for index, (_, bad) in parts if bad])
        word = self._cut or "completed"
        self._set(status=word, output_file_id=output, error_file_id=errors, **{f"{word}_at": _now()})
        place.records.close_batch(place.tenant, name)
        # all that follows is tidying up
        with suppress(PagemillError):
            place.client.seal_batch(self._queue_batch)
        with suppress(PagemillError):
            for kind in ("output", "error"):
                for index, _ in parts:
                    place.store.delete(place.store.url(self._part_name(kind, index)))

    def _join(self, kind: str, indices: list[int]) -> str | None:
        """One file out of the parts; None where there is no line."""
        if not indices:
            return None
        store, size = self._place.store, 0
        name = f"file-{uuid7()}"
        with store.open_writer(object_name(self._place.tenant, name)) as writer:
            for index in indices:
                url, start = store.url(self._part_name(kind, index)), 0
                while piece := store.get_range(url, start, PIECE_BYTES):
                    size += writer.write(piece)
                    start += len(piece)
        filename = f"{self._body['id']}_{kind}.jsonl"
        body = file_body(name, size, filename, "batch_output", self._place.ttl_s)
        self._place.records.add("file", self._place.tenant, body)
        return name

    def _part_name(self, kind: str, index: int) -> str:
        return f"batches/{self._body['id']}/{kind}-{index:06d}.jsonl"

    def _set(self, **fields: Any) -> None:
        self._body.update(fields)
        self._place.records.write("batch", self._place.tenant, self._body)

    def _parts(self) -> Iterator[Part]:
        part = Part(0)
        for number, line in self._lines():
            if part.lines and (len(part.lines) >= PART_LINES or part.size + len(line) > PART_BYTES):
                yield part
                part = Part(part.index + 1)
            part.lines.append((number, line))
            part.size += 0 if isinstance(line, LongLine) else len(line)
        if part.lines:
            yield part

    def _lines(self) -> Iterator[tuple[int, bytes | LongLine]]:
        """The lines of the input that are not blank, each with its number from 1."""
        store = self._place.store
        url = store.url(object_name(self._place.tenant, self._body["input_file_id"]))
        try:
            found = store.stat(url)
        except ObjectNotFound:
            raise BatchFailed("invalid_file", "the input file is not there any more") from None
        splitter, number = LineSplitter(MAX_LINE_BYTES), 0
        for lines in _chain(splitter, windows(store, url, found.etag, 0, found.size)):
            for line in lines:
                number += 1
                if isinstance(line, LongLine) or line.strip():
                    yield number, line


def _chain(splitter: LineSplitter, data: Iterable[bytes]) -> Iterator[list[bytes | LongLine]]:
    for window in data:
        yield splitter.feed(window)
    yield splitter.finish()


def _items(part: Part) -> Iterator[Document | RowFault]:
    for number, line in part.lines:
        if isinstance(line, LongLine):
            message = f"line {number:,} has {len(line):,} bytes: want no more than {MAX_LINE_BYTES:,}"
            yield RowFault(number, None, "line_too_long", message)
        else:
            yield Document(number, "", line.decode(errors="surrogateescape"))


def _hash(custom_id: str) -> bytes:
    return blake2b(custom_id.encode(errors="surrogatepass"), digest_size=8).digest()


def _now() -> int:
    return int(time.time())
