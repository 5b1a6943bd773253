"""A worker that has done a little of everything, and what it exports."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pagemill.client import Client
from producers.local_redis import local_redis
from tests.support.scrapes import Watched, scrape
from tests.support.servers import a_job
from tests.support.services import worker_process


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder: Path = tmp_path_factory.mktemp("watched")
    store = f"file://{folder}/store"
    flags = ("--engine", "fake", "--metrics-port", "0", "--metrics-tenants", "5", "--object-store", store)
    with (
        local_redis() as url,
        worker_process(folder / "log", "--redis-url", url, *flags) as worker,
        Client(url, object_store=store) as client,
    ):
        (port,) = (entry["port"] for entry in worker.events() if entry["event"] == "metrics.listening")
        jobs = [
            a_job("x", lane="interactive", timeout_s=60),
            a_job("y", lane="bulk", tenant="acme", result_store="object"),
        ]
        for accepted in client.submit_many(jobs):
            client.result(accepted.job_id, wait_s=30)
        yield Watched(port, scrape(port))
