"""What a worker counts of its jobs, its pulls and its servers."""

from pathlib import Path

import pytest

from pagemill.client import Client
from pagemill.errors import ObjectNotFound, ObjectStoreError, StoreAway
from pagemill.messages import Room
from pagemill.object_store import FileStore
from pagemill.schema import Completion, Failure, Result
from tests.support.clock import Clock
from tests.support.deliveries import delivery
from tests.support.servers import a_job, wait_for
from tests.support.services import RunningService
from worker.fake_engine import FakeEngine
from worker.measured_store import MeasuredStore
from worker.metrics import WorkerMetrics

STARTED_MS = 1_796_000_000_000


def value(metrics: WorkerMetrics, name: str, **labels: str) -> float | None:
    """A sample's value; None where there is none."""
    return metrics.registry.get_sample_value(name, labels)


def test_waiting_is_counted_once_a_job() -> None:
    """
    When a worker takes it for the first time: not when it came back, by whatever way.
    """
    metrics = WorkerMetrics(clock=Clock())
    first = {"accepted_ms": STARTED_MS - 1500, "started_ms": STARTED_MS, "lane": "bulk", "stream": "q:s:bulk:acme"}
    metrics.pulled(
        [
            delivery(**first),
            delivery(**first, attempt=2),
            delivery(**first, lapses=1),
            delivery(**first, num_faults=1),
            delivery(**(first | {"stream": "q:s:bulk:!returned"})),
        ]
    )

    assert 1 == value(metrics, "pagemill_job_wait_seconds_count", lane="bulk")
    assert 1.5 == value(metrics, "pagemill_job_wait_seconds_sum", lane="bulk")
    assert 5 == value(metrics, "pagemill_pull_claimed_total", lane="bulk")


def result(**fields: object) -> Result:
    answer = Completion(index=0, text="a", finish_reason="length")
    return Result(job_id="job", **{"status": "done", "completions": (answer,), **fields})


@pytest.mark.parametrize(
    ("ended", "labels"),
    [
        (result(), ("done", "length")),
        (result(status="cancelled"), ("cancelled", "cancelled")),
        (
            result(status="failed", completions=(), failure=Failure(code="empty_prompt", message="")),
            ("failed", "empty_prompt"),
        ),
        (
            result(status="expired", failure=Failure(code="deadline_passed", message="")),
            ("expired", "deadline_passed"),
        ),
        (None, ("failed", "dead_letter")),
    ],
)
def test_an_end_is_counted_by_outcome_and_reason(ended: Result | None, labels: tuple[str, str]) -> None:
    """
    With how long it ran here, and how long it was in the queue and here by the server's clock.
    """
    clock = Clock(50.0)
    metrics = WorkerMetrics(clock=clock)
    job = delivery(accepted_ms=STARTED_MS - 2000, started_ms=STARTED_MS, deadline_ms=STARTED_MS + 10_000)
    metrics.pulled([job])
    clock.now += 3.0

    metrics.settled(job, 50.0, "done", ended)

    outcome, reason = labels
    assert 1 == value(metrics, "pagemill_jobs_total", lane="standard", outcome=outcome, reason=reason)
    assert 3.0 == value(metrics, "pagemill_job_run_seconds_sum", lane="standard")
    assert value(metrics, "pagemill_job_e2e_seconds_sum", lane="standard") == pytest.approx(5.0)
    # 7 s were left
    assert 0 == value(metrics, "pagemill_deadline_slack_seconds_bucket", lane="standard", le="5.0")
    assert 1 == value(metrics, "pagemill_deadline_slack_seconds_bucket", lane="standard", le="15.0")


def test_what_was_not_published_is_no_job_of_ours() -> None:
    """
    A result that was refused is counted by why, and nowhere else.
    """
    metrics = WorkerMetrics(clock=Clock())

    metrics.settled(delivery(), 0.0, "fenced", result())

    assert 1 == value(metrics, "pagemill_results_dropped_total", why="fenced")
    assert 0 == value(metrics, "pagemill_job_run_seconds_count", lane="standard")


def test_a_deadline_that_has_passed_is_below_zero() -> None:
    """
    Its slack is in the buckets below 0.
    """
    clock = Clock()
    metrics = WorkerMetrics(clock=clock)
    job = delivery(accepted_ms=STARTED_MS, started_ms=STARTED_MS, deadline_ms=STARTED_MS + 1000)
    metrics.pulled([job])
    clock.now += 6.0

    metrics.settled(job, 0.0, "done", result())

    assert 1 == value(metrics, "pagemill_deadline_slack_seconds_bucket", lane="standard", le="0.0")
    assert 0 == value(metrics, "pagemill_deadline_slack_seconds_bucket", lane="standard", le="-10.0")


