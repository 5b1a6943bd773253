"""Named jobs, once for each day."""

from datetime import date
from pathlib import Path
from typing import Any

import pytest

from pagemill.bulk_client import BulkClient
from producers.bulk.errors import Interrupted, SpecError
from producers.bulk.jobs import run_job
from producers.bulk.schedule import run_for_date
from producers.bulk.spec import BulkSpec, read_section
from tests.producers.bulk.test_jobs import Stopper
from tests.support.bulk_runs import output_rows, write_documents

DAY = date(2026, 12, 1)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A nightly job over a folder a day."""
    (tmp_path / "2026-12-01").mkdir()
    write_documents(tmp_path / "2026-12-01" / "documents.jsonl", 40)
    path = tmp_path / "pagemill.toml"
    path.write_text(
        f'[bulk.nightly]\ninput = "{tmp_path}/{{date}}/"\noutput = "file://{tmp_path}/out/{{date}}"\n'
        "rows_per_chunk = 4\nmax_jobs = 4\noptions = { max_tokens = 4 }\n"
        f'[bulk.undated]\ninput = "{tmp_path}"\noutput = "file://{tmp_path}/out"\n'
    )
    return {"PAGEMILL_CONFIG": str(path)}


@pytest.mark.usefixtures("service")
def test_a_day_is_done_once(environment: dict[str, str], client: BulkClient, tmp_path: Path) -> None:
    """
    The second call for a day gives the figures of the first, and submits nothing.
    """
    first = run_for_date("nightly", DAY, client=client, environment=environment)
    again = run_for_date("nightly", DAY, client=client, environment=environment)

    assert first == again
    assert (40, 40, 0) == (first["num_rows"], first["num_done"], first["num_failed"])
    assert [40] == [batch.total for batch in client.list_batches()]
    assert 40 == len(output_rows((tmp_path / "out" / "2026-12-01").as_uri()))


@pytest.mark.usefixtures("service")
def test_a_day_that_was_interrupted_goes_on(environment: dict[str, str], client: BulkClient) -> None:
    """
    What is half done is finished, without a job twice.
    """
    spec = BulkSpec.build(read_section("nightly", environment)).on(DAY)
    with pytest.raises(Interrupted):
        run_job(spec, client, Stopper(2).hooks)

    figures: dict[str, Any] = run_for_date("nightly", DAY, client=client, environment=environment)

    assert 40 == figures["num_done"]
    assert [40] == [batch.total for batch in client.list_batches()]


def test_an_output_without_a_date_is_refused(environment: dict[str, str], client: BulkClient) -> None:
    """
    Tomorrow's run would find today's output and do nothing.
    """
    with pytest.raises(SpecError, match=r"put \{date\} into it"):
        run_for_date("undated", DAY, client=client, environment=environment)
