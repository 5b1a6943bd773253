"""Rows of the failure catalogue: what the queue's own housekeeping must not do."""

import threading
from importlib.resources import files
from typing import Any

import pytest
from redis import Redis

from pagemill.client import Client
from pagemill.keys import QueueKeys
from tests.support.servers import BlockingConsumer, MakeConsumer, a_job, wait_for


def test_row_13_nothing_depends_on_trimming() -> None:
    """
    Entries leave a lane one by one, by their id; only events and token streams are trimmed, about.
    """
    scripts = {path.name: path.read_text() for path in (files("pagemill") / "lua").iterdir()}
    trimming = {name for name, text in scripts.items() if "MAXLEN" in text}

    assert not any("XTRIM" in text or "'ACKED'" in text for text in scripts.values())
    assert {"ending.lua", "publish.lua"} == trimming


def test_row_14_tidying_races_with_readers(server_url: str, queue: str, consumer: MakeConsumer) -> None:
    """
    Consumers and streams are removed all the time while workers come, read and go: no job is lost.
    """
    jobs = [a_job(f"{number}", tenant=f"t{number % 3}") for number in range(90)]
    over = threading.Event()
    num_removed = 0

    def tidy() -> None:
        nonlocal num_removed
        sweeper = BlockingConsumer(server_url, queue, lease_ms=1)
        while not over.is_set():
            num_removed += sweeper.run(sweeper.consumer.sweep()).collected
        sweeper.close()

    sweeping = threading.Thread(target=tidy)
    sweeping.start()
    ended: list[str] = []
    try:
        with Client(server_url, queue=queue) as client:
            for start in range(0, len(jobs), 9):
                client.submit_many(jobs[start : start + 9])
                worker = consumer(lease_ms=30_000)
                held = worker.pull()
                assert {"done"} == set(worker.finish(*held))
                ended += [job.job_id for job in held]
                worker.run(worker.consumer.leave())
        wait_for(lambda: num_removed)
    finally:
        over.set()
        sweeping.join(20)

    assert sorted(job.id for job in jobs) == sorted(ended)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_row_16_a_long_pending_list_holds_nobody_up(client: Client, consumer: MakeConsumer, redis: Redis) -> None:
    """
    With 100,000 entries in the hands of workers no script of a sweep takes a tenth of a second.
    """
    tenants = [f"t{number}" for number in range(10)]
    for start in range(0, 100_000, 1000):
        client.submit_many([a_job(f"{number}", tenant=tenants[number % 10]) for number in range(start, start + 1000)])
    owner, dead, sweeper = consumer(), consumer(), consumer(lease_ms=200)
    while owner.pull(max_jobs=512, max_tokens=10**12):
        pass
    assert client.stats().running == 100_000
    client.submit(a_job("of the dead"))
    dead.pull()
    dead.run(dead.consumer.leave())
    redis.config_set("slowlog-log-slower-than", 100_000)
    redis.slowlog_reset()

    wait_for(lambda: sweeper.run(sweeper.consumer.sweep()).reclaimed, 60)

    assert [] == redis.slowlog_get(10)


def test_row_43_the_lag_is_never_unknown(client: Client, consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    Cancels, deadlines, hand-backs and ends leave the group's lag a number, which autoscalers read.
    """
    worker = consumer()
    waiting = client.submit_many([a_job(f"{number}") for number in range(6)])
    client.submit(a_job("late", timeout_s=0.001))
    first, second = worker.pull(max_jobs=2)
    client.cancel(waiting[4].job_id)
    wait_for(lambda: worker.run(worker.consumer.sweep()).expired)
    lags = [_lags(redis, queue)]
    worker.run(worker.consumer.release([first]))
    worker.finish(second)
    lags.append(_lags(redis, queue))
    worker.finish(*worker.pull())
    lags.append(_lags(redis, queue))

    # unread entries of jobs that have ended count until a worker passes them
    assert [[5], [1, 5], [0, 0]] == lags


def _lags(redis: Redis, queue: str) -> list[int]:
    groups: list[Any] = []
    for stream in sorted(redis.scan_iter(match=f"{QueueKeys(queue).base}:s:*")):
        groups += redis.xinfo_groups(stream)
    return [group["lag"] for group in groups]
