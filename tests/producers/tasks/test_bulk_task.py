"""The task of bulk jobs: one run at a time, which goes on where its worker dies."""

import datetime
import sys
from types import ModuleType
from typing import Any

import pytest
from redis import Redis

from pagemill.keys import QueueKeys
from producers.tasks.bulk import RunsElsewhere, alone, run_bulk
from producers.tasks.failures import TaskFailure
from tests.support.servers import wait_for


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, datetime.date]]:
    """Stands in for producers/bulk, which has tests of its own; notes what is run."""
    noted: list[tuple[str, datetime.date]] = []

    def run_for_date(name: str, date: datetime.date) -> dict[str, Any]:
        noted.append((name, date))
        return {"rows": 3}

    module = ModuleType("producers.bulk.schedule")
    module.run_for_date = run_for_date  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "producers.bulk.schedule", module)
    return noted


def test_a_bulk_job_runs_for_its_date(
    server_url: str, redis: Redis, queue: str, runs: list[tuple[str, datetime.date]]
) -> None:
    """
    The task gives bulk's report, and holds nothing afterwards.
    """
    report = run_bulk(server_url, queue, "news", "2026-11-30")

    assert ({"rows": 3}, [("news", datetime.date(2026, 11, 30))]) == (report, runs)
    assert not redis.exists(QueueKeys(queue).bulk_run("news", "2026-11-30"))


@pytest.mark.parametrize("date", ["tomorrow", "2026-13-01", "", None, 7])
def test_a_date_is_a_date(server_url: str, queue: str, runs: list[Any], date: Any) -> None:
    """
    A wrong one fails at once.
    """
    with pytest.raises(TaskFailure, match="want one like"):
        run_bulk(server_url, queue, "news", date)

    assert [] == runs


@pytest.mark.usefixtures("runs")
def test_a_second_message_waits_for_the_first_run(server_url: str, redis: Redis, queue: str) -> None:
    """
    A broker gives a message that runs for hours to another worker too: that one does not run beside the first.
    """
    with alone(redis, QueueKeys(queue).bulk_run("news", "2026-11-30")):
        with pytest.raises(RunsElsewhere):
            run_bulk(server_url, queue, "news", "2026-11-30")
        assert {"rows": 3} == run_bulk(server_url, queue, "news", "2026-12-01")

    assert {"rows": 3} == run_bulk(server_url, queue, "news", "2026-11-30")


def test_a_long_run_keeps_others_away(redis: Redis, queue: str) -> None:
    """
    As long as it lives it says so, beyond the first lease.
    """
    key = QueueKeys(queue).bulk_run("news", "2026-11-30")
    with alone(redis, key, lease_s=0.3):
        left = redis.pttl(key)

        def grows() -> bool:
            nonlocal left
            before, left = left, redis.pttl(key)
            return left > before

        for _ in range(3):
            wait_for(grows)

    assert not redis.exists(key)


def test_a_dead_run_is_taken_up(server_url: str, redis: Redis, queue: str, runs: list[Any]) -> None:
    """
    What it held goes by itself.
    """
    redis.set(QueueKeys(queue).bulk_run("news", "2026-11-30"), "of a dead worker", px=50)

    def runs_now() -> bool:
        try:
            return run_bulk(server_url, queue, "news", "2026-11-30") == {"rows": 3}
        except RunsElsewhere:
            return False

    wait_for(runs_now)
    assert 1 == len(runs)
