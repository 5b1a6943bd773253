"""The real model over real documents, from a real S3-compatible server and back."""

from pathlib import Path

import pytest

from tests.e2e import summaries


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the run sets is gone afterwards."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "")


def test_documents_of_a_bucket_are_summarised(tmp_path: Path) -> None:
    """
    Two documents, short answers: read, asked about, and written back.
    """
    counts = summaries.run(tmp_path, documents=2, max_tokens=10)

    assert (2, 1, 2) == (counts["rows"], counts["shards"], counts["jobs"])
    assert counts["prompt_tokens"] > 200
    assert 0 < counts["completion_tokens"] <= 20


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_documents_and_a_long_one(tmp_path: Path) -> None:
    """
    All 24, and one of all their texts, which does not fit and is summarised part by part.
    """
    counts = summaries.run(tmp_path)

    assert (25, 4) == (counts["rows"], counts["shards"])
    assert counts["jobs"] >= 24 + 4
