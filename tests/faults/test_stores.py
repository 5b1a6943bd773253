"""Rows of the failure catalogue: an object store that refuses, forgets who we are, or hangs up."""

import time
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from pagemill.client import Client
from pagemill.errors import ObjectStoreError
from pagemill.object_store import open_store
from pagemill.schema import Job
from tests.support.scripted_s3 import Answer, ScriptedS3
from tests.support.servers import wait_for
from tests.support.services import RunningService

# of the S3 client for one call, with the first
S3_TRIES = 11


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of nobody; and retries of the S3 client that do not wait."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    # not `sleep` of the module itself: all of this process would wait no longer
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(time=time.time, sleep=lambda _: None))


def large(number: int = 0) -> Job:
    return Job.build(prompt=f"row {number}", options={"max_tokens": 4}, result_store="object")


def test_row_28_a_store_that_says_slow_down(server_url: str, queue: str, client: Client) -> None:
    """
    A result is offered again for longer than the S3 client itself tries, and for two leases and more:
    the job stays its worker's, while a peer with nothing to do looks for jobs of the dead.
    """
    # to make its client the S3 library keeps all threads of this process waiting
    lease_s = 2.0
    # from the first SlowDown on the client holds its own rate down
    with (
        ScriptedS3(*[Answer(500, code="InternalError")] * S3_TRIES, then=Answer(503, code="SlowDown")) as s3,
        RunningService(server_url, queue, store=open_store(s3.url), lease_s=lease_s) as one,
        RunningService(server_url, queue, store=open_store(s3.url), lease_s=lease_s) as other,
    ):
        job_id = client.submit(large()).job_id
        wait_for(lambda: len(s3.headers) > S3_TRIES, 20)
        time.sleep(2.2 * lease_s)
        owner = client.status(job_id).worker
        s3.then = Answer()
        wait_for(lambda: client.status(job_id).state == "done", 30)
        computed = [running.engine.stats().generated_tokens for running in (one, other)]

    assert [0, 4] == sorted(computed)
    assert (one if computed[0] else other).worker_id == owner
    assert (1, 0) == (client.status(job_id).attempt, client.stats().totals.get("reclaimed", 0))


def test_row_29_credentials_that_expire(
    server_url: str, queue: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    An upload that is refused for them is made again with new ones; nothing of it was frozen at the start.
    """
    monkeypatch.setenv("AWS_SESSION_TOKEN", "old")
    monkeypatch.setenv("AWS_CREDENTIAL_EXPIRATION", (datetime.now(UTC) + timedelta(minutes=11)).isoformat())
    expired = Answer(400, code="ExpiredToken")
    with ScriptedS3(then=expired) as s3, RunningService(server_url, queue, store=open_store(s3.url)):

        def tokens() -> list[str]:
            return [headers["X-Amz-Security-Token"] for headers in s3.headers]

        job_id = client.submit(large()).job_id
        wait_for(tokens)
        monkeypatch.setenv("AWS_SESSION_TOKEN", "new")
        wait_for(lambda: "new" in tokens())
        s3.then = Answer()
        wait_for(lambda: client.status(job_id).state == "done")

    assert {"old", "new"} == {*tokens()}
    # each try takes what there is by then
    assert tokens() == sorted(tokens(), reverse=True)


def test_row_30_a_read_that_breaks_off() -> None:
    """
    Half an object is an error, never a short payload; the next read has all of it.
    """
    whole = b"x" * 100_000
    with ScriptedS3(Answer(body=whole, cut_after=50_000), Answer(body=whole)) as s3:
        store = open_store(s3.url)
        with pytest.raises(ObjectStoreError, match="read s3://"):
            store.get("s3://bucket/prefix/a")

        assert whole == store.get("s3://bucket/prefix/a")


def test_row_32_no_checksums_for_stores_that_do_not_know_them() -> None:
    """
    A store that is not AWS gets plain bodies, without checksum headers or trailers.
    """
    with ScriptedS3() as s3:
        open_store(s3.url).put("a", b"data")
    [headers] = s3.headers

    names = {name.lower() for name in headers}
    assert not any("checksum" in name or "trailer" in name for name in names)
    assert ("4", None) == (headers["Content-Length"], headers.get("Content-Encoding"))


def test_a_payload_is_read_again_when_the_store_broke_off(server_url: str, queue: str, client: Client) -> None:
    """
    A worker that got half a payload puts the job off, and it costs no attempt.
    """
    payload = Job.build(prompt="p" * 1000, options={"max_tokens": 4}).payload()
    script = (Answer(), Answer(206, body=payload, cut_after=500), Answer(206, body=payload))
    with ScriptedS3(*script) as s3:
        store = open_store(s3.url)
        job = Job.build(prompt="p" * 100_000, options={"max_tokens": 4})
        with (
            Client(server_url, queue=queue, object_store=store) as far,
            RunningService(server_url, queue, store=store, lease_s=1.0),
        ):
            far.submit(job)
            result = client.result(job.id, wait_s=10)

    assert ("done", 1) == (result.status, result.attempt)
