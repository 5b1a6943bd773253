"""Batch files and batches in a bucket of a real S3-compatible server."""

import json
import re
import threading
from collections.abc import Iterator

import pytest

from pagemill.bulk_client import BulkClient
from producers.batch_file.local import run_file
from producers.batch_file.plan import Order
from producers.batch_file.server import BatchServer
from producers.batch_file.service import folder_of, open_service
from tests.support.batch_files import CHAT, chat_line
from tests.support.seaweed import ACCESS_KEY, BUCKET, SECRET_KEY, Seaweed
from tests.support.servers import wait_for


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        with Seaweed(tmp_path_factory.mktemp("weed")) as weed:
            yield weed


def names(weed: Seaweed, prefix: str) -> list[str]:
    found = weed.client().list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", ())
    return [entry["Key"] for entry in found]


@pytest.mark.usefixtures("service")
def test_a_file_is_run_from_a_bucket_into_a_bucket(bucket: Seaweed, client: BulkClient) -> None:
    """
    Input, output, errors and the work between them are objects; only what is wanted is left.
    """
    lines = [json.dumps(chat_line(number)).encode() if number % 10 else b"{" for number in range(60)]
    bucket.client().put_object(Bucket=BUCKET, Key="in/day.jsonl", Body=b"\n".join(lines))
    output, errors = bucket.url("out/day.jsonl"), bucket.url("out/day.errors.jsonl")

    summary = run_file(Order(bucket.url("in/day.jsonl"), rows_per_chunk=16), output, errors, client)

    assert ("completed", 54, 6) == (summary.status, summary.completed, summary.failed)
    body = bucket.client().get_object(Bucket=BUCKET, Key="out/day.jsonl")["Body"].read()
    assert [f"line-{n}" for n in range(60) if n % 10] == [json.loads(line)["custom_id"] for line in body.splitlines()]
    assert ["out/day.errors.jsonl", "out/day.jsonl", "out/day.jsonl.batch/done.json"] == names(bucket, "out/")
    assert summary == run_file(Order(bucket.url("in/day.jsonl"), rows_per_chunk=16), output, errors, client)


@pytest.mark.usefixtures("service")
def test_batches_live_in_a_bucket(bucket: Seaweed, queue: str, client: BulkClient) -> None:
    """
    Upload, create, complete, download and delete, with nothing but the bucket and the queue.
    """
    store = bucket.url("gateway")
    files, batches = open_service(store, queue)
    data = [json.dumps(chat_line(number)).encode() + b"\n" for number in range(30)]
    file = files.create("acme", filename="in.jsonl", purpose="batch", data=data)
    batch = batches.create("acme", input_file_id=file.id, endpoint=CHAT)
    server = BatchServer(folder_of(store, queue), client, poll_s=0.05)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        record = wait_for(lambda: (found := batches.get("acme", batch.id)).completed_at and found, 30)
    finally:
        server.stop()
        thread.join()

    lines = b"".join(files.read("acme", record.output_file_id)).splitlines()
    assert [f"line-{number}" for number in range(30)] == [json.loads(line)["custom_id"] for line in lines]
    assert [batch.id] == [one.id for one in batches.list("acme").data]
    assert [record.output_file_id] == [one.id for one in files.list("acme", purpose="batch_output").data]
    files.delete("acme", file.id)
    assert [] == [name for name in names(bucket, "gateway/") if {"work", "open", file.id} & set(re.split("[/.]", name))]
