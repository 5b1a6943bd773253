"""A queue that a worker with the fake engine serves, and batch files on it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagemill.bulk_client import BulkClient
from producers.batch_file.local import Summary, run_file
from producers.batch_file.plan import Order
from tests.support.servers import is_routed, wait_for
from tests.support.services import RunningService

RunFile = Callable[..., Summary]


@pytest.fixture
def client(server_url: str, queue: str) -> Iterator[BulkClient]:
    with BulkClient(server_url, queue=queue) as client:
        yield client


@pytest.fixture
def service(server_url: str, queue: str) -> Iterator[RunningService]:
    """A worker of the test's queue, once its model is known."""
    with RunningService(server_url, queue) as service:
        wait_for(lambda: is_routed(server_url))
        yield service


@pytest.fixture
def run(client: BulkClient, tmp_path: Path) -> RunFile:
    """Runs a file of the test's folder into `out.jsonl` and `out.errors.jsonl`."""

    def run_it(source: Path, *, on_turn: Callable[[Any], object] = lambda _: None, **fields: Any) -> Summary:
        order = replace(Order(str(source), rows_per_chunk=8), **fields)
        output, errors = tmp_path / "out.jsonl", tmp_path / "out.errors.jsonl"
        return run_file(order, str(output), str(errors), client, on_turn=on_turn)

    return run_it
