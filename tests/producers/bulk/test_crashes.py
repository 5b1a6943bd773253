"""A job that ends at any step of its work is finished by the next run, which loses and doubles nothing."""

import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any

import pytest

from pagemill.bulk_client import BulkClient
from pagemill.file_store import FileStore, FileWriter
from pagemill.object_store import open_store
from producers.bulk.jobs import resume_job, run_job
from producers.bulk.manifest import read_manifest, verify_manifest
from producers.bulk.report import Summary
from producers.bulk.rows import Document, OutputRow, RowError
from producers.bulk.tasks import BulkTask
from tests.producers.bulk.conftest import MakeSpec
from tests.support.bulk_runs import output_rows, write_documents

pytestmark = pytest.mark.usefixtures("service")

# all that a job changes in the world
EFFECTS = ((FileWriter, "_name"), (FileStore, "delete"), (BulkClient, "forget_many"), (BulkClient, "seal_batch"))


class Crashed(BaseException):
    """Stands for the end of the process."""


class Crash:
    """Lets a process live for so many effects; after the last one, or instead of it, nothing has any effect."""

    def __init__(self, patch: pytest.MonkeyPatch, num_effects: int, *, after: bool) -> None:
        self._left, self._after, self._lock = num_effects, after, Lock()
        for owner, name in EFFECTS:
            patch.setattr(owner, name, self._wrapped(getattr(owner, name)))

    def _wrapped(self, effect: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **fields: Any) -> Any:
            with self._lock:
                self._left -= 1
                left = self._left
            if left < 0 or (left == 0 and not self._after):
                raise Crashed
            result = effect(*args, **fields)
            if left == 0:
                raise Crashed
            return result

        return wrapper


def crash_everywhere(work: Callable[[int], Summary], check: Callable[[int, Summary], None], *, after: bool) -> int:
    """Do a work with a crash at its first effect, its second ... and once more to its end; how many crashes it took."""
    for number in count(1):
        with pytest.MonkeyPatch.context() as patch:
            Crash(patch, number, after=after)
            try:
                work(number)
            except Crashed:
                is_through = False
            else:
                is_through = True
        check(number, work(number))
        if is_through:
            return number
    raise AssertionError("a work has an end")


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
