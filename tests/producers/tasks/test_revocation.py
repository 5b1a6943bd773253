"""Celery's revoke reaches jobs: which ids are heard, and what is tried again."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pagemill.client import Client
from producers.tasks.ids import job_id_of
from producers.tasks.revocation import Canceller, hear_revokes
from tests.support.redis_process import RedisProcess
from tests.support.servers import a_job, wait_for


class Active:
    """Tasks that a worker has in its hands, as the test says."""

    def __init__(self) -> None:
        self.tasks: set[str] = set()
        self.asked = 0

    def __call__(self, task_id: str) -> bool:
        self.asked += 1
        return task_id in self.tasks


@pytest.fixture
def active() -> Active:
    return Active()


@pytest.fixture
def canceller(server_url: str, queue: str, active: Active) -> Iterator[Canceller]:
    stop = threading.Event()
    made = Canceller(Client(server_url, queue=queue), stop, is_active=active)
    made.start()
    yield made
    stop.set()
    made.join(10)


@pytest.mark.parametrize(
    ("command", "args", "kwargs"),
    [
        ("revoke", (), {"task_id": "a", "terminate": False, "signal": "SIGTERM"}),
        ("revoke", (), {"task_id": ["a", "b"]}),
        ("revoke", (["a", "b"],), {}),
        ("revoke", (), {"task_id": [7, None, 10**150]}),
        ("terminate", (), {"signal": "KILL", "task_id": ["a"]}),
        ("terminate", ("KILL", "a"), {}),
    ],
)
def test_what_is_revoked_is_heard(command: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """
    Each way in which Celery calls its commands, one id or many; the command itself goes on and answers.
    """
    called: list[Any] = []
    heard: list[str] = []

    def original(state: Any, *args: Any, **kwargs: Any) -> dict[str, str]:
        called.append((state, args, kwargs))
        return {"ok": "flagged"}

    commands = {"revoke": original, "terminate": original}
    hear_revokes(heard.extend, commands)

    assert {"ok": "flagged"} == commands[command]("state", *args, **kwargs)
    assert [("state", args, kwargs)] == called
    ids = kwargs.get("task_id", args[-1] if args else None)
    assert [str(one) for one in (ids if isinstance(ids, list) else [ids])] == heard
    assert all(job_id_of(one) for one in heard)


def test_the_jobs_of_revoked_tasks_end(canceller: Canceller, client: Client) -> None:
    """
    Tasks that have no job, of other services say, are passed over.
    """
    client.submit(a_job(id=job_id_of("mine")))

    canceller.cancel(["somebody's", "mine"])

    wait_for(lambda: client.status(job_id_of("mine")).state == "cancelled")


def test_a_task_that_is_about_to_submit_is_cancelled_then(canceller: Canceller, client: Client, active: Active) -> None:
    """
    A revoke may come while its task is on its way: it is tried until the task has left this worker.
    """
    active.tasks.add("mine")
    canceller.cancel(["mine"])
    wait_for(lambda: active.asked >= 2)

    client.submit(a_job(id=job_id_of("mine")))

    wait_for(lambda: client.status(job_id_of("mine")).state == "cancelled")


def test_a_server_that_is_away_delays_a_revoke(tmp_path: Any, active: Active) -> None:
    """
    It is tried again when the server is back.
    """
    stop = threading.Event()
    with RedisProcess(tmp_path / "redis") as server, Client(server.url, queue="q") as client:
        client.submit(a_job(id=job_id_of("mine")))
        server.stop()
        canceller = Canceller(Client(server.url, queue="q"), stop, is_active=active)
        canceller.start()
        canceller.cancel(["mine"])
        wait_for(lambda: active.asked >= 2, 30)
        server.start()

        wait_for(lambda: client.status(job_id_of("mine")).state == "cancelled", 30)
        stop.set()
        canceller.join(10)
