"""The service and payloads in an object store, which may be away or have lost them."""

import time
from pathlib import Path

import pytest

from pagemill.client import Client
from pagemill.errors import StoreAway
from pagemill.object_store import FileStore
from tests.support.servers import wait_for
from tests.support.services import RunningService
from tests.support.unchecked import submit_unchecked
from worker.retries import POLICIES, Fault, Policy


def test_a_missing_payload_is_a_failure_of_its_job(server_url: str, queue: str, tmp_path: Path, client: Client) -> None:
    """
    A job whose payload is not in the store any more fails as lost, without a retry.
    """
    store = FileStore(tmp_path)
    ref = store.put("payloads/gone", b"x")
    store.delete(ref)
    submit_unchecked(server_url, queue, f"{queue}-gone", b"", ref=ref)
    with RunningService(server_url, queue, store=store):
        result = client.result(f"{queue}-gone", wait_s=20)

    assert ("failed", "lost_payload") == (result.status, result.failure and result.failure.code)


class AwayStore(FileStore):
    """Cannot be reached until it is told to come back."""

    away = True
    num_refused = 0

    def get_range(self, url: str, start: int, length: int) -> bytes:
        if self.away:
            self.num_refused += 1
            raise StoreAway("slow down")
        return super().get_range(url, start, length)


def store_one(client_store: FileStore, url: str, queue: str, *, name: str = "far") -> str:
    """Submit a job whose payload lies in the store; returns its id."""
    ref = client_store.put("jobs/one", b'{"version":1,"prompt":"far","options":{"max_tokens":4}}')
    submit_unchecked(url, queue, f"{queue}-{name}", b"", ref=ref)
    return f"{queue}-{name}"


def soon(max_retries: int = 1000) -> dict[Fault, Policy]:
    """Hardly any pause."""
    return {fault: Policy(base_s=0.01, cap_s=0.01, max_retries=max_retries) for fault in POLICIES}


def test_a_store_that_is_away_costs_no_attempt(server_url: str, queue: str, tmp_path: Path, client: Client) -> None:
    """
    A job waits for its payload however often it cannot be read, and jobs beside it are answered.
    """
    store = AwayStore(tmp_path)
    job_id = store_one(store, server_url, queue)
    with RunningService(server_url, queue, store=store, policies=soon(), max_attempts=2, lease_s=1.0):
        wait_for(lambda: store.num_refused > 5)
        near = client.submit(prompt="near", options={"max_tokens": 4}).job_id
        assert "done" == client.result(near, wait_s=20).status
        store.away = False
        result = client.result(job_id, wait_s=20)

    assert ("done", 1) == (result.status, result.attempt)


def test_a_store_that_stays_away_ends_the_job(server_url: str, queue: str, tmp_path: Path, client: Client) -> None:
    """
    After many tries the job fails, and the message says that its payload could not be read.
    """
    store = AwayStore(tmp_path)
    job_id = store_one(store, server_url, queue)
    with RunningService(server_url, queue, store=store, policies=soon(max_retries=2), lease_s=1.0):
        failure = client.result(job_id, wait_s=20).failure

    assert failure is not None
    assert ("lost_payload", 3) == (failure.code, store.num_refused)
    assert "the job is given up after 3 tries: slow down" == failure.message


def test_a_job_that_is_put_off_is_in_nobodys_hands(server_url: str, queue: str, tmp_path: Path, client: Client) -> None:
    """
    It waits in the queue, with the reason, until the server's clock says that it is due: no worker keeps it.
    """
    store = AwayStore(tmp_path)
    job_id = store_one(store, server_url, queue)
    patient = {fault: Policy(base_s=1e6, cap_s=1e6, max_retries=9) for fault in POLICIES}
    with RunningService(server_url, queue, store=store, policies=patient):
        wait_for(lambda: client.status(job_id).state == "delayed")
    status = client.status(job_id)

    assert ("delayed", "slow down", 0) == (status.state, status.reason, status.attempt)
    assert "cancelled" == client.cancel(job_id)


def test_a_store_that_is_away_is_not_asked_for_the_whole_backlog(
    server_url: str, queue: str, tmp_path: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    When many jobs have been put off, those that wait in the lanes stay there in their order.
    """
    monkeypatch.setattr("worker.service.MAX_UNWRITTEN", 20)
    store = AwayStore(tmp_path)
    jobs = [store_one(store, server_url, queue, name=f"far-{number}") for number in range(200)]
    patient = {fault: Policy(base_s=1e6, cap_s=1e6, max_retries=9) for fault in POLICIES}
    with RunningService(server_url, queue, store=store, policies=patient):
        wait_for(lambda: client.stats().delayed > 20)
        time.sleep(0.5)
        stats = client.stats()

    assert stats.delayed + stats.queued["standard"] + stats.running == 200
    assert stats.queued["standard"] > 60
    for job_id in jobs:
        client.cancel(job_id)


def test_a_sweep_deletes_payloads_of_jobs_that_no_worker_ended(
    server_url: str, queue: str, tmp_path: Path, client: Client
) -> None:
    """
    The payload of a job that was cancelled in the queue leaves the store.
    """
    store = FileStore(tmp_path)
    client.cancel(store_one(store, server_url, queue))
    assert (tmp_path / "jobs" / "one").exists()
    with RunningService(server_url, queue, store=store, lease_s=0.6):
        wait_for(lambda: not (tmp_path / "jobs" / "one").exists())
