"""
Faults of the network and the server while workers work, and a count of the results.

The workers are threads of this process, each behind a proxy of its own: a network that is away for
longer than a lease makes a zombie of one, as a pause does. Beside that connections are cut, replies
are lost, and the server is killed and started again from its append-only file. Jobs are submitted
until each kind of fault has happened, and one that has not is a fault of the run.
"""

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Self

from pagemill.client import Client
from pagemill.keys import QueueKeys
from pagemill.messages import TERMINAL_STATES
from pagemill.schema import Job
from tests.chaos.audit import Audit, audit
from tests.support.jobs import seeded_jobs
from tests.support.redis_process import RedisProcess
from tests.support.servers import wait_for
from tests.support.services import RunningService
from tests.support.tcp_proxy import TcpProxy, lose_replies_of
from worker.fake_engine import FakeEngine

QUEUE = "network-chaos"
LEASE_S = 0.8
MAX_TOKENS = 60
# what every worker calls again and again, whatever its jobs do
SCRIPTS = ("pull", "renew", "finish", "heartbeat", "lock")

# jobs that are waiting while a fault has yet to happen
_WORK_LEFT = 40
# for a fault to happen, and for the last job to end
_PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class _Worker:
    proxy: TcpProxy
    service: RunningService

    @property
    def busy(self) -> bool:
        return self.service.engine.stats().num_running > 0


