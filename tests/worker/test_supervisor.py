"""Workers that die, with real processes and signals: what becomes of their jobs, and of the next worker."""

import os
import signal
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from redis import Redis

from pagemill.client import Client
from pagemill.schema import Job
from producers.local_redis import local_redis
from tests.support.processes import is_alive
from tests.support.servers import wait_for
from tests.support.services import RunningService, WorkerProcess, worker_process
from worker.fake_engine import FakeEngine
from worker.poison import DEATHS
from worker.supervisor import Child

# leases that no test lives to see the end of: what comes back sooner was handed back
FAKE = ("--engine", "fake", "--lease-s", "60", "--restart-s", "0.05", "--max-restart-s", "0.2")
POISON = (*FAKE, "--fake-poison")
# how long it takes to find out: where nothing hangs, a slow step is not to be taken for one that does
STEP_TIMEOUT_S = {"hang": "1", "freeze": "1"}

Flags = Callable[..., tuple[str, ...]]


@pytest.fixture
def at(server_url: str, queue: str) -> Flags:
    """Flags of a worker at the test's queue."""
    return lambda *flags: (*flags, "--redis-url", server_url, "--queue", queue)


def submit(client: Client, *prompts: str, max_tokens: int = 8) -> list[str]:
    jobs = [Job.build(prompt=prompt, options={"max_tokens": max_tokens, "seed": 1}) for prompt in prompts]
    return [accepted.job_id for accepted in client.submit_many(jobs)]


def deaths(worker: WorkerProcess) -> list[str]:
    """Why its processes died, one after the other."""
    return [event["why"] for event in worker.events() if event["event"] == "supervisor.worker_died"]


@pytest.mark.parametrize("death", sorted(DEATHS))
def test_a_job_that_kills_its_worker_is_a_dead_letter_and_others_are_answered(
    at: Flags, client: Client, tmp_path: Path, death: str
) -> None:
    """
    However the process ends: the job that does it is found out, by two deaths while it was alone.
    """
    innocent, poison = submit(client, "innocent", f"poison:{death}")
    flags = (*POISON, "--step-timeout-s", STEP_TIMEOUT_S.get(death, "60"))
    with worker_process(tmp_path / "log", *at(*flags)) as worker:
        results = {job_id: client.result(job_id, wait_s=60) for job_id in (innocent, poison)}
        wait_for(lambda: len(deaths(worker)) == 3)
        worker.send(signal.SIGTERM)
        assert 0 == worker.wait()

    assert "done" == results[innocent].status
    failure = results[poison].failure
    assert failure is not None
    assert "poison" == failure.code
    assert deaths(worker)[2] in failure.message
    assert [(poison, "poison")] == [(letter.job_id, letter.why) for letter in client.dead_letters()]


def test_one_poison_among_many_is_the_only_dead_letter(at: Flags, client: Client, tmp_path: Path) -> None:
    """
    Suspects are halved with each death: 16 jobs take five until the one is alone, and one more.
    """
    prompts = [f"innocent {number}" for number in range(15)]
    *innocents, poison = submit(client, *prompts, "poison:segv")
    with worker_process(tmp_path / "log", *at(*POISON)) as worker:
        results = [client.result(job_id, wait_s=90) for job_id in innocents]
        assert "failed" == client.result(poison, wait_s=60).status
        wait_for(lambda: len(deaths(worker)) == 6)

    assert {("done", 1)} == {(result.status, result.attempt) for result in results}
    assert [poison] == [letter.job_id for letter in client.dead_letters()]


def test_a_worker_that_is_killed_from_outside_gives_its_jobs_back_at_once(
    at: Flags, server_url: str, queue: str, client: Client, tmp_path: Path
) -> None:
    """
    SIGKILL says nothing of the jobs: they go on elsewhere within a second of the death, as if nothing had been.
    """
    with worker_process(tmp_path / "log", *at(*FAKE, "--fake-tokens-per-s", "50")) as worker:
        (job_id,) = submit(client, "long", max_tokens=4000)
        wait_for(lambda: client.status(job_id).state == "running")
        engine = worker.engine_pid
        with RunningService(server_url, queue, engine=FakeEngine(tokens_per_s=50)) as peer:
            worker.send_worker(signal.SIGKILL)
            wait_for(lambda: client.status(job_id).worker == peer.worker_id)
            elsewhere_s = datetime.now().timestamp() - died_at(worker)
            status = client.status(job_id)
            client.cancel(job_id)
        # and the worker itself is back
        wait_for(lambda: len(client.workers()) == 1, 30)

    assert elsewhere_s < 1.0
    assert ("running", 1) == (status.state, status.attempt)
    assert ["ended from outside by SIGKILL"] == deaths(worker)
    assert not is_alive(engine)
    assert 0 == client.stats().totals.get("suspected", 0)