def test_the_room_of_the_next_pull_is_shown() -> None:
    """
    By lane, in jobs and tokens.
    """
    metrics = WorkerMetrics(clock=Clock())

    metrics.asked([Room(3, 300), Room(2, 200), Room(0, 0)])

    assert (3, 200, 0) == (
        value(metrics, "pagemill_pull_budget_jobs", lane="interactive"),
        value(metrics, "pagemill_pull_budget_tokens", lane="standard"),
        value(metrics, "pagemill_pull_budget_tokens", lane="bulk"),
    )


class BrokenStore(FileStore):
    """Fails as it is told to."""

    error: Exception | None = None

    def get_range(self, url: str, start: int, length: int, etag: str | None = None) -> bytes:
        if self.error is not None:
            raise self.error
        return super().get_range(url, start, length, etag)


def test_a_store_is_measured(tmp_path: Path) -> None:
    """
    Calls and bytes both ways; failures by what kind they are; all else is the store's.
    """
    metrics = WorkerMetrics(clock=Clock())
    inner = BrokenStore(tmp_path)
    store = MeasuredStore(inner, metrics)

    url = store.put("a", b"12345")
    assert b"234" == store.get_range(url, 1, 3)
    assert b"12345" == store.get(url)
    assert store.exists(url)
    for error in (StoreAway("away"), ObjectNotFound("gone"), ObjectStoreError("no")):
        inner.error = error
        with pytest.raises(type(error)):
            store.get_range(url, 0, 1)
    store.delete(url)

    assert not store.exists(url)
    assert (5, 8) == tuple(value(metrics, "pagemill_store_bytes_total", direction=way) for way in ("out", "in"))
    assert (1, 1, 1) == tuple(
        value(metrics, "pagemill_store_errors_total", op="get_range", error=kind)
        for kind in ("away", "missing", "refused")
    )
    assert 4 == value(metrics, "pagemill_store_op_seconds_count", op="get_range")
    assert 1 == value(metrics, "pagemill_store_op_seconds_count", op="delete")


def test_a_service_counts_what_it_does(server_url: str, queue: str, client: Client) -> None:
    """
    Jobs by how they ended, calls of scripts by name, and why pulls bring nothing once all is done.
    """
    with RunningService(server_url, queue) as running:
        jobs = client.submit_many([a_job(f"{number}", lane="bulk") for number in range(20)])
        client.submit(a_job("x" * 9000))
        for job in jobs:
            client.result(job.job_id, wait_s=20)
        done = {"lane": "bulk", "outcome": "done", "reason": "length"}
        wait_for(lambda: value(running.metrics, "pagemill_jobs_total", **done) == 20)
        failed = {"lane": "standard", "outcome": "failed", "reason": "prompt_too_long"}
        wait_for(lambda: value(running.metrics, "pagemill_jobs_total", **failed) == 1)
        wait_for(lambda: value(running.metrics, "pagemill_pull_empty_total", why="no_jobs"))

    metrics = running.metrics
    assert 20 == value(metrics, "pagemill_pull_claimed_total", lane="bulk")
    assert 20 == value(metrics, "pagemill_job_wait_seconds_count", lane="bulk")
    assert 20 == value(metrics, "pagemill_job_e2e_seconds_count", lane="bulk")
    assert {"pull", "finish", "heartbeat"} <= {
        sample.labels["op"]
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "pagemill_redis_op_seconds_count" and sample.value
    }
    assert 1 == value(metrics, "pagemill_pull_empty_total", why="draining")
    assert 0 == value(metrics, "pagemill_redis_errors_total", op="pull")


def test_a_full_engine_is_why_nothing_is_pulled(server_url: str, queue: str, client: Client) -> None:
    """
    While jobs wait that have no room, pulls that bring nothing are counted as that.
    """
    engine = FakeEngine(tokens_per_s=50.0, max_num_seqs=1)
    with RunningService(server_url, queue, engine=engine, drain_s=0.0) as running:
        client.submit_many([a_job(f"{number}", max_tokens=200) for number in range(30)])
        wait_for(lambda: value(running.metrics, "pagemill_pull_empty_total", why="no_blocks"))
        claimed = value(running.metrics, "pagemill_pull_claimed_total", lane="standard")

    assert claimed is not None
    assert 0 < claimed < 30
