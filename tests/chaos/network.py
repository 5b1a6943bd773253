"""
Faults of the network and the server while workers work, and a count of the results.

The workers are threads of this process, each behind a proxy of its own: a network that is away for
longer than a lease makes a zombie of one, as a pause does. Beside that connections are cut, replies
are lost, and the server is killed and started again from its append-only file.
"""

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from redis import Redis

from pagemill.client import Client
from pagemill.keys import QueueKeys
from pagemill.schema import Job
from pagemill.scripts import load
from tests.chaos.driver import expected_texts
from tests.support.redis_process import RedisProcess
from tests.support.servers import leaked_keys, wait_for
from tests.support.services import RunningService
from tests.support.tcp_proxy import TcpProxy
from worker.fake_engine import FakeEngine

QUEUE = "network-chaos"
LEASE_S = 0.8
SCRIPTS = ("pull", "renew", "finish", "heartbeat", "release", "reclaim", "lock")


def network_chaos(server: RedisProcess, *, num_jobs: int, seed: int) -> list[str]:
    """Run all jobs under faults of the network and the server; returns what is wrong with what came out."""
    draw = random.Random(seed)
    jobs = _jobs(num_jobs)
    with Client(server.url, queue=QUEUE) as client:
        client.submit_many(jobs)
        with _workers(server.url, 3) as proxies:
            for fault in ("partition", "lose", "restart", "cut"):
                _let_happen(fault, server, proxies, draw)
            wait_for(lambda: _num_done(client) >= num_jobs, 30)
        return [*_wrong_results(client, server.client, jobs), *_left_behind(client, server.client)]


def failover_chaos(first: RedisProcess, second: RedisProcess, *, num_jobs: int, seed: int) -> list[str]:
    """
    Let replicas take over that lack the last moments, twice, while jobs come in and run.

    Producers submit everything again in the end, under the same ids, as they do where an answer is missing.
    """
    draw = random.Random(seed)
    jobs = _jobs(num_jobs)
    master, replica = first, second
    replica.follow(master)
    parts = [jobs[place::3] for place in range(3)]
    with _workers(master.url, 2) as proxies:
        for part in parts[:2]:
            _submit(master, part)
            time.sleep(draw.uniform(0.1, 0.4))
            # from here on it hears nothing of what is submitted and finished
            replica.lead()
            _submit(master, part[: num_jobs // 6] + parts[2][: num_jobs // 9])
            time.sleep(draw.uniform(0.1, 0.6))
            master.kill()
            for proxy in proxies:
                proxy.point_at(replica.url)
            master, replica = replica, master
            replica.start()
            replica.follow(master)
        _submit(master, jobs)
        with Client(master.url, queue=QUEUE) as client:
            wait_for(lambda: _num_done(client) >= num_jobs, 30)
    with Client(master.url, queue=QUEUE) as client:
        return [*_wrong_results(client, master.client, jobs), *_left_behind(client, master.client)]


def _jobs(number: int) -> list[Job]:
    return [Job.build(prompt=f"prompt number {n}", options={"max_tokens": 60, "seed": n}) for n in range(number)]


@contextmanager
def _workers(url: str, number: int) -> Iterator[list[TcpProxy]]:
    """Workers, each behind a proxy of its own; they drain in the end."""
    with ExitStack() as stack:
        proxies = [stack.enter_context(TcpProxy(url)) for _ in range(number)]
        for proxy in proxies:
            engine = FakeEngine(tokens_per_s=1200.0, max_num_seqs=8)
            stack.enter_context(RunningService(proxy.url, QUEUE, engine=engine, lease_s=LEASE_S))
        yield proxies


def _submit(server: RedisProcess, jobs: Sequence[Job]) -> None:
    with Client(server.url, queue=QUEUE) as client:
        client.submit_many(jobs)


def _let_happen(fault: str, server: RedisProcess, proxies: Sequence[TcpProxy], draw: random.Random) -> None:
    time.sleep(draw.uniform(0.05, 0.2))
    proxy = draw.choice(proxies)
    if fault == "cut":
        proxy.cut()
    elif fault == "lose":
        for name in SCRIPTS:
            proxy.lose_reply(load(name).sha.encode(), silently=draw.random() < 0.3)
        time.sleep(0.3)
    elif fault == "restart":
        server.kill()
        time.sleep(draw.uniform(0.0, 0.3))
        server.start()
    else:
        with proxy.holding():
            time.sleep(LEASE_S * draw.uniform(1.1, 1.6))


def _num_done(client: Client) -> int:
    return client.stats().totals.get("done", 0)


def _wrong_results(client: Client, redis: Redis, jobs: Sequence[Job]) -> list[str]:
    ends = Counter(fields[b"j"].decode() for _, fields in redis.xrange(QueueKeys(QUEUE).events) if b"j" in fields)
    faults = [f"{job_id} ended {count} times" for job_id, count in ends.items() if count > 1]
    faults += [f"{job.id} has not ended" for job in jobs if job.id not in ends]
    for job, text in zip(jobs, expected_texts(jobs), strict=True):
        result = client.result(job.id, wait_s=0)
        if (result.status, result.text) != ("done", text):
            faults.append(f"{job.id} ended as {result.status} with {result.text!r}, not {text!r}")
    return faults


def _left_behind(client: Client, redis: Redis) -> list[str]:
    stats = client.stats()
    faults = [f"key {name} would stay for ever" for name in leaked_keys(redis, QUEUE)]
    if stats.running or any(stats.queued.values()) or stats.delayed:
        faults.append(f"the counters say that work is left: {stats}")
    lengths = {stream.decode(): redis.xlen(stream) for stream in redis.scan_iter(match=f"{QueueKeys(QUEUE).base}:s:*")}
    return faults + [f"{stream} has {length} entries" for stream, length in lengths.items() if length]
