"""What a status page may have seen, made up: figures of queues that nobody could fill in a test's time."""

from typing import Any

from pagemill.messages import BatchStatus, QueueStats
from pagemill.overview import LetterHead, Overview
from pagemill.schema import LANES
from pagemill.survey import NUM_MINUTES, Minute, Survey
from producers.gateway.status.board import FilesSight, QueueSight, Sight

NOW_MS = 1_795_989_600_000


def minutes(*jobs: int, seconds: float = 60.0) -> tuple[Minute, ...]:
    """An hour of which the last minutes ended so many jobs, of 100 prompt and 50 generated tokens each."""
    ended = (0,) * (NUM_MINUTES + 1 - len(jobs)) + jobs
    return tuple(
        Minute(
            NOW_MS - 60_000 * (NUM_MINUTES - place),
            seconds if place == NUM_MINUTES else 60.0,
            number,
            100 * number,
            50 * number,
        )
        for place, number in enumerate(ended)
    )


def worker(**fields: str) -> dict[str, str]:
    """The fields of a heartbeat."""
    said = {"seen": str(NOW_MS - 2000), "pid": "7", "host": "node-1", "model": "m", "state": "running"}
    said |= {"running": "12", "waiting": "3", "kv_usage": "0.725", "tokens_per_s": "1234.5", "jobs_done": "4321"}
    return said | fields


def survey(
    *,
    queued: tuple[int, int, int] = (0, 0, 0),
    running: int = 0,
    dead: int = 0,
    workers: dict[str, dict[str, str]] | None = None,
    minutes: tuple[Minute, ...] = minutes(),
    **stats: Any,
) -> Survey:
    counters = {"delayed": 0, "suspects": 0, "raw": 0, "totals": {}} | stats
    return Survey(
        stats=QueueStats(
            queued=dict(zip(LANES, queued, strict=True)),
            queued_tokens={lane: 100 * number for lane, number in zip(LANES, queued, strict=True)},
            running=running,
            dead=dead,
            **counters,
        ),
        oldest_age_s={lane: 65.0 if number else 0.0 for lane, number in zip(LANES, queued, strict=True)},
        deadline_s=None,
        due=(),
        drain_tokens_per_s=0.0,
        retried={},
        cancelled_waiting=0,
        tenant_tokens={},
        workers=workers or {},
        server={},
        now_ms=NOW_MS,
        minutes=minutes,
    )


def batch(batch_id: str = "b", *, total: int = 10, done: int = 0, **fields: Any) -> BatchStatus:
    said = dict.fromkeys(("failed", "cancelled", "expired", "prompt_tokens", "completion_tokens", "gpu_ms"), 0)
    said |= dict.fromkeys(("sealed_ms", "ended_ms", "webhook_tries"), 0)
    more = dict.fromkeys(("webhook", "webhook_state", "webhook_reason"), "")
    made: dict[str, Any] = {
        "queue": "q",
        "tenant": "default",
        "state": "sealed",
        "created_ms": NOW_MS - 60_000,
        "cancel_requested": False,
        "metadata": {},
    }
    return BatchStatus(batch_id=batch_id, total=total, done=done, **(said | more | made | fields))


def letter(job_id: str = "job", **fields: Any) -> LetterHead:
    said = {"entry_id": "1-0", "why": "retries", "message": "all went wrong", "at_ms": NOW_MS - 90_000}
    said |= {"worker": "w", "lane": "bulk", "tenant": "default", "batch": "", "attempt": 3}
    return LetterHead(job_id=job_id, **(said | fields))


def queue(
    name: str = "q",
    seen: Survey | None = None,
    *,
    batches: tuple[BatchStatus, ...] = (),
    num_batches: int | None = None,
    letters: tuple[LetterHead, ...] = (),
    **fields: Any,
) -> QueueSight:
    number = len(batches) if num_batches is None else num_batches
    return QueueSight(name, overview=Overview(seen or survey(), batches, number, letters), **fields)


def sight(*queues: QueueSight, files: FilesSight | None = None, age_s: float | None = 0.0, error: str = "") -> Sight:
    return Sight(queues or (queue(),), files or FilesSight(), NOW_MS / 1000, age_s, error)
