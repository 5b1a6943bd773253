"""Bulk jobs from their plan to their manifest, against a real server and a worker."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pagemill.bulk_client import BulkClient
from pagemill.errors import BatchClosed
from pagemill.object_store import open_store
from producers.bulk.errors import BulkError, Interrupted, Occupied, SpecError
from producers.bulk.jobs import BulkRunner, Hooks, resume_job, run_job
from producers.bulk.lease import OutputLease
from producers.bulk.manifest import MANIFEST_NAME, read_manifest, verify_manifest
from producers.bulk.planner import read_chunks, read_plan
from producers.bulk.status import look
from producers.bulk.work import Counts
from tests.producers.bulk.conftest import MakeSpec
from tests.support.bulk_runs import output_rows, write_documents

pytestmark = pytest.mark.usefixtures("service")


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    return write_documents(tmp_path / "documents.jsonl", 50, team="red")


def test_each_document_has_its_row_in_order(documents: Path, make_spec: MakeSpec, client: BulkClient) -> None:  # noqa: ARG001
    """
    The rows stand in the order of the input, with answers, usage and the columns that are kept.
    """
    spec = make_spec(keep=["team"], prompt_price=2.0, completion_price=10.0)

    summary = run_job(spec, client)

    rows = output_rows(spec.output)
    assert [f"doc-{number}" for number in range(50)] == [row.custom_id for row in rows]
    assert [(8, "length", {"team": "red"})] * 50 == [
        (len(row.text or ""), row.finish_reason, row.metadata) for row in rows
    ]
    assert (50, 50, 0, {}) == (summary.num_rows, summary.num_done, summary.num_failed, summary.errors)
    assert 50 * 8 == summary.usage.completion_tokens
    assert summary.usage.prompt_tokens == sum(row.usage.prompt_tokens for row in rows)
    assert round((2 * summary.usage.prompt_tokens + 10 * 400) / 1e6, 6) == summary.cost


def test_answers_leave_the_queue_when_they_are_written(
    documents: Path,  # noqa: ARG001
    make_spec: MakeSpec,
    client: BulkClient,
    queue: str,
) -> None:
    """
    Of the jobs nothing is kept in the server, and the batch has ended with all of them.
    """
    spec = make_spec()

    run_job(spec, client)

    [batch] = client.list_batches()
    assert (50, 50, "ended") == (batch.total, batch.done, batch.state)
    left = [name.decode() for name in client._redis.scan_iter(match=f"{{pagemill:{queue}}}:*")]
    assert [] == [name for name in left if ":j:" in name or ":r:" in name]


def test_a_job_that_is_done_is_not_done_again(documents: Path, make_spec: MakeSpec, client: BulkClient) -> None:  # noqa: ARG001
    """
    The same run gives the same figures at once, and submits nothing.
    """
    first = run_job(make_spec(), client)

    again = run_job(make_spec(max_jobs=3), client)

    assert first == again
    assert [50] == [batch.total for batch in client.list_batches()]


def test_an_output_belongs_to_one_job(documents: Path, make_spec: MakeSpec, client: BulkClient) -> None:
    """
    Other settings, or another input, do not mix into what is there; the message names what differs.
    """
    run_job(make_spec(), client)

    with pytest.raises(BulkError, match=r"other settings \(options\)"):
        run_job(make_spec(options={"max_tokens": 9}), client)
    write_documents(documents, 51)
    with pytest.raises(BulkError, match="has changed since it was planned"):
        run_job(make_spec(), client)


def test_a_folder_with_strange_shards_is_left_alone(
    documents: Path,  # noqa: ARG001
    make_spec: MakeSpec,
    client: BulkClient,
    tmp_path: Path,
) -> None:
    """
    Shards that no plan explains are somebody's: nothing is written beside them.
    """
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "part-000000.jsonl.zst").write_bytes(b"precious")

    with pytest.raises(BulkError.__mro__[1], match=r"part-000000.jsonl.zst and no plan"):
        run_job(make_spec(), client)

    assert ["part-000000.jsonl.zst"] == [path.name for path in (tmp_path / "out").iterdir()]


class Stopper:
    """Stops a run when so many chunks are written."""

    def __init__(self, at: int) -> None:
        self._at = at
        self.hooks = Hooks(self._started, self._turned)

    def _started(self, runner: BulkRunner, left: int, total: int) -> None:  # noqa: ARG002
        self.runner = runner

    def _turned(self, counts: Counts) -> None:
        if counts.chunks >= self._at:
            self.runner.stop()


def test_a_stopped_run_goes_on_where_it_was(documents: Path, make_spec: MakeSpec, client: BulkClient) -> None:  # noqa: ARG001
    """
    What was written stays as it is, no job runs twice, and only then there is a manifest.
    """
    spec = make_spec(rows_per_chunk=4, max_jobs=4)
    store = open_store(spec.output)
    with pytest.raises(Interrupted, match="pagemill bulk resume"):
        run_job(spec, client, Stopper(3).hooks)
    assert read_manifest(store) is None
    before = {entry.name: entry.etag for entry in store.list("part-")}
    assert 3 <= len(before) < 13
    assert "stopped" == look(spec.output, client).state

    summary = resume_job(spec.output, client)

    after = {entry.name: entry.etag for entry in store.list("part-")}
    assert before == {name: after[name] for name in before}
    assert (50, 50) == (summary.num_rows, summary.num_done)
    assert [50] == [batch.total for batch in client.list_batches()]
    assert "done" == look(spec.output, client).state


def test_rows_that_failed_run_again_alone(documents: Path, make_spec: MakeSpec, client: BulkClient) -> None:  # noqa: ARG001
    """
    A rerun keeps the answers that are there, and gives each other row one; never two rows for one id.
    """
    spec = make_spec(rows_per_chunk=4, max_jobs=4)
    with pytest.raises(Interrupted):
        run_job(spec, client, Stopper(5).hooks)
    late = resume_job(spec.output, client, changes={"deadline": datetime.now(UTC) - timedelta(hours=1)})
    assert {"deadline_passed": late.num_failed} == late.errors
    assert 0 < late.num_failed <= 30
    first = {row.custom_id: row for row in output_rows(spec.output)}

    summary = resume_job(spec.output, client, failed=True)

    rows = output_rows(spec.output)
    assert [f"doc-{number}" for number in range(50)] == [row.custom_id for row in rows]
    assert (50, 0, {}, 1) == (summary.num_done, summary.num_failed, summary.errors, summary.generation)
    assert [row for row in first.values() if row.status == "done"] == [
        row for row in rows if first[row.custom_id].status == "done"
    ]
    store = open_store(spec.output)
    manifest = read_manifest(store)
    assert manifest is not None
    assert [] == list(verify_manifest(store, manifest))
    assert [] == list(store.list("errors-"))


def test_a_rerun_that_was_stopped_goes_on(documents: Path, make_spec: MakeSpec, client: BulkClient) -> None:  # noqa: ARG001
    """
    Between two generations there is no manifest, and a plain resume finishes the second one.
    """
    spec = make_spec(rows_per_chunk=4, max_jobs=4, deadline=datetime.now(UTC) - timedelta(hours=1))
    assert 50 == run_job(spec, client).num_failed
    later = {"deadline": datetime.now(UTC) + timedelta(hours=1)}
    with pytest.raises(Interrupted):
        resume_job(spec.output, client, Stopper(3).hooks, failed=True, changes=later)
    assert read_manifest(open_store(spec.output)) is None

    summary = resume_job(spec.output, client, changes=later)

    assert (50, 1) == (summary.num_done, summary.generation)
    assert ["done"] * 50 == [row.status for row in output_rows(spec.output)]


def test_a_rerun_adds_to_what_was_paid_for(documents: Path, make_spec: MakeSpec, client: BulkClient) -> None:  # noqa: ARG001
    """
    Tokens of answers that were of no use are in the row's usage and the cost; the rate would be of another time.
    """
    # letters are no labels
    spec = make_spec(
        template="classify",
        params={"labels": ["yes", "no"]},
        structured=False,
        completion_price=10.0,
        rows_per_chunk=4,
        max_jobs=4,
    )
    first = run_job(spec, client)
    assert ({"invalid_answer": 50}, 50 * 8) == (first.errors, first.usage.completion_tokens)

    with pytest.raises(Interrupted):
        resume_job(spec.output, client, Stopper(3).hooks, failed=True)
    half = look(spec.output, client)
    again = resume_job(spec.output, client)

    assert ("stopped", 0) == (half.state, half.chunks_done)
    assert {"invalid_answer": 50} == again.errors
    assert again.usage.completion_tokens >= 2 * 50 * 8
    assert again.usage.completion_tokens == sum(row.usage.completion_tokens for row in output_rows(spec.output))
    assert first.cost is not None
    assert again.cost is not None
    assert again.cost >= 2 * first.cost
    assert (None, 1) == (again.tokens_per_s, again.generation)


def test_a_cancelled_batch_ends_the_run(documents: Path, make_spec: MakeSpec, client: BulkClient) -> None:  # noqa: ARG001
    """
    Whoever cancels the batch stops the job; running it again goes on with a batch of its own.
    """
    spec = make_spec(rows_per_chunk=4, max_jobs=4)

    def turned(counts: Counts) -> None:
        # several chunks may end in one turn
        if counts.chunks >= 2:
            client.cancel_batch(client.list_batches()[0].batch_id)

    with pytest.raises(BatchClosed):
        run_job(spec, client, Hooks(turned=turned))
    run_job(spec, client)
    summary = resume_job(spec.output, client, failed=True)

    assert (50, 0) == (summary.num_done, summary.num_failed)
    assert 50 == len({row.custom_id for row in output_rows(spec.output)})


def test_a_second_runner_is_told_of_the_first(
    documents: Path,  # noqa: ARG001
    make_spec: MakeSpec,
    client: BulkClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """
    Two processes do not work on one output: the second says who has it, and touches nothing.
    """
    spec = make_spec()
    monkeypatch.setattr("producers.bulk.jobs.OutputLease", lambda *args: OutputLease(*args, lease_s=0.4))

    with OutputLease(client, spec.output, lease_s=0.4), pytest.raises(Occupied, match=r"worked on by process \d+ on"):
        run_job(spec, client)

    assert not Path(spec.output.removeprefix("file://")).exists()


def test_an_output_is_the_same_however_it_is_named(
    documents: Path,
    make_spec: MakeSpec,
    client: BulkClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """
    A relative path, a whole one and a URL name one output: one runner, one batch, and a job that goes on anywhere.
    """
    monkeypatch.chdir(tmp_path)
    spec = make_spec(input=documents.name, output="out", rows_per_chunk=4, max_jobs=4)
    with pytest.raises(Interrupted):
        run_job(spec, client, Stopper(5).hooks)
    with OutputLease(client, (tmp_path / "out").as_uri()):
        assert ["running"] * 3 == [
            look(name, client).state for name in ("out", str(tmp_path / "out"), (tmp_path / "out").as_uri())
        ]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    whole = make_spec(input=str(documents), output=(tmp_path / "out").as_uri(), rows_per_chunk=4, max_jobs=4)

    with pytest.raises(Interrupted):
        resume_job(str(tmp_path / "out"), client, Stopper(2).hooks)
    summary = run_job(whole, client)

    assert (50, 0) == (summary.num_done, summary.num_failed)
    assert [50] == [batch.total for batch in client.list_batches()]


def test_a_job_that_cannot_work_leaves_no_plan(documents: Path, make_spec: MakeSpec, client: BulkClient) -> None:  # noqa: ARG001
    """
    What was forgotten can be added, and the same output be used.
    """
    with pytest.raises(SpecError, match=r"needs params\.labels"):
        run_job(make_spec(template="classify"), client)

    assert (
        50 == run_job(make_spec(template="classify", params={"labels": ["a", "b"]}, structured=False), client).num_rows
    )


def test_broken_rows_are_rows_of_the_output(tmp_path: Path, make_spec: MakeSpec, client: BulkClient) -> None:
    """
    Whatever a row is, it has one row of the output, and the others have their answers.
    """
    lines = [
        b'{"custom_id": "a", "text": "one"}',
        b"{no json",
        b'{"custom_id": "a", "text": "again"}',
        b'{"custom_id": "b"}',
        b'"text"',
        b'{"custom_id": "c", "text": "\xff"}',
        b'{"custom_id": "d", "text": "four"}\r',
    ]
    (tmp_path / "documents.jsonl").write_bytes(b"\n".join(lines))
    spec = make_spec()

    summary = run_job(spec, client)

    rows = output_rows(spec.output)
    codes = [row.error.code if row.error else "done" for row in rows]
    assert [
        "done",
        "invalid_json",
        "duplicate_custom_id",
        "missing_text",
        "not_an_object",
        "invalid_encoding",
        "done",
    ] == codes
    assert (7, 2, 5) == (summary.num_rows, summary.num_done, summary.num_failed)
    assert ["a", "d"] == [row.custom_id for row in rows if row.status == "done"]


def test_a_limit_takes_the_first_rows(documents: Path, make_spec: MakeSpec, client: BulkClient) -> None:  # noqa: ARG001
    """
    With a limit the input's first rows are done, also where it ends inside a chunk.
    """
    spec = make_spec(limit=21)

    summary = run_job(spec, client)

    assert 21 == summary.num_rows
    assert [16, 5] == [chunk.num_rows for chunk in read_chunks(open_store(spec.output))]
    assert [f"doc-{number}" for number in range(21)] == [row.custom_id for row in output_rows(spec.output)]


def test_a_full_queue_is_waited_for(documents: Path, make_spec: MakeSpec, server_url: str, queue: str) -> None:  # noqa: ARG001
    """
    Where the queue takes less than the job would put in, it takes longer and nothing fails.
    """
    with BulkClient(server_url, queue=queue, max_queued_tokens=600) as narrow:
        summary = run_job(make_spec(), narrow)

    assert (50, 50) == (summary.num_rows, summary.num_done)


def test_an_open_date_is_refused(documents: Path, make_spec: MakeSpec, client: BulkClient, tmp_path: Path) -> None:  # noqa: ARG001
    """
    A job with {date} in its output needs a day.
    """
    with pytest.raises(SpecError, match="--date"):
        run_job(make_spec(output=(tmp_path / "out-").as_uri() + "{date}"), client)


def test_a_plan_holds_what_was_asked_for(
    documents: Path,  # noqa: ARG001
    make_spec: MakeSpec,
    client: BulkClient,
    tmp_path: Path,
) -> None:
    """
    A template file is kept in the plan: editing it later does not change a job that has begun.
    """
    template = tmp_path / "mine.j2"
    template.write_text("Shout: {{ text }}")
    spec = make_spec(template=str(template))
    with pytest.raises(Interrupted):
        run_job(spec, client, Stopper(0).hooks)
    template.write_text("Whisper: {{ text }}")

    resume_job(spec.output, client)

    plan = read_plan(open_store(spec.output))
    assert plan is not None
    assert "Shout: {{ text }}" == plan.spec.template_text
    with pytest.raises(BulkError, match="template_text"):
        run_job(spec, client)


def test_nothing_to_resume_says_so(client: BulkClient, tmp_path: Path) -> None:
    """
    A folder without a plan is no job.
    """
    with pytest.raises(BulkError, match=r"no plan\.json"):
        resume_job(tmp_path.as_uri(), client)


def test_shards_may_be_parquet(documents: Path, make_spec: MakeSpec, client: BulkClient) -> None:  # noqa: ARG001
    """
    The output's format changes nothing else.
    """
    spec = make_spec(output_format="parquet")

    run_job(spec, client)

    assert [f"doc-{number}" for number in range(50)] == [row.custom_id for row in output_rows(spec.output)]


def test_the_manifest_has_all_figures(documents: Path, make_spec: MakeSpec, client: BulkClient, tmp_path: Path) -> None:  # noqa: ARG001
    """
    Whoever has the folder alone can tell what it came from and what it cost.
    """
    spec = make_spec(name="teams")

    run_job(spec, client)

    manifest = json.loads((tmp_path / "out" / MANIFEST_NAME).read_text())
    assert "teams" == manifest["details"]["spec"]["name"]
    assert 50 == manifest["num_rows"]
    assert 64 == len(manifest["source_fingerprint"])
    assert 32 == len(manifest["config_fingerprint"])
