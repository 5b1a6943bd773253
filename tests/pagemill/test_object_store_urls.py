"""Which URLs are of an object store."""

import pytest

from pagemill.errors import SettingsError
from pagemill.object_store import open_store


@pytest.mark.parametrize(
    "url",
    [
        *(
            "",
            "folder",
            "file://host/folder",
            "s3://",
            "s3://b?colour=red",
            "gs://b",
            "s3://[b",
            "s3://b?endpoint=host:1",
        ),
        *("s3://b?endpoint=http://host:99999", "s3://b?endpoint=http://[host", "s3://b?endpoint=http://"),
    ],
)
def test_a_url_that_is_no_store(url: str) -> None:
    """
    A place that cannot be a store is refused with what can.
    """
    with pytest.raises(SettingsError):
        open_store(url)


@pytest.mark.parametrize(
    "url",
    [
        *(
            "s3://key:hunter2@bucket/prefix",
            "s3://key:hunter2/3@bucket/prefix",
            "s3://key:hunter2℀@bucket",
            "s3://key:hunter2@[bucket]",
            "https://key:hunter2@host/bucket",
            "file://key:hunter2@host/folder",
        ),
        *(
            f"s3://bucket?endpoint={start}key:{odd}hunter2@host:1"
            for start in ("", "http://")
            for odd in ("", "a/", "1%23")
        ),
    ],
)
def test_keys_in_a_url_are_refused_and_not_shown(url: str) -> None:
    """
    They would stand in the URLs of objects, and in the errors of the store.
    """
    with pytest.raises(SettingsError, match="boto3 finds them") as caught:
        open_store(url)

    assert "hunter2" not in str(caught.value)
