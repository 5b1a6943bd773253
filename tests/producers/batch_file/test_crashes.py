"""A batch file that ends at any step of its work is finished by the same command."""

from pathlib import Path

import pytest

from pagemill.bulk_client import BulkClient
from producers.batch_file.local import Summary, run_file
from producers.batch_file.plan import Order
from tests.support.batch_files import chat_line, ids_of, read_lines, write_lines
from tests.support.crashes import crash_everywhere

pytestmark = pytest.mark.usefixtures("service")


@pytest.mark.parametrize("after", [False, True])
def test_a_crash_at_any_step(tmp_path: Path, client: BulkClient, after: bool) -> None:
    """
    Each line is in one of the two files once, in order; of the work nothing is left, and no batch is open.
    """
    source = write_lines(tmp_path / "in.jsonl", [*(chat_line(number) for number in range(8)), b"{"])

    def work(number: int) -> Summary:
        output, errors = (str(tmp_path / f"out-{number}.{end}") for end in ("jsonl", "errors.jsonl"))
        return run_file(Order(str(source), rows_per_chunk=4), output, errors, client)

    def check(number: int, summary: Summary) -> None:
        assert ("completed", 9, 8, 1) == (summary.status, summary.total, summary.completed, summary.failed)
        assert [f"line-{number}" for number in range(8)] == ids_of(read_lines(tmp_path / f"out-{number}.jsonl"))
        assert [""] == ids_of(read_lines(tmp_path / f"out-{number}.errors.jsonl"))
        left = (path.name for path in (tmp_path / f"out-{number}.jsonl.batch").rglob("*") if path.is_file())
        assert ["done.json"] == list(left)

    assert crash_everywhere(work, check, after=after) > 8
    assert {"ended"} == {batch.state for batch in client.list_batches(limit=100)}
