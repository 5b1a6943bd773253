"""A queue that a worker with the fake engine serves, and bulk jobs on it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pagemill.bulk_client import BulkClient
from producers.bulk.spec import BulkSpec
from tests.support.servers import wait_for
from tests.support.services import RunningService

MakeSpec = Callable[..., BulkSpec]


@pytest.fixture
def client(server_url: str, queue: str) -> Iterator[BulkClient]:
    with BulkClient(server_url, queue=queue) as client:
        yield client


@pytest.fixture
def service(server_url: str, queue: str, client: BulkClient) -> Iterator[RunningService]:
    """A worker of the test's queue, once it shows its tokenizer."""
    with RunningService(server_url, queue) as service:
        wait_for(lambda: client.workers() and client.tokenizer_json())
        yield service


@pytest.fixture
def make_spec(tmp_path: Path) -> MakeSpec:
    """Makes bulk jobs from `documents.jsonl` into `out`, both in the test's folder."""

    def make(**fields: Any) -> BulkSpec:
        usual = {
            "input": str(tmp_path / "documents.jsonl"),
            "output": (tmp_path / "out").as_uri(),
            "options": {"max_tokens": 8},
            "rows_per_chunk": 16,
        }
        return BulkSpec.build(usual | fields)

    return make
