"""A job that is to end at a time ends then, whatever there is to do its jobs."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from redis import Redis

from pagemill.bulk_client import BulkClient
from producers.bulk.jobs import Hooks, run_job
from producers.bulk.work import Counts
from tests.producers.bulk.conftest import MakeSpec
from tests.support.bulk_runs import output_rows, write_documents


def test_what_waits_at_the_deadline_ends_for_that_reason(
    tmp_path: Path, make_spec: MakeSpec, client: BulkClient
) -> None:
    """
    However many jobs wait, none is left in the queue, and each row says that the time was over.
    """
    write_documents(tmp_path / "documents.jsonl", 1500)

    # nobody serves the queue
    summary = run_job(make_spec(deadline=datetime.now(UTC) + timedelta(seconds=1.5)), client)

    assert (1500, {"deadline_passed": 1500}) == (summary.num_failed, summary.errors)
    assert 0 == sum(client.stats().queued.values())
    assert {"expired"} == {row.status for row in output_rows(summary.output)}


def test_a_batch_that_is_lost_before_the_deadline_is_no_error(
    tmp_path: Path, make_spec: MakeSpec, client: BulkClient, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A server that forgot all has nothing to end.
    """
    monkeypatch.setattr("producers.bulk.runner.GRACE_S", 0.0)
    write_documents(tmp_path / "documents.jsonl", 20)

    def turned(counts: Counts) -> None:
        if counts.in_flight == 20:
            redis.flushdb()

    spec = make_spec(deadline=datetime.now(UTC) + timedelta(seconds=1.0))
    summary = run_job(spec, client, Hooks(turned=turned))

    assert {"deadline_passed": 20} == summary.errors
