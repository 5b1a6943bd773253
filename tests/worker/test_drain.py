"""The end of a worker: what happens to its jobs, with real processes and signals."""

import asyncio
import signal
import time
from pathlib import Path

import pytest
from redis import Redis

from pagemill.client import Client
from pagemill.consumer import Consumer
from pagemill.schema import Job
from tests.support.jobs import expected_texts, submitted
from tests.support.servers import wait_for
from tests.support.services import RunningService, worker_process
from worker.fake_engine import FakeEngine

FAKE = ("--engine", "fake", "--lease-s", "5")


def test_sigterm_finishes_what_runs_and_hands_back_what_waits(
    server_url: str, queue: str, client: Client, tmp_path: Path
) -> None:
    """
    Within its grace time a worker ends its running jobs, gives the others back, and exits with 0.
    """
    flags = (*FAKE, "--redis-url", server_url, "--queue", queue, "--max-num-seqs", "2", "--fake-tokens-per-s", "100")
    with worker_process(tmp_path / "log", *flags) as worker:
        jobs = submitted(client, 12, max_tokens=100)
        wait_for(lambda: _generated(client) > 0)
        worker.send(signal.SIGTERM)
        assert 0 == worker.wait()
        states = [client.status(job.id).state for job in jobs]
        handed_back = [event["which"] for event in worker.events() if event["event"] == "drain.handed_back"]

    assert {"done", "queued"} == set(states)
    assert ["unstarted"] == handed_back
    assert {1} == {client.result(job.id).attempt for job in jobs if client.status(job.id).state == "done"}


def test_what_waits_is_with_another_worker_while_the_first_still_drains(
    server_url: str, queue: str, client: Client, tmp_path: Path
) -> None:
    """
    Jobs that had not started go back at the signal, not at the end of the grace time.
    """
    flags = (*FAKE, "--redis-url", server_url, "--queue", queue, "--max-num-seqs", "1", "--fake-tokens-per-s", "20")
    with worker_process(tmp_path / "log", *flags, "--drain-s", "60") as worker:
        jobs = submitted(client, 4, max_tokens=1000)
        wait_for(lambda: client.stats().running == 4 and _generated(client) > 0)
        worker.send(signal.SIGTERM)
        with RunningService(server_url, queue) as peer:
            wait_for(lambda: peer.service.num_done == 3)
            assert worker.running
            assert 1 == client.stats().running
    assert 3 == sum(client.status(job.id).state == "done" for job in jobs)


def test_what_does_not_fit_the_grace_time_goes_on_elsewhere(
    server_url: str, queue: str, client: Client, tmp_path: Path
) -> None:
    """
    A running job that is handed back keeps its tokens: the next worker computes only the rest.
    """
    flags = (*FAKE, "--redis-url", server_url, "--queue", queue, "--fake-tokens-per-s", "200", "--drain-s", "0.3")
    with worker_process(tmp_path / "log", *flags) as worker:
        jobs = submitted(client, 1, max_tokens=3000)
        wait_for(lambda: client.workers() and _generated(client) >= 50)
        worker.send(signal.SIGTERM)
        assert 0 == worker.wait()
        handed_back = [event for event in worker.events() if event["event"] == "drain.handed_back"]
    assert [("running", 1)] == [(event["which"], event["released"]) for event in handed_back]

    with RunningService(server_url, queue) as peer:
        result = client.result(jobs[0].id, wait_s=20)
        computed = peer.engine.stats().generated_tokens

    assert expected_texts(jobs) == [result.text]
    assert computed <= 3000 - 50
    assert 1 == result.attempt


def test_a_second_signal_skips_the_waiting(server_url: str, queue: str, client: Client, tmp_path: Path) -> None:
    """
    Told twice, a worker hands back its running jobs at once.
    """
    flags = (*FAKE, "--redis-url", server_url, "--queue", queue, "--fake-tokens-per-s", "10", "--drain-s", "600")
    with worker_process(tmp_path / "log", *flags) as worker:
        jobs = submitted(client, 2, max_tokens=1000)
        wait_for(lambda: client.stats().running == 2 and _generated(client) > 0)
        worker.send(signal.SIGTERM)
        wait_for(lambda: worker.has_logged("drain.started"))
        worker.send(signal.SIGTERM)
        assert 0 == worker.wait()

    assert ["queued", "queued"] == [client.status(job.id).state for job in jobs]


