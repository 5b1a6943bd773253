"""A job that ends at any step of its work is finished by the next run, which loses and doubles nothing."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagemill.bulk_client import BulkClient
from pagemill.object_store import open_store
from producers.bulk.jobs import resume_job, run_job
from producers.bulk.manifest import read_manifest, verify_manifest
from producers.bulk.report import Summary
from producers.bulk.rows import Document, OutputRow, RowError
from producers.bulk.tasks import BulkTask
from tests.producers.bulk.conftest import MakeSpec
from tests.support.bulk_runs import output_rows, write_documents
from tests.support.crashes import crash_everywhere

pytestmark = pytest.mark.usefixtures("service")


@pytest.mark.parametrize("after", [False, True])
def test_a_crash_at_any_step_of_a_run(tmp_path: Path, make_spec: MakeSpec, client: BulkClient, after: bool) -> None:
    """
    All rows are there once, in order, under a manifest, and no batch is left open.
    """
    write_documents(tmp_path / "documents.jsonl", 10)

    def work(number: int) -> Summary:
        return run_job(make_spec(output=str(tmp_path / f"out-{number}"), rows_per_chunk=4), client)

    def check(number: int, summary: Summary) -> None:
        assert (10, 10, {}) == (summary.num_rows, summary.num_done, summary.errors)
        check_output(tmp_path / f"out-{number}")

    assert crash_everywhere(work, check, after=after) > 8
    assert {"ended"} == {batch.state for batch in client.list_batches(limit=100)}


@pytest.mark.parametrize("after", [False, True])
def test_a_crash_at_any_step_of_a_rerun(tmp_path: Path, make_spec: MakeSpec, client: BulkClient, after: bool) -> None:
    """
    Rows that failed get their answers, and none is forgotten, wherever the rerun ends.
    """
    write_documents(tmp_path / "documents.jsonl", 10)
    half_done = tmp_path / "half-done"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BulkTask, "_row", odd_rows_fail(BulkTask._row))
        assert 5 == run_job(make_spec(output=str(half_done), rows_per_chunk=4), client).num_failed

    def work(number: int) -> Summary:
        output = tmp_path / f"out-{number}"
        if not output.exists():
            shutil.copytree(half_done, output)
        return resume_job(str(output), client, failed=True)

    def check(number: int, summary: Summary) -> None:
        assert (10, 10, {}) == (summary.num_rows, summary.num_done, summary.errors)
        check_output(tmp_path / f"out-{number}")
        assert [] == list((tmp_path / f"out-{number}").glob("errors-*"))

    assert crash_everywhere(work, check, after=after) > 8


def odd_rows_fail(make: Callable[..., OutputRow]) -> Callable[..., OutputRow]:
    def row(self: BulkTask, document: Document, *args: Any) -> OutputRow:
        made = make(self, document, *args)
        error = RowError(code="invalid_answer", message="as it happens")
        return made.model_copy(update={"status": "failed", "error": error}) if document.row % 2 else made

    return row


def check_output(folder: Path) -> None:
    store = open_store(folder.as_uri())
    rows = output_rows(folder.as_uri())
    assert [f"doc-{number}" for number in range(10)] == [row.custom_id for row in rows]
    manifest = read_manifest(store)
    assert manifest is not None
    assert [] == list(verify_manifest(store, manifest))
