"""TAKE_SUSPECTS: who runs suspects, and how they stay apart from all other jobs."""

import asyncio
import time
from collections.abc import Callable

from redis import Redis

from pagemill.calls import PULL_LOOKS
from pagemill.cli_status import job_lines, look, overview_lines
from pagemill.client import Client
from pagemill.connection import connect_async
from pagemill.consumer import Consumer
from pagemill.keys import QueueKeys
from pagemill.messages import Delivery, Renewal
from tests.support.servers import MakeConsumer, a_job, wait_for
from tests.support.suspects import Supervisor, ids, suspected, take


def test_suspects_come_in_halves(client: Client, consumer: MakeConsumer, supervisor: Supervisor) -> None:
    """
    Each half is one group, in the order in which the jobs had come; the first attempt still counts as none.
    """
    job_ids = suspected(client, consumer, supervisor, 5)
    worker = consumer()

    first = take(worker)
    assert ["done"] * 3 == worker.finish(*first)
    second = take(worker)
    worker.finish(*second)

    assert (job_ids[:3], job_ids[3:], []) == (ids(first), ids(second), take(worker))
    assert {(1, 0)} == {(job.attempt, job.lapses) for job in first + second}
    assert (0, 0) == (client.stats().suspects, client.stats().running)


def test_one_worker_isolates(client: Client, consumer: MakeConsumer, supervisor: Supervisor) -> None:
    """
    Of two workers that ask for suspects, one gets a group, and the next only when no other is left running.
    """
    suspected(client, consumer, supervisor, 4)
    first, second = consumer(), consumer()

    jobs, refused = take(first), take(second)
    waiting = [one.run(one.consumer.num_suspects_waiting()) for one in (first, second)]
    first.finish(*jobs)
    first.finish(*take(first))

    assert (2, 0, [2, 0]) == (len(jobs), len(refused), waiting)
    assert ([], []) == (take(first), take(second))


def test_of_many_that_ask_at_once_one_isolates(
    client: Client, consumer: MakeConsumer, supervisor: Supervisor, server_url: str, queue: str
) -> None:
    """
    However many workers race for the suspects, each group is one worker's, and no job is given to two.
    """
    job_ids = suspected(client, consumer, supervisor, 8)

    async def race() -> list[list[Delivery]]:
        connections = [connect_async(server_url) for _ in range(8)]
        rivals = [
            Consumer(redis, queue, worker_id=f"rival-{number}", lease_ms=30_000)
            for number, redis in enumerate(connections)
        ]
        taken = await asyncio.gather(*(rival.take_suspects() for rival in rivals))
        for redis in connections:
            await redis.aclose()
        return taken

    taken = asyncio.run(race())

    assert [job_ids[:4]] == [ids(jobs) for jobs in taken if jobs]
    assert (4, 4) == (client.stats().suspects, client.stats().running)


def test_a_full_server_still_gives_suspects_out(
    client: Client, consumer: MakeConsumer, supervisor: Supervisor, redis: Redis
) -> None:
    """
    A server that refuses all that grows takes an obituary and hands the suspects out, so that it can empty.
    """
    client.submit(a_job())
    dying, worker = consumer(), consumer()
    dying.pull()
    redis.config_set("maxmemory", 1)
    try:
        told, jobs = supervisor.report(dying), take(worker)
        outcomes = worker.finish(*jobs)
    finally:
        redis.config_set("maxmemory", 0)

    assert (1, ["done"]) == (told.suspects, outcomes)


def test_a_large_group_is_given_out_in_parts(client: Client, consumer: MakeConsumer) -> None:
    """
    No script hands out more than a pull may bring; the rest of the group is next.
    """
    num_jobs = 2 * PULL_LOOKS + 20
    client.submit_many([a_job(f"{number}") for number in range(num_jobs)])
    for _ in range(2):
        dead, peer = consumer(), consumer(lease_ms=20)
        dead.pull(max_jobs=num_jobs)
        dead.run(dead.consumer.leave())
        # all of them idle for a lease: one script takes them, and halves them
        time.sleep(0.05)
        assert num_jobs == wait_for(lambda: peer.run(peer.consumer.sweep()).reclaimed)  # noqa: B023
    worker, sizes = consumer(), []
    while jobs := take(worker):
        sizes.append(len(jobs))
        worker.finish(*jobs)

    assert [PULL_LOOKS, 10, PULL_LOOKS, 10] == sizes


