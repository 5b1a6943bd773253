"""Batches of the API, from their creation to their files."""

import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pagemill.bulk_client import BulkClient
from producers.batch_file.records import BatchRecord, RequestCounts
from producers.batch_file.server import BatchServer, Capacity
from producers.batch_file.service import BatchRunner, FileKeeper, folder_of, open_service
from producers.openai_api.errors import ApiError
from tests.support.batch_files import CHAT, chat_line, ids_of
from tests.support.servers import is_routed, wait_for
from tests.support.services import RunningService
from worker.fake_engine import FakeEngine

TENANT = "acme"


@pytest.fixture
def root(tmp_path: Path) -> str:
    return (tmp_path / "store").as_uri()


@pytest.fixture
def files(root: str, queue: str) -> FileKeeper:
    return open_service(root, queue)[0]


@pytest.fixture
def batches(root: str, queue: str) -> BatchRunner:
    return open_service(root, queue)[1]


@contextmanager
def serving(root: str, queue: str, client: BulkClient, capacity: Capacity | None = None) -> Iterator[BatchServer]:
    """A server on a thread, stopped in order at the end."""
    server = BatchServer(folder_of(root, queue), client, capacity or Capacity(), poll_s=0.02, lease_s=2.0)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(30)
        assert not thread.is_alive()


def upload(files: FileKeeper, lines: Iterable[Mapping[str, Any]], tenant: str = TENANT) -> str:
    data = (json.dumps(line).encode() + b"\n" for line in lines)
    return files.create(tenant, filename="in.jsonl", purpose="batch", data=data).id


def content(files: FileKeeper, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in b"".join(files.read(TENANT, file_id)).splitlines()]


def ended(batches: BatchRunner, batch_id: str, timeout_s: float = 30.0) -> BatchRecord:
    def look() -> BatchRecord | None:
        record = batches.get(TENANT, batch_id)
        return record if record.status in ("completed", "failed", "expired", "cancelled") else None

    record: BatchRecord = wait_for(look, timeout_s)
    return record


@pytest.mark.usefixtures("service")
def test_a_batch_completes_with_its_files(
    root: str, queue: str, client: BulkClient, files: FileKeeper, batches: BatchRunner
) -> None:
    """
    Its lines are in the output and error files, its times in order, and its counts add up.
    """
    lines = [chat_line(number) for number in range(40)]
    lines[7]["body"]["temperature"] = 9
    batch = batches.create(TENANT, input_file_id=upload(files, lines), endpoint=CHAT, metadata={"night": "monday"})
    assert "validating" == batch.status

    with serving(root, queue, client):
        record = ended(batches, batch.id)

    assert ("completed", "fake", {"night": "monday"}) == (record.status, record.model, record.metadata)
    assert RequestCounts(total=40, completed=39, failed=1) == record.request_counts
    times = [record.created_at, record.in_progress_at, record.finalizing_at, record.completed_at]
    assert sorted(times) == times  # type: ignore[type-var]
    assert record.created_at + 86400 == record.expires_at
    assert [f"line-{number}" for number in range(40) if number != 7] == ids_of(content(files, record.output_file_id))
    assert ["line-7"] == ids_of(content(files, record.error_file_id))
    output = files.get(TENANT, record.output_file_id or "")
    assert ("batch_output", f"{batch.id}_output.jsonl") == (output.purpose, output.filename)
    folder = Path(folder_of(root, queue).removeprefix("file://"))
    assert [] == [path for name in ("open", "work") for path in (folder / name).rglob("*") if path.is_file()]


@pytest.mark.usefixtures("service")
def test_an_error_file_is_there_only_for_errors(
    root: str, queue: str, client: BulkClient, files: FileKeeper, batches: BatchRunner
) -> None:
    """
    A batch without a failed line has no error file.
    """
    batch = batches.create(TENANT, input_file_id=upload(files, [chat_line(0)]), endpoint=CHAT)

    with serving(root, queue, client):
        record = ended(batches, batch.id)

    assert record.output_file_id is not None
    assert record.error_file_id is None


