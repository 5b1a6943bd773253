"""The task of bulk jobs."""

import datetime
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Retry

from pagemill.errors import PagemillError
from producers.tasks.bulk import RunsElsewhere, run_bulk
from producers.tasks.config import make_app
from producers.tasks.failures import TaskFailure
from producers.tasks.settings import CelerySettings
from producers.tasks.tasks import register
from tests.support.services import RunningService
from worker.fake_engine import FakeEngine


class Occupied(PagemillError):
    """As bulk says it."""


class Runs:
    """Stands in for producers/bulk, which has tests of its own: notes what is run."""

    def __init__(self) -> None:
        self.noted: list[tuple[str, datetime.date]] = []
        self.is_occupied = False

    def run_for_date(self, name: str, date: datetime.date) -> dict[str, Any]:
        if self.is_occupied:
            raise Occupied("s3://out is being worked on by process 7 on a-host")
        self.noted.append((name, date))
        return {"num_rows": 3}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    made = Runs()
    schedule, errors = ModuleType("producers.bulk.schedule"), ModuleType("producers.bulk.errors")
    schedule.run_for_date = made.run_for_date  # type: ignore[attr-defined]
    errors.Occupied = Occupied  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "producers.bulk.schedule", schedule)
    monkeypatch.setitem(sys.modules, "producers.bulk.errors", errors)
    return made


def test_a_bulk_job_runs_for_its_date(runs: Runs) -> None:
    """
    The task gives bulk's report.
    """
    assert {"num_rows": 3} == run_bulk("news", "2026-11-30")
    assert [("news", datetime.date(2026, 11, 30))] == runs.noted


@pytest.mark.parametrize("date", ["tomorrow", "2026-13-01", "", None, 7])
def test_a_date_is_a_date(runs: Runs, date: Any) -> None:
    """
    A wrong one fails at once.
    """
    with pytest.raises(TaskFailure, match="want one like"):
        run_bulk("news", date)

    assert [] == runs.noted


def test_a_second_message_waits_for_the_first_run(runs: Runs, settings: CelerySettings, completers_app: Celery) -> None:
    """
    A broker gives a message that runs for hours to another worker too: that one comes again later, and takes up
    what a dead one left.
    """
    assert completers_app
    runs.is_occupied = True
    with pytest.raises(RunsElsewhere, match="process 7"):
        run_bulk("news", "2026-11-30")

    with make_app(settings) as app, register(app, settings):
        bulk = app.tasks["pagemill.bulk"]
        bulk.push_request(id="t", called_directly=False, args=["news"], kwargs={}, delivery_info={})
        with pytest.raises(Retry) as retry:
            bulk.run("news", "2026-11-30")
        runs.is_occupied = False
        assert {"num_rows": 3} == bulk.run("news")

    assert 60 == retry.value.when
    # without a date it is today's
    assert abs(runs.noted[0][1] - datetime.datetime.now(datetime.UTC).date()) <= datetime.timedelta(days=1)


def test_a_real_bulk_job_runs_for_its_date(
    server_url: str, queue: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Documents of a day become results of that day; the second message does nothing more.
    """
    (tmp_path / "2026-12-01").mkdir()
    rows = "".join(f'{{"custom_id": "{n}", "text": "document {n}"}}\n' for n in range(20))
    (tmp_path / "2026-12-01" / "documents.jsonl").write_text(rows)
    (tmp_path / "pagemill.toml").write_text(
        f'[bulk.nightly]\ninput = "{tmp_path}/{{date}}/"\noutput = "file://{tmp_path}/out/{{date}}"\n'
        "options = { max_tokens = 4 }\n"
    )
    monkeypatch.setenv("PAGEMILL_CONFIG", str(tmp_path / "pagemill.toml"))
    monkeypatch.setenv("PAGEMILL_REDIS_URL", server_url)
    monkeypatch.setenv("PAGEMILL_QUEUE", queue)

    with RunningService(server_url, queue, engine=FakeEngine()):
        first, again = (run_bulk("nightly", "2026-12-01") for _ in range(2))

    assert first == again
    assert (20, 20, 0) == (first["num_rows"], first["num_done"], first["num_failed"])