def test_a_suspect_is_shown_as_one(
    server_url: str, queue: str, client: Client, consumer: MakeConsumer, supervisor: Supervisor
) -> None:
    """
    Its state is seen where all states are, and submitting it again finds it.
    """
    job = a_job()
    client.submit(job)
    worker = consumer()
    worker.pull()
    supervisor.report(worker, why="SIGSEGV in step 7")

    again = client.submit(job)

    assert ("suspect", True) == (again.state, again.duplicate)
    shown = "\n".join(job_lines(client.status(job.id)))
    assert "state     suspect" in shown
    assert "SIGSEGV in step 7" in shown
    assert "suspects 1, dead 0" in "\n".join(overview_lines(look(server_url, queue)))


def test_suspects_that_nobody_takes_are_seen(client: Client, consumer: MakeConsumer, supervisor: Supervisor) -> None:
    """
    A busy worker learns that suspects wait and no peer is free for them.
    """
    suspected(client, consumer, supervisor, 3)
    busy = consumer()

    assert 3 == busy.run(busy.consumer.num_suspects_waiting())


def test_the_right_to_isolate_runs_out(client: Client, consumer: MakeConsumer, supervisor: Supervisor) -> None:
    """
    When the worker that isolates falls silent, another goes on with the next group within a lease.
    """
    suspected(client, consumer, supervisor, 2)
    silent, peer = consumer(lease_ms=1000), consumer()
    take(silent)

    assert [] == take(peer)
    assert wait_for(lambda: take(peer), 20)


def test_signs_of_life_keep_the_right_to_isolate(
    client: Client, consumer: MakeConsumer, supervisor: Supervisor, redis: Redis, queue: str
) -> None:
    """
    Renewing a suspect and the heartbeat extend it; a renewal of other jobs does not.
    """
    suspected(client, consumer, supervisor, 2)
    worker = consumer()
    jobs = take(worker)
    lock = QueueKeys(queue).isolation

    def extended_by(sign: Callable[[], object]) -> bool:
        redis.pexpire(lock, 1000)
        sign()
        left: int = redis.pttl(lock)  # type: ignore[assignment]
        return left > 1000

    assert extended_by(lambda: worker.run(worker.consumer.renew(jobs)))
    assert extended_by(lambda: worker.run(worker.consumer.heartbeat({})))
    worker.finish(*jobs)
    client.submit(a_job("other"))
    [other] = worker.pull()
    assert not extended_by(lambda: worker.run(worker.consumer.renew([other])))


def test_leaving_gives_the_right_up(client: Client, consumer: MakeConsumer, supervisor: Supervisor) -> None:
    """
    A worker that drains while it isolates hands its group to whoever asks next.
    """
    job_ids = suspected(client, consumer, supervisor, 2)
    first, second = consumer(), consumer()
    jobs = take(first)
    first.run(first.consumer.release(jobs))
    first.run(first.consumer.leave())

    assert [job_ids[1:], job_ids[:1]] == [ids(found) for found in (take(second), take(second))]


def test_a_suspect_that_is_handed_back_stays_one(
    client: Client, consumer: MakeConsumer, supervisor: Supervisor
) -> None:
    """
    Neither a drain nor a pause, neither a lost worker nor a lost reply brings a suspect back into its lane.
    """
    [job_id] = suspected(client, consumer, supervisor, 1)
    worker = consumer()

    def again() -> tuple[str, int]:
        assert ([], "suspect") == (worker.pull(), client.status(job_id).state)
        [job] = take(worker)
        return job.job_id, job.attempt

    [job] = take(worker)
    worker.run(worker.consumer.release([job]))
    assert (job_id, 1) == again()
    supervisor.report(worker, "lapse")
    worker = consumer(lease_ms=20)
    assert (job_id, 1) == again()
    peer = consumer(lease_ms=20)
    wait_for(lambda: peer.run(peer.consumer.sweep()).reclaimed)
    worker = consumer()
    assert (job_id, 1) == again()