@pytest.mark.usefixtures("service")
@pytest.mark.parametrize(
    ("lines", "code"),
    [([], "empty_file"), ([chat_line(0, model="gpt-9")], "model_not_found"), ([{}], "invalid_custom_id")],
)
def test_a_file_that_cannot_run_fails_with_its_lines(
    root: str,
    queue: str,
    client: BulkClient,
    files: FileKeeper,
    batches: BatchRunner,
    lines: list[dict[str, Any]],
    code: str,
) -> None:
    """
    A file without any line that could run fails, and says what is wrong with which line.
    """
    batch = batches.create(TENANT, input_file_id=upload(files, lines), endpoint=CHAT)

    with serving(root, queue, client):
        record = ended(batches, batch.id)

    assert "failed" == record.status
    assert record.failed_at is not None
    assert record.errors is not None
    assert [(code, 1 if lines else None)] == [(fault.code, fault.line) for fault in record.errors.data]
    assert record.output_file_id is None


def test_a_cancelled_batch_keeps_what_it_has(
    server_url: str, queue: str, root: str, client: BulkClient, files: FileKeeper, batches: BatchRunner
) -> None:
    """
    Cancelled in the middle, it ends as `cancelled`: each line is in one of the two files, in order.
    """
    with (
        RunningService(server_url, queue, engine=FakeEngine(tokens_per_s=400, max_num_seqs=4)),
        serving(root, queue, client, Capacity(batches=1, jobs=32)),
    ):
        wait_for(lambda: is_routed(server_url))
        lines = [chat_line(number, max_tokens=8) for number in range(2000)]
        batch = batches.create(TENANT, input_file_id=upload(files, lines), endpoint=CHAT)
        moving = wait_for(lambda: 0 < batches.get(TENANT, batch.id).request_counts.completed, 20)
        assert moving
        assert "in_progress" == batches.get(TENANT, batch.id).status

        cancelling = batches.cancel(TENANT, batch.id)
        record = ended(batches, batch.id)

    assert "cancelling" == cancelling.status
    assert ("cancelled", 2000) == (record.status, record.request_counts.total)
    assert record.cancelling_at is not None
    assert record.cancelled_at is not None
    output, errors = content(files, record.output_file_id), content(files, record.error_file_id)
    assert 0 < len(output) < 2000
    assert 2000 == len(output) + len(errors)
    assert {"batch_cancelled"} == {line["error"]["code"] for line in errors}
    numbers = [[int(name.removeprefix("line-")) for name in ids_of(some)] for some in (output, errors)]
    assert [sorted(some) for some in numbers] == numbers
    assert list(range(2000)) == sorted(numbers[0] + numbers[1])
    assert (len(output), len(errors)) == (record.request_counts.completed, record.request_counts.failed)


def test_a_batch_that_is_late_expires(
    server_url: str, queue: str, root: str, client: BulkClient, files: FileKeeper, batches: BatchRunner
) -> None:
    """
    At the end of its window what has no answer is expired, and what has one is kept.
    """
    with (
        RunningService(server_url, queue, engine=FakeEngine(tokens_per_s=200, max_num_seqs=4)),
        serving(root, queue, client, Capacity(batches=1, jobs=16)),
    ):
        wait_for(lambda: is_routed(server_url))
        lines = [chat_line(number, max_tokens=8) for number in range(400)]
        batch = batches.create(TENANT, input_file_id=upload(files, lines), endpoint=CHAT, completion_window="2s")
        record = ended(batches, batch.id)

    assert ("expired", 400) == (record.status, record.request_counts.total)
    assert record.expired_at is not None
    output, errors = content(files, record.output_file_id), content(files, record.error_file_id)
    assert 400 == len(output) + len(errors)
    assert {"batch_expired"} == {line["error"]["code"] for line in errors}
    assert {None} == {line["response"] for line in errors}