class _Feed:
    """Jobs, of which some wait for as long as a fault has yet to happen."""

    def __init__(self, server: RedisProcess, num_jobs: int) -> None:
        self.jobs: list[Job] = []
        self._connect(server)
        self.submit(num_jobs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def move_to(self, server: RedisProcess) -> None:
        """Another is the master."""
        self._client.close()
        self._connect(server)

    def submit(self, number: int) -> list[Job]:
        more = seeded_jobs(number, MAX_TOKENS, first=len(self.jobs))
        self._client.submit_many(more)
        self.jobs += more
        return more

    def submit_all_again(self) -> None:
        self._client.submit_many(self.jobs)

    def until(self, happened: Callable[[], object]) -> bool:
        """Keep work waiting until something has happened; False where it does not."""
        deadline = time.monotonic() + _PATIENCE_S
        while not (done := happened()) and time.monotonic() < deadline:
            if sum(self._client.stats().queued.values()) < _WORK_LEFT:
                self.submit(_WORK_LEFT)
            time.sleep(0.02)
        return bool(done)

    def num(self, total: str) -> int:
        return self._client.stats().totals.get(total, 0)

    def await_all(self) -> None:
        wait_for(lambda: self.num("done") >= len(self.jobs), _PATIENCE_S)

    def faults(self) -> list[str]:
        found = Audit()
        audit(self._client, self.server.client, QUEUE, self.jobs, found)
        return found.faults

    def _connect(self, server: RedisProcess) -> None:
        self.server = server
        self._client = Client(server.url, queue=QUEUE)


def network_chaos(server: RedisProcess, *, num_jobs: int, seed: int) -> list[str]:
    """Run all jobs under faults of the network and the server; returns what is wrong with what came out."""
    draw = random.Random(seed)
    with _Feed(server, num_jobs) as feed:
        with _workers(server.url, 3) as workers:
            faults = _cut_off(feed, workers, draw)
            faults += _lose_a_sweep(feed, workers)
            faults += _lose_replies(feed, workers, draw)
            faults += _restart(feed, workers, draw)
            faults += _cut(feed, workers, draw)
            feed.await_all()
        return faults + feed.faults()


def failover_chaos(first: RedisProcess, second: RedisProcess, *, num_jobs: int, seed: int) -> list[str]:
    """
    Let replicas take over that lack the last moments, twice, while jobs come in and run.

    Producers submit everything again in the end, under the same ids, as they do where an answer is missing.
    """
    draw = random.Random(seed)
    faults: list[str] = []
    master, replica = first, second
    replica.follow(master)
    with _Feed(master, num_jobs) as feed:
        with _workers(master.url, 2) as workers:
            for _ in range(2):
                faults += _let_replica_lag(feed, master, replica, workers, draw)
                master.kill()
                for worker in workers:
                    worker.proxy.point_at(replica.url)
                master, replica = replica, master
                feed.move_to(master)
                replica.start()
                replica.follow(master)
            feed.submit_all_again()
            feed.await_all()
        return faults + feed.faults()


@contextmanager
def _workers(url: str, number: int) -> Iterator[list[_Worker]]:
    """Workers, each behind a proxy of its own; they drain in the end."""
    with ExitStack() as stack:
        proxies = [stack.enter_context(TcpProxy(url)) for _ in range(number)]
        workers = []
        for proxy in proxies:
            engine = FakeEngine(tokens_per_s=1200.0, max_num_seqs=8)
            service = RunningService(proxy.url, QUEUE, engine=engine, lease_s=LEASE_S)
            workers.append(_Worker(proxy, stack.enter_context(service)))
        yield workers


def _cut_off(feed: _Feed, workers: Sequence[_Worker], draw: random.Random) -> list[str]:
    """A worker's network is away until its jobs have been taken from it."""
    worker = draw.choice(workers)
    before = feed.num("reclaimed")
    feed.until(lambda: worker.busy)
    with worker.proxy.holding():
        happened = feed.until(lambda: feed.num("reclaimed") > before)
        time.sleep(LEASE_S * draw.uniform(0.0, 0.4))
    return [] if happened else ["nothing was taken from a worker that was cut off"]


def _lose_a_sweep(feed: _Feed, workers: Sequence[_Worker]) -> list[str]:
    """Whoever sweeps, a reply to it is lost."""
    for worker in workers:
        lose_replies_of(worker.proxy, "reclaim")
    happened = feed.until(lambda: any(worker.proxy.num_replies_lost for worker in workers))
    for worker in workers:
        worker.proxy.heal()
    return [] if happened else ["no sweep was without a reply"]


def _lose_replies(feed: _Feed, workers: Sequence[_Worker], draw: random.Random) -> list[str]:
    """Scripts of one worker are carried out and not answered, some without a sign."""
    proxy = draw.choice(workers).proxy
    before = proxy.num_replies_lost
    for name in SCRIPTS:
        lose_replies_of(proxy, name, silently=draw.random() < 0.3)
    happened = feed.until(lambda: proxy.num_replies_lost == before + len(SCRIPTS))
    return [] if happened else [f"of {len(SCRIPTS)} replies {proxy.num_replies_lost - before} were lost"]


def _restart(feed: _Feed, workers: Sequence[_Worker], draw: random.Random) -> list[str]:
    """The server is killed while all work, and started again."""
    happened = feed.until(lambda: all(worker.busy for worker in workers))
    feed.server.kill()
    time.sleep(draw.uniform(0.0, 0.3))
    feed.server.start()
    return [] if happened else ["the server was killed when nobody worked"]


def _cut(feed: _Feed, workers: Sequence[_Worker], draw: random.Random) -> list[str]:
    """All connections of a worker end."""
    worker = draw.choice(workers)
    happened = feed.until(lambda: worker.busy and worker.proxy.cut())
    return [] if happened else ["no connection was cut"]


def _let_replica_lag(
    feed: _Feed, master: RedisProcess, replica: RedisProcess, workers: Sequence[_Worker], draw: random.Random
) -> list[str]:
    """From some moment on the replica hears nothing of what is submitted and finished."""
    time.sleep(draw.uniform(0.1, 0.4))
    feed.until(lambda: all(worker.busy for worker in workers))
    replica.lead()
    more = feed.submit(20)
    time.sleep(draw.uniform(0.0, 0.4))
    happened = feed.until(lambda: _open_there(_ended(master), replica))
    if not happened or any(_state(replica, job.id) for job in more):
        return ["the replica lacked nothing"]
    return []


def _open_there(job_ids: Iterable[str], replica: RedisProcess) -> bool:
    """Whether a replica knows any of these jobs and not its end."""
    states = [_state(replica, job_id) for job_id in job_ids]
    return any(state is not None and state not in TERMINAL_STATES for state in states)


def _state(server: RedisProcess, job_id: str) -> str | None:
    state = server.client.hget(QueueKeys(QUEUE).job(job_id), "st")
    return None if state is None else state.decode()


def _ended(server: RedisProcess) -> set[str]:
    """Jobs whose end it has told."""
    events = server.client.xrange(QueueKeys(QUEUE).events)
    return {fields[b"j"].decode() for _, fields in events if b"j" in fields}