@pytest.mark.parametrize("silent", ["renew", "release", "leave"])
def test_a_silent_server_does_not_keep_a_worker(
    server_url: str, queue: str, client: Client, silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A call on the way out that is not answered is given up: the leases run out.
    """

    async def never(*_: object, **__: object) -> None:
        await asyncio.sleep(600)

    for module in ("drain", "returns", "service"):
        monkeypatch.setattr(f"worker.{module}.FLUSH_S", 0.2)
    with RunningService(server_url, queue, drain_s=0, engine=FakeEngine(tokens_per_s=1000)) as service:
        submitted(client, 1, max_tokens=8000)
        wait_for(lambda: client.stats().running == 1 and service.engine.stats().generated_tokens)
        monkeypatch.setattr(Consumer, silent, never)
        began = time.monotonic()
    assert time.monotonic() - began < 5
    assert service.error is None


def test_a_step_that_hangs_does_not_hold_up_a_worker_in_a_hurry(
    server_url: str, queue: str, client: Client, tmp_path: Path
) -> None:
    """
    Told twice, a worker ends an engine that does not answer, long before its step counts as hung, and hands
    the jobs back: nobody is to blame.
    """
    flags = (*FAKE, "--redis-url", server_url, "--queue", queue, "--fake-poison", "--drain-s", "600")
    with worker_process(tmp_path / "log", *flags) as worker:
        (accepted,) = client.submit_many([Job.build(prompt="poison:hang")])
        # a beat that tells of the job comes after the engine has got it
        wait_for(lambda: [1] == [int(fields["held"]) for fields in client.workers().values()])
        worker.send(signal.SIGTERM)
        wait_for(lambda: worker.has_logged("drain.started"))
        worker.send(signal.SIGTERM)
        assert 0 == worker.wait(60)
        assert worker.has_logged("drain.engine_killed")

    assert ("queued", 0) == (client.status(accepted.job_id).state, client.status(accepted.job_id).attempt)


def test_a_killed_workers_jobs_continue_from_their_checkpoint(
    server_url: str, queue: str, client: Client, redis: Redis, tmp_path: Path
) -> None:
    """
    After a kill, a peer takes the job when the lease has run out, and computes from the last checkpoint.
    """
    flags = ("--engine", "fake", "--lease-s", "1.5", "--redis-url", server_url, "--queue", queue)
    with worker_process(tmp_path / "log", *flags, "--fake-tokens-per-s", "300") as worker:
        jobs = submitted(client, 1, max_tokens=4000)
        key = f"{{pagemill:{queue}}}:ck:{jobs[0].id}"
        wait_for(lambda: redis.strlen(key) >= 4 * 400)
        worker.kill()
    with RunningService(server_url, queue, lease_s=1.5) as peer:
        result = client.result(jobs[0].id, wait_s=20)
        computed = peer.engine.stats().generated_tokens

    assert expected_texts(jobs) == [result.text]
    assert computed <= 4000 - 300
    # the job did nothing wrong: a lapse is no attempt
    assert 1 == result.attempt


def test_a_checkpoint_of_another_model_is_not_used(server_url: str, queue: str, client: Client, redis: Redis) -> None:
    """
    A worker with another fingerprint starts from the prompt.
    """
    jobs = submitted(client, 1, max_tokens=3000)
    with RunningService(server_url, queue, engine=FakeEngine(tokens_per_s=300), lease_s=0.6, drain_s=0.0) as first:
        key = f"{{pagemill:{queue}}}:ck:{jobs[0].id}"
        wait_for(lambda: redis.strlen(key) > 0)
        first.stop()
    other = FakeEngine()
    other.fingerprint = "another"
    with RunningService(server_url, queue, engine=other):
        result = client.result(jobs[0].id, wait_s=20)

    assert expected_texts(jobs) == [result.text]
    assert 3000 == other.stats().generated_tokens


def _generated(client: Client) -> int:
    return max((int(fields.get("generated_tokens", 0)) for fields in client.workers().values()), default=0)
