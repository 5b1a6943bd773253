"""What `pagemill status` prints: a queue at a glance, or one job."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from pagemill.async_client import AsyncClient
from pagemill.messages import JobStatus
from pagemill.survey import Survey, read_survey


def look(redis_url: str | None, queue: str | None) -> Survey:
    """The queue now, as exporters and the gateway's page read it."""

    async def read() -> Survey:
        async with AsyncClient(redis_url, queue=queue) as client:
            return await read_survey(client._redis, client._directory.own)

    return asyncio.run(read())


def overview(survey: Survey) -> dict[str, Any]:
    """All of it, for machines."""
    minutes = [asdict(minute) for minute in survey.minutes]
    more = {"oldest_age_s": survey.oldest_age_s, "workers": survey.workers, "minutes": minutes}
    return {**asdict(survey.stats), **more}


def overview_lines(survey: Survey) -> Iterator[str]:
    """Lanes, counters and workers, as text."""
    stats, workers = survey.stats, survey.workers
    yield from table(
        ("lane", "jobs waiting", "tokens waiting", "oldest, s"),
        [
            (lane, f"{stats.queued[lane]:,}", f"{stats.queued_tokens[lane]:,}", f"{survey.oldest_age_s[lane]:,.0f}")
            for lane in stats.queued
        ],
    )
    yield ""
    yield f"running {stats.running:,}, delayed {stats.delayed:,}, suspects {stats.suspects:,}, dead {stats.dead:,}"
    if stats.raw:
        yield f"raw entries that no worker has adopted yet: {stats.raw:,}"
    if stats.totals:
        yield "ever    " + ", ".join(f"{name} {value:,}" for name, value in sorted(stats.totals.items()))
    jobs, tokens = (sum(getattr(minute, name) for minute in survey.minutes) for name in ("jobs", "completion_tokens"))
    if jobs:
        yield f"last hour {jobs:,} jobs ended, with {tokens:,} generated tokens"
    yield ""
    if not workers:
        yield "no worker is alive: start one with `pagemill worker --model smollm2`"
        return
    yield from table(
        ("worker", "model", "state", "running", "waiting", "KV use", "tokens/s", "jobs done"),
        [_worker_row(name, fields) for name, fields in sorted(workers.items())],
    )


def job_lines(job: JobStatus) -> Iterator[str]:
    """One job, a field a line; what has not happened is left out."""
    yield f"state     {job.state}{', to be cancelled' if job.cancel_requested and not job.ended else ''}"
    yield f"queue     {job.queue}, lane {job.lane}, tenant {job.tenant}"
    if job.batch:
        yield f"batch     {job.batch}"
    yield f"tokens    {job.tokens:,} estimated"
    if job.prompt_tokens:
        used = f"{job.prompt_tokens:,} of the prompt, {job.completion_tokens:,} of the answer"
        yield f"took      {used}, {job.gpu_ms / 1000:,.1f} s of the engine"
    for name, millis in (
        ("accepted", job.accepted_ms),
        ("started", job.started_ms),
        ("ended", job.ended_ms),
        ("deadline", job.deadline_ms),
    ):
        if millis:
            yield f"{name:9} {instant(millis)}"
    if job.worker:
        yield f"worker    {job.worker}, attempt {job.attempt}"
    if job.reason:
        yield f"reason    {job.reason}"


def instant(millis: int) -> str:
    """A time of the server as text."""
    return datetime.fromtimestamp(millis / 1000, UTC).isoformat(timespec="milliseconds")


def _worker_row(name: str, fields: Mapping[str, str]) -> tuple[str, ...]:
    # a worker that still loads its model has said no more than its name
    usage = f"{float(fields['kv_usage']):.1%}" if "kv_usage" in fields else "-"
    state = fields.get("state", "starting")
    shown = ("running", "waiting", "tokens_per_s", "jobs_done")
    running, waiting, rate, done = (fields.get(key, "-") for key in shown)
    return name, fields.get("model", "-"), state, running, waiting, usage, rate, done


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns that are as wide as they need to be."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        # names to the left, figures to the right
        cells = [
            cell.ljust(width) if header[place] in _NAMES else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


_NAMES = frozenset(
    {"lane", "worker", "model", "state", "tenant", "entry", "why", "job", "given up", "message", "batch", "created"}
)