def test_a_batch_expires_where_no_worker_lives(
    server_url: str,
    queue: str,
    root: str,
    client: BulkClient,
    files: FileKeeper,
    batches: BatchRunner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """
    Its end waits for no worker: what none has taken, and what a dead one holds, is expired.
    """
    monkeypatch.setattr("producers.bulk.runner.GRACE_S", 0.5)
    with RunningService(server_url, queue):
        wait_for(lambda: is_routed(server_url))
    batch = batches.create(
        TENANT,
        input_file_id=upload(files, [chat_line(number) for number in range(600)]),
        endpoint=CHAT,
        completion_window="1s",
    )

    with serving(root, queue, client):
        record = ended(batches, batch.id)

    assert ("expired", 600) == (record.status, record.request_counts.failed)
    assert record.output_file_id is None


@pytest.mark.usefixtures("service")
def test_two_servers_share_the_batches(
    root: str, queue: str, client: BulkClient, files: FileKeeper, batches: BatchRunner
) -> None:
    """
    Each batch is run by one of them: no job is submitted twice, and all of them complete.
    """
    ids = [
        batches.create(TENANT, input_file_id=upload(files, [chat_line(n) for n in range(30)]), endpoint=CHAT).id
        for _ in range(6)
    ]

    with serving(root, queue, client, Capacity(batches=2)), serving(root, queue, client, Capacity(batches=2)):
        records = [ended(batches, batch_id) for batch_id in ids]

    assert ["completed"] * 6 == [record.status for record in records]
    assert [30] * 6 == [len(content(files, record.output_file_id)) for record in records]
    assert 180 == client.stats().totals["accepted"]


def test_a_server_that_stops_leaves_its_batch_to_the_next(
    server_url: str, queue: str, root: str, client: BulkClient, files: FileKeeper, batches: BatchRunner
) -> None:
    """
    Stopped in order in the middle, another goes on: nothing is lost and nothing done twice.
    """
    with RunningService(server_url, queue, engine=FakeEngine(tokens_per_s=2000)):
        wait_for(lambda: is_routed(server_url))
        lines = [chat_line(number) for number in range(1500)]
        batch = batches.create(TENANT, input_file_id=upload(files, lines), endpoint=CHAT)
        capacity = Capacity(batches=1, jobs=64)
        with serving(root, queue, client, capacity):
            wait_for(lambda: 200 < batches.get(TENANT, batch.id).request_counts.completed, 20)
        before = batches.get(TENANT, batch.id)
        with serving(root, queue, client, capacity):
            record = ended(batches, batch.id)

    assert "in_progress" == before.status
    assert before.request_counts.completed < 1500
    assert ("completed", before.in_progress_at) == (record.status, record.in_progress_at)
    assert [f"line-{number}" for number in range(1500)] == ids_of(content(files, record.output_file_id))
    assert 1500 == client.stats().totals["accepted"]


@pytest.mark.usefixtures("service")
def test_a_cancelled_batch_needs_no_free_slot(
    root: str, queue: str, client: BulkClient, files: FileKeeper, batches: BatchRunner
) -> None:
    """
    One that waits for its turn is cancelled at once, with all its lines in the error file.
    """
    ids = [
        batches.create(TENANT, input_file_id=upload(files, [chat_line(n) for n in range(20)]), endpoint=CHAT).id
        for _ in range(2)
    ]
    batches.cancel(TENANT, ids[1])

    with serving(root, queue, client, Capacity(batches=1)):
        record = ended(batches, ids[1])

    assert ("cancelled", 20) == (record.status, record.request_counts.failed)


def test_lists_are_paged_newest_first(files: FileKeeper, batches: BatchRunner) -> None:
    """
    Pages follow one another without gap or overlap, and a tenant sees its own alone.
    """
    file_id = upload(files, [chat_line(0)])
    ids = [batches.create(TENANT, input_file_id=file_id, endpoint=CHAT).id for _ in range(5)][::-1]

    first = batches.list(TENANT, limit=2)
    second = batches.list(TENANT, limit=2, after=first.last_id)
    third = batches.list(TENANT, limit=2, after=second.last_id)

    assert ids == [batch.id for page in (first, second, third) for batch in page.data]
    assert [True, True, False] == [page.has_more for page in (first, second, third)]
    assert () == batches.list("other").data
    with pytest.raises(ApiError) as caught:
        batches.list(TENANT, after="batch_x")
    assert 400 == caught.value.status


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, 400, "endpoint"),
        ({"completion_window": "24"}, 400, "completion_window"),
        ({"completion_window": "31d"}, 400, "completion_window"),
        ({"metadata": {"a": "b" * 513}}, 400, "metadata.a"),
        ({"input_file_id": "file-0"}, 404, "id"),
        ({"input_file_id": "../batches"}, 404, "id"),
    ],
)
def test_a_batch_that_is_asked_for_wrongly_is_refused(
    files: FileKeeper, batches: BatchRunner, fields: dict[str, Any], status: int, param: str
) -> None:
    """
    Nothing is created where a field is wrong.
    """
    usual: dict[str, Any] = {"input_file_id": upload(files, [chat_line(0)]), "endpoint": CHAT}

    with pytest.raises(ApiError) as caught:
        batches.create(TENANT, **(usual | fields))

    assert (status, param) == (caught.value.status, caught.value.param)
    assert () == batches.list(TENANT).data


