"""What a bucket's client makes of answers that real servers give seldom."""

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.stub import ANY, Stubber

from pagemill.errors import ObjectStoreError, StoreAway
from pagemill.object_store import open_store
from pagemill.s3_store import S3Store
from tests.support.scripted_s3 import Answer, ScriptedS3


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of nobody; and retries of the S3 client that do not wait."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(time=time.time, sleep=lambda _: None))


@pytest.mark.parametrize("code", ["RequestTimeTooSkewed", "ExpiredToken"])
def test_a_request_that_came_too_late_is_signed_anew(code: str) -> None:
    """
    A request whose signature or credentials are too old is sent once more, and no oftener.
    """
    with ScriptedS3(Answer(403, code=code), then=Answer()) as s3:
        open_store(s3.url).put("a", b"data")
        first = len(s3.headers)
        s3.then = Answer(403, code=code)
        with pytest.raises(ObjectStoreError, match=code):
            open_store(s3.url).put("a", b"data")

    assert (2, 4) == (first, len(s3.headers))


def test_a_conditional_write_that_met_another_is_made_again() -> None:
    """
    A conflict says that two wrote at once and nothing of who won: only asking again tells.
    """
    conflict = Answer(409, code="ConditionalRequestConflict")
    with ScriptedS3(conflict, conflict) as s3:
        open_store(s3.url).put_if_absent("a", b"data")
        assert ["*"] * 3 == [headers["If-None-Match"] for headers in s3.headers]
        s3.then = conflict
        with pytest.raises(StoreAway, match="Conflict"):
            open_store(s3.url).put_if_absent("a", b"data")


def test_a_store_that_takes_no_ranges() -> None:
    """
    A window from the beginning is cut from all that comes; one from the middle is an error, never other bytes.
    """
    with ScriptedS3(then=Answer(body=b"0123456789")) as s3:
        store = open_store(s3.url)

        assert b"0123" == store.get_range(store.url("a"), 0, 4)
        with pytest.raises(ObjectStoreError, match="takes no ranges"):
            store.get_range(store.url("a"), 2, 4)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stubber]:
    """A client whose answers are told beforehand."""
    client = boto3.session.Session().client("s3", region_name="us-east-1", config=Config(retries={"max_attempts": 0}))
    monkeypatch.setattr("pagemill.s3_calls._s3_client", lambda *_: client)
    with Stubber(client) as stubber:
        yield stubber


def tell_all_but_the_last(answers: Stubber) -> None:
    """An upload of two parts; what was asked for is checked."""
    place = {"Bucket": "bucket", "Key": "a"}
    answers.add_response("create_multipart_upload", {"UploadId": "7"}, place)
    for number in (1, 2):
        sent = {**place, "UploadId": "7", "PartNumber": number, "Body": ANY}
        answers.add_response("upload_part", {"ETag": f"part {number}", "ChecksumCRC32": "AAAA"}, sent)
    answers.add_client_error("complete_multipart_upload", "NoSuchUpload", http_status_code=404)


def write(num_bytes: int = 9_000_000) -> None:
    with S3Store("bucket", "").open_writer("a") as writer:
        writer.write(bytes(num_bytes))


@pytest.mark.parametrize(
    ("there", "written"),
    [
        ({"ContentLength": 9_000_000, "ETag": '"abc-2"'}, True),
        ({"ContentLength": 9_000_000, "ETag": '"abc"'}, False),
        ({"ContentLength": 8_999_999, "ETag": '"abc-2"'}, False),
    ],
)
def test_an_upload_that_is_gone_may_be_an_object(answers: Stubber, there: dict[str, Any], written: bool) -> None:
    """
    Where the answer to the last request was lost, the store knows nothing of the upload when it comes again: an object
    of that size and so many parts is it, any other is not.
    """
    tell_all_but_the_last(answers)
    answers.add_response("head_object", there, {"Bucket": "bucket", "Key": "a"})
    if written:
        write()
    else:
        answers.add_response("abort_multipart_upload", {}, {"Bucket": "bucket", "Key": "a", "UploadId": "7"})
        with pytest.raises(ObjectStoreError, match="NoSuchUpload"):
            write()

    answers.assert_no_pending_responses()


def test_checksums_of_parts_are_sent_with_the_last_request(answers: Stubber) -> None:
    """
    A store that checks parts is told again what it said of each.
    """
    parts = [{"PartNumber": number, "ETag": f"part {number}", "ChecksumCRC32": "AAAA"} for number in (1, 2)]
    place = {"Bucket": "bucket", "Key": "a"}
    answers.add_response("create_multipart_upload", {"UploadId": "7"}, place)
    for part in parts:
        answers.add_response("upload_part", {"ETag": part["ETag"], "ChecksumCRC32": "AAAA"})
    answers.add_response(
        "complete_multipart_upload", {}, {**place, "UploadId": "7", "MultipartUpload": {"Parts": parts}}
    )

    write()

    answers.assert_no_pending_responses()


def test_an_object_of_too_many_parts(answers: Stubber, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    An object that no bucket could hold is refused with the limit.
    """
    monkeypatch.setattr("pagemill.s3_writer.MAX_PARTS", 1)
    answers.add_response("create_multipart_upload", {"UploadId": "7"})
    answers.add_response("upload_part", {"ETag": "part 1"})
    answers.add_response("abort_multipart_upload", {})

    with pytest.raises(ObjectStoreError, match="more than 1 parts of 8,388,608 bytes"):
        write(20_000_000)
    answers.assert_no_pending_responses()