def test_a_suspect_that_is_put_off_stays_one(client: Client, consumer: MakeConsumer, supervisor: Supervisor) -> None:
    """
    After a retry's delay it waits among the suspects.
    """
    [job_id] = suspected(client, consumer, supervisor, 1)
    worker = consumer()
    [job] = take(worker)
    worker.run(worker.consumer.retry(job, delay_ms=0, why="store is down"))

    wait_for(lambda: worker.run(worker.consumer.sweep()).promoted)

    assert ([], [job_id]) == (worker.pull(), ids(take(worker)))


def test_a_waiting_suspect_can_be_cancelled(client: Client, consumer: MakeConsumer, supervisor: Supervisor) -> None:
    """
    It ends at once, and its group is run without it.
    """
    job_ids = suspected(client, consumer, supervisor, 3)

    states = [client.cancel(job_id) for job_id in job_ids[:2]]

    assert ["cancelled"] * 2 == states
    assert (1, job_ids[2:]) == (client.stats().suspects, ids(take(consumer())))


def test_a_running_suspect_hears_its_cancel(client: Client, consumer: MakeConsumer, supervisor: Supervisor) -> None:
    """
    As any job: by the renewal, and when it is handed back before.
    """
    first, second = suspected(client, consumer, supervisor, 2)
    worker = consumer()
    jobs = take(worker)
    client.cancel(first)

    assert Renewal(cancelled=frozenset({first})) == worker.run(worker.consumer.renew(jobs))
    worker.run(worker.consumer.release(jobs))
    assert ("cancelled", [second]) == (client.result(first, wait_s=0).status, ids(take(worker)))


def test_a_waiting_suspect_expires(
    client: Client, consumer: MakeConsumer, supervisor: Supervisor, redis: Redis
) -> None:
    """
    Its deadline goes on counting, for the sweep and for whoever takes its group.
    """
    swept = suspected(client, consumer, supervisor, 1, timeout_s=0.5)
    worker = consumer()
    wait_for(lambda: worker.run(worker.consumer.sweep()).expired)
    taken = suspected(client, consumer, supervisor, 1, timeout_s=0.5)
    deadline_ms = client.status(taken[0]).deadline_ms
    wait_for(lambda: redis.time()[0] * 1000 + redis.time()[1] // 1000 > deadline_ms)  # type: ignore[index]

    assert [] == take(worker)
    assert {"expired"} == {client.result(job_id, wait_s=0).status for job_id in swept + taken}
    assert (0, 0) == (client.stats().suspects, client.stats().running)


def test_suspects_of_a_cancelled_batch_end(
    client: Client, consumer: MakeConsumer, supervisor: Supervisor, redis: Redis, queue: str
) -> None:
    """
    Whoever takes or hands them back meets the cancel of the whole batch, before the sweep has come to them.
    """
    batch = client.create_batch().batch_id
    job_ids = suspected(client, consumer, supervisor, 2, batch=batch)
    worker = consumer()
    jobs = take(worker)
    redis.hset(f"{QueueKeys(queue).base}:b:{batch}", "cancel", "1")

    worker.run(worker.consumer.release(jobs))

    assert [] == take(worker)
    assert {"cancelled"} == {client.result(job_id, wait_s=0).status for job_id in job_ids}
    assert (2, 0) == (client.batch_status(batch).cancelled, client.stats().suspects)


def test_streams_of_suspects_go(
    client: Client, consumer: MakeConsumer, supervisor: Supervisor, redis: Redis, queue: str
) -> None:
    """
    When no suspect is left, sweeping removes their streams as it does all others.
    """
    suspected(client, consumer, supervisor, 2)
    worker = consumer(lease_ms=10)
    while jobs := take(worker):
        worker.finish(*jobs)

    sweeper = consumer(lease_ms=10)
    wait_for(lambda: sweeper.run(sweeper.consumer.sweep()) and not redis.keys(f"{QueueKeys(queue).base}:s:*"))
