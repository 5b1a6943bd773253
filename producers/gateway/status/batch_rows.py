"""Rows of the table of batches: those of the queue, and those of the HTTP API."""

from collections.abc import Iterator
from dataclasses import dataclass

from pagemill.batches import time_left_s
from pagemill.messages import BatchStatus
from producers.batch_file.records import BatchRecord
from producers.gateway.status.board import Sight
from producers.gateway.status.figures import ago, count, duration, instant, percent

# of a batch of the HTTP API, before its pace says anything
LEAST_S = 10.0


@dataclass(frozen=True, slots=True)
class BatchRow:
    """
    Args:
        order: The smaller comes first: those that have not ended, then the newest.
        kind: "jobs" of the queue, "file" of the HTTP API.
        ended, total: For the bar; `share` of them in words.
        note: How its jobs ended, but for those that are done.
        left: How long it will take.
    """

    order: tuple[bool, int]
    name: str
    kind: str
    queue: str
    tenant: str
    state: str
    ended: int
    total: int
    share: str
    counts: str
    note: str
    left: str
    created: str
    age: str


def queue_rows(sight: Sight) -> Iterator[BatchRow]:
    """The batches of jobs, but for those that are the jobs of a batch of the HTTP API that has a row itself."""
    files = {record.id for _, record in sight.files.batches}
    for one in sight.queues:
        if one.overview is not None:
            for batch in one.overview.batches:
                if _file_of(batch.batch_id) not in files:
                    yield _of_jobs(batch, one.overview.survey.now_ms)


def _file_of(batch_id: str) -> str:
    """As producers/batch_file/work.py calls the batches of a file: file-<its id>-<number>."""
    return batch_id.removeprefix("file-").rpartition("-")[0]


def _of_jobs(batch: BatchStatus, now_ms: int) -> BatchRow:
    ended = batch.total - batch.num_open
    ends = ((batch.failed, "failed"), (batch.cancelled, "cancelled"), (batch.expired, "expired"))
    left_s = time_left_s(batch, now_ms)
    return BatchRow(
        order=(batch.ended, -batch.created_ms),
        name=batch.batch_id,
        kind="jobs",
        queue=batch.queue,
        tenant="" if batch.tenant == "default" else batch.tenant,
        state=batch.state,
        ended=ended,
        total=batch.total,
        share=_share(ended, batch.total, is_over=batch.ended),
        counts=f"{count(ended)} of {count(batch.total)}",
        note=", ".join(f"{count(number)} {word}" for number, word in ends if number),
        left="-" if batch.ended else _left(left_s, ended, batch.total),
        created=instant(batch.created_ms),
        age=ago(batch.created_ms, now_ms),
    )


def file_rows(sight: Sight) -> Iterator[BatchRow]:
    """The batches of the HTTP API that have not ended."""
    now_ms = round(sight.at_s * 1000)
    for tenant, batch in sight.files.batches:
        counts = batch.request_counts
        ended = counts.completed + counts.failed
        yield BatchRow(
            order=(False, -batch.created_at * 1000),
            name=batch.id,
            kind="file",
            queue="",
            tenant="" if tenant == "default" else tenant,
            state=batch.status.replace("_", " "),
            ended=ended,
            total=counts.total,
            share=_share(ended, counts.total, is_over=False),
            counts=f"{count(ended)} of {count(counts.total)}",
            note=f"{count(counts.failed)} failed" if counts.failed else "",
            left=_left(_file_left_s(batch, ended, sight.at_s), ended, counts.total),
            created=instant(batch.created_at * 1000),
            age=ago(batch.created_at * 1000, now_ms),
        )


def _file_left_s(batch: BatchRecord, ended: int, now_s: float) -> float | None:
    """If it goes on as it has gone since it began."""
    took_s = now_s - (batch.in_progress_at or now_s)
    if not ended or took_s < LEAST_S:
        return None
    return took_s * (batch.request_counts.total - ended) / ended


def _share(ended: int, total: int, *, is_over: bool) -> str:
    if is_over:
        return percent(1.0)
    # 999 of 1,000 are not all
    return percent(min(0.99, ended / total) if ended < total else float(total > 0))


def _left(left_s: float | None, ended: int, total: int) -> str:
    if not ended:
        return "not begun"
    if ended == total:
        # it is open for more, or its files are being written
        return "-"
    return "not known yet" if left_s is None else f"about {duration(left_s)}"