def test_what_is_another_tenants_is_not_there(files: FileKeeper, batches: BatchRunner) -> None:
    """
    Files and batches of others are 404, to read, run and cancel.
    """
    file_id = upload(files, [chat_line(0)])
    batch = batches.create(TENANT, input_file_id=file_id, endpoint=CHAT)

    for call in (
        lambda: files.read("other", file_id),
        lambda: files.delete("other", file_id),
        lambda: batches.get("other", batch.id),
        lambda: batches.cancel("other", batch.id),
        lambda: batches.create("other", input_file_id=file_id, endpoint=CHAT),
    ):
        with pytest.raises(ApiError) as caught:
            call()
        assert 404 == caught.value.status


@pytest.mark.usefixtures("service")
def test_what_has_ended_cannot_be_cancelled(
    root: str, queue: str, client: BulkClient, files: FileKeeper, batches: BatchRunner
) -> None:
    """
    Cancelling comes too late for a batch that is completed.
    """
    batch = batches.create(TENANT, input_file_id=upload(files, [chat_line(0)]), endpoint=CHAT)
    with serving(root, queue, client):
        ended(batches, batch.id)

    with pytest.raises(ApiError) as caught:
        batches.cancel(TENANT, batch.id)

    assert 409 == caught.value.status
    assert "completed" == batches.get(TENANT, batch.id).status


@pytest.mark.usefixtures("service")
def test_an_input_that_was_deleted_fails_its_batch(
    root: str, queue: str, client: BulkClient, files: FileKeeper, batches: BatchRunner
) -> None:
    """
    A file that is gone before its batch begins is told as the batch's fault.
    """
    file_id = upload(files, [chat_line(0)])
    batch = batches.create(TENANT, input_file_id=file_id, endpoint=CHAT)
    files.delete(TENANT, file_id)

    with serving(root, queue, client):
        record = ended(batches, batch.id)

    assert record.errors is not None
    assert ("failed", "invalid_input_file") == (record.status, record.errors.data[0].code)


def test_answers_that_came_while_no_server_ran_are_kept_after_a_cancel(
    server_url: str, queue: str, root: str, client: BulkClient, files: FileKeeper, batches: BatchRunner
) -> None:
    """
    What the queue had answered before the cancel is in the output, though nobody had written it down.
    """
    with RunningService(server_url, queue, engine=FakeEngine(tokens_per_s=2000)):
        wait_for(lambda: is_routed(server_url))
        lines = [chat_line(number) for number in range(1500)]
        batch = batches.create(TENANT, input_file_id=upload(files, lines), endpoint=CHAT)
        with serving(root, queue, client, Capacity(batches=1, jobs=128)):
            wait_for(lambda: 100 < batches.get(TENANT, batch.id).request_counts.completed, 20)
        wait_for(lambda: (totals := client.stats().totals)["accepted"] == totals["done"])
        batches.cancel(TENANT, batch.id)
        with serving(root, queue, client):
            record = ended(batches, batch.id)

    answered = client.stats().totals["done"]
    assert answered < 1500
    assert ("cancelled", answered) == (record.status, record.request_counts.completed)
    assert answered == len(content(files, record.output_file_id))