def test_an_engine_that_is_killed_from_outside_takes_its_worker_along(
    at: Flags, client: Client, tmp_path: Path
) -> None:
    """
    That says as little of the jobs: they are no suspects, and the next worker answers them.
    """
    with worker_process(tmp_path / "log", *at(*FAKE, "--fake-tokens-per-s", "200")) as worker:
        (job_id,) = submit(client, "long", max_tokens=600)
        wait_for(lambda: client.status(job_id).state == "running")
        os.kill(worker.engine_pid, signal.SIGKILL)
        result = client.result(job_id, wait_s=60)

    assert ("done", 1) == (result.status, result.attempt)
    assert ["the engine's process was ended from outside by SIGKILL"] == deaths(worker)
    assert 0 == client.stats().totals.get("suspected", 0)


def test_the_next_worker_starts_when_all_of_the_last_one_is_gone() -> None:
    """
    What a worker has started holds the supervisor's pipe: its engine may keep the device when the worker has ended.
    """
    # flags follow, which this shell takes for its arguments
    child = Child(["sh", "-c", "sleep 1 & exit 3"])
    wait_for(child.end)

    assert not child.all_gone
    wait_for(lambda: child.all_gone)
    child.close()


def died_at(worker: WorkerProcess) -> float:
    (event,) = (event for event in worker.events() if event["event"] == "supervisor.worker_died")
    return datetime.fromisoformat(event["timestamp"]).timestamp()


def test_a_worker_that_cannot_start_ends_its_supervisor(queue: str, tmp_path: Path) -> None:
    """
    The message and the code are the worker's, it is not tried again, and no job is touched.
    """
    unsafe = local_redis(options=("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"))
    with unsafe as url, Client(url, queue=queue) as client:
        (job_id,) = submit(client, "waits")
        with worker_process(tmp_path / "log", *FAKE, "--redis-url", url, "--queue", queue) as worker:
            assert 1 == worker.wait()
        status = client.status(job_id)

    last = worker.events()[-1]
    assert ("worker.not_started", 1) == (last["event"], last["code"])
    assert last["why"].startswith("the server's eviction policy is allkeys-lru")
    assert 1 == sum(event["event"] == "supervisor.started" for event in worker.events())
    assert ("queued", 0) == (status.state, status.attempt)


def test_a_worker_does_not_outlive_its_supervisor(at: Flags, client: Client, tmp_path: Path) -> None:
    """
    Killed with SIGKILL, a supervisor takes its worker along, which hands its jobs back without waiting for them.
    """
    with worker_process(tmp_path / "log", *at(*FAKE, "--drain-s", "600", "--fake-tokens-per-s", "50")) as worker:
        (job_id,) = submit(client, "long", max_tokens=4000)
        wait_for(lambda: client.status(job_id).state == "running")
        pid = worker.worker_pid
        worker.send(signal.SIGKILL)
        wait_for(lambda: not is_alive(pid))

    assert ("queued", 0) == (client.status(job_id).state, client.status(job_id).attempt)


def test_a_signal_to_both_processes_drains_and_does_not_hurry(at: Flags, client: Client, tmp_path: Path) -> None:
    """
    Service managers send SIGTERM to all processes of a service: the worker that hears it twice finishes its jobs.
    """
    with worker_process(tmp_path / "log", *at(*FAKE, "--drain-s", "60", "--fake-tokens-per-s", "100")) as worker:
        (job_id,) = submit(client, "three seconds long", max_tokens=300)
        wait_for(lambda: any(int(fields.get("generated_tokens", 0)) for fields in client.workers().values()))
        worker.send_worker(signal.SIGTERM)
        worker.send(signal.SIGTERM)
        assert 0 == worker.wait()

    assert "done" == client.status(job_id).state
    assert not worker.has_logged("drain.hurried")


def test_ctrl_c_reaches_the_supervisor_alone(at: Flags, tmp_path: Path) -> None:
    """
    The worker is in a session of its own, so that the terminal does not interrupt it a second time.
    """
    with worker_process(tmp_path / "log", *at(*FAKE)) as worker:
        assert os.getsid(worker.worker_pid) == worker.worker_pid
        worker.send(signal.SIGINT)
        assert 0 == worker.wait()


def test_a_death_is_told_when_the_server_is_back(queue: str, tmp_path: Path) -> None:
    """
    While the server does not answer the supervisor goes on trying, and the job runs once it does.
    """
    with local_redis() as url, Client(url, queue=queue) as client, Redis.from_url(url) as redis:
        server = int(redis.info("server")["process_id"])
        flags = (*FAKE, "--redis-url", url, "--queue", queue)
        with worker_process(tmp_path / "log", *flags, "--fake-tokens-per-s", "50") as worker:
            (job_id,) = submit(client, "long", max_tokens=150)
            wait_for(lambda: client.status(job_id).state == "running")
            os.kill(server, signal.SIGSTOP)
            try:
                worker.send_worker(signal.SIGKILL)
                wait_for(lambda: worker.has_logged("supervisor.report_failed"))
            finally:
                os.kill(server, signal.SIGCONT)
            wait_for(lambda: worker.has_logged("supervisor.reported"))
            result = client.result(job_id, wait_s=60)

    assert ("done", 1) == (result.status, result.attempt)
