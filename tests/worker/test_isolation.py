"""Suspects at a worker: they run with nothing beside them, on one worker, while the others go on."""

import asyncio
from collections.abc import Callable

import pytest
from redis import Redis

from pagemill.client import Client
from pagemill.connection import connect
from pagemill.consumer import Consumer
from pagemill.keys import QueueKeys
from pagemill.messages import Delivery
from pagemill.obituary import report_death
from pagemill.schema import Job
from tests.support.servers import MakeConsumer, wait_for
from tests.support.services import RunningService
from worker.fake_engine import FakeEngine
from worker.isolation import Isolation


def submit(client: Client, *prompts: str, max_tokens: int = 10) -> list[str]:
    jobs = [Job.build(prompt=prompt, options={"max_tokens": max_tokens}) for prompt in prompts]
    return [accepted.job_id for accepted in client.submit_many(jobs)]


@pytest.fixture
def suspects(server_url: str, queue: str, client: Client, consumer: MakeConsumer) -> Callable[..., list[str]]:
    """Jobs whose worker has crashed while it held them: one group of each half."""

    def make(number: int, *, max_tokens: int = 10) -> list[str]:
        submit(client, *(f"suspect {index}" for index in range(number)), max_tokens=max_tokens)
        dead = consumer()
        # at a queue that had others before, it is some of these
        jobs = dead.pull(max_jobs=number)
        with connect(server_url) as redis:
            report_death(redis, queue, dead.worker_id, cause="crash", why="SIGSEGV")
        return [job.job_id for job in jobs]

    return make


def states(client: Client, jobs: list[str]) -> list[str]:
    return [client.status(job_id).state for job_id in jobs]


def test_a_group_runs_alone_and_then_all_else_runs(
    server_url: str, queue: str, client: Client, redis: Redis, suspects: Callable[..., list[str]]
) -> None:
    """
    A worker takes suspects before it pulls, one group at a time, and pulls nothing until none are left.
    """
    suspected = suspects(4, max_tokens=60)
    others = submit(client, "a", "b")
    seen: set[tuple[int, int, int]] = set()
    with RunningService(server_url, queue, engine=FakeEngine(tokens_per_s=100)):
        while client.stats().totals.get("done", 0) < 6:
            with redis.pipeline() as at_once:
                for job_id in (*suspected, *others):
                    at_once.hget(QueueKeys(queue).job(job_id), "st")
                now = at_once.execute()
            seen.add((now[:2].count(b"running"), now[2:4].count(b"running"), now[4:].count(b"running")))

    assert {"done"} == set(states(client, [*suspected, *others]))
    beside = {groups for groups in seen if sum(map(bool, groups)) > 1}
    assert set() == beside
    assert {(2, 0, 0), (0, 2, 0)} <= seen


def test_one_worker_isolates_and_another_goes_on(
    server_url: str, queue: str, client: Client, suspects: Callable[..., list[str]]
) -> None:
    """
    While a worker is busy with suspects, its peer takes none of them, and answers all other jobs.
    """
    suspected = suspects(2, max_tokens=4000)
    with RunningService(server_url, queue, engine=FakeEngine(tokens_per_s=20), drain_s=0.0):
        wait_for(lambda: "running" in states(client, suspected))
        with RunningService(server_url, queue):
            for job_id in submit(client, *(f"other {index}" for index in range(20))):
                assert "done" == client.result(job_id, wait_s=20).status
        assert ["running", "suspect"] == sorted(states(client, suspected))


def test_a_drained_worker_leaves_suspects_as_such(
    server_url: str, queue: str, client: Client, suspects: Callable[..., list[str]]
) -> None:
    """
    What is handed back while it is suspected is still so, and the next worker runs it apart.
    """
    suspected = suspects(2, max_tokens=400)
    with RunningService(server_url, queue, engine=FakeEngine(tokens_per_s=20), drain_s=0.0):
        wait_for(lambda: "running" in states(client, suspected))
    assert ["suspect", "suspect"] == states(client, suspected)

    with RunningService(server_url, queue):
        assert {"done"} == {client.result(job_id, wait_s=20).status for job_id in suspected}


def test_a_busy_worker_makes_room_for_suspects(
    server_url: str, queue: str, client: Client, suspects: Callable[..., list[str]]
) -> None:
    """
    Where no worker ever comes to hold nothing, one stops pulling after some leases, and runs them.
    """
    with RunningService(server_url, queue, engine=FakeEngine(tokens_per_s=400, max_num_seqs=2), lease_s=0.6):
        # there is always one more
        submit(client, *(f"bulk {index}" for index in range(400)), max_tokens=50)
        wait_for(lambda: client.stats().running)
        suspected = suspects(4)
        assert {"done"} == {client.result(job_id, wait_s=30).status for job_id in suspected}
        # and not because all else was done
        assert client.stats().queued["standard"]


class Waiting(Consumer):
    """Says what the test wants of waiting suspects."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self.groups: list[list[Delivery]] = []

    async def num_suspects_waiting(self) -> int:
        return self.num_waiting

    async def take_suspects(self) -> list[Delivery]:
        return self.groups.pop() if self.groups else []


def test_patience_is_some_leases_and_ends_with_the_wait() -> None:
    """
    A worker looks on for two leases and a share of two more, from when it first saw them wait.
    """
    now, consumer = [0.0], Waiting()
    isolation = Isolation(consumer, lease_s=10.0, clock=lambda: now[0], draw=lambda: 0.5)
    closed = []
    for now[0], consumer.num_waiting in ((0.0, 0), (5.0, 3), (34.9, 3), (35.1, 2), (40.0, 0), (80.0, 4)):
        asyncio.run(isolation.look())
        closed.append(isolation.closed(num_held=1))

    assert [False, False, False, True, False, False] == closed
    now[0] = 120.0
    assert isolation.closed(num_held=1)
    assert not isolation.closed(num_held=0)

    # somebody else was quicker
    assert [] == asyncio.run(isolation.take())
    assert not isolation.closed(num_held=1)
