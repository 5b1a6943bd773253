"""
Many jobs through one queue and one worker, and whether anything grows.

    python -m benchmarks.soak --jobs 1000000

The worker has the fake engine at full speed. Jobs are submitted as earlier ones are answered, a
bounded number at a time; each result is forgotten once it is read. Two thousand times the
resident memory of the worker and the server's `used_memory` are read; `growth` compares the
medians of the last tenth with that of the tenth before the middle. At the end no key may be left
but those that keys.py names. One JSON line; exits with 1 where a bound is broken.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis import Redis

from benchmarks.worker_process import running_worker
from pagemill.client import Client
from pagemill.keys import QueueKeys, is_permanent
from pagemill.schema import Job, Options
from producers.local_redis import local_redis

QUEUE = "soak"
# most that the last half may add
MAX_GROWTH = 0.01

_SAMPLES = 2000
_WAIT_S = 120.0
_BATCH = 500


@dataclass(slots=True)
class Memory:
    """Readings over the run: how many jobs had ended, and bytes."""

    num_done: list[int] = field(default_factory=list)
    worker: list[int] = field(default_factory=list)
    server: list[int] = field(default_factory=list)

    def growth(self, readings: Sequence[int], num_jobs: int) -> float:
        """Of the last tenth over the tenth before the middle, 0.01 for one part in a hundred."""

        def median(start: float, stop: float) -> float:
            pairs = zip(self.num_done, readings, strict=True)
            return statistics.median(value for done, value in pairs if start * num_jobs <= done <= stop * num_jobs)

        return median(0.9, 1.0) / median(0.4, 0.5) - 1


def make_jobs(num_jobs: int, prompt_chars: int, max_tokens: int) -> Iterator[Job]:
    for number in range(num_jobs):
        yield Job(prompt=f"{number:>{prompt_chars}}", options=Options(max_tokens=max_tokens))


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and of those that it has started."""
    pages = 0
    for process in (pid, *_children(pid)):
        try:
            with open(f"/proc/{process}/statm") as file:
                pages += int(file.read().split()[1])
        except FileNotFoundError:
            continue
    return pages * 4096


def _children(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(child) for child in file.read().split()]
    except FileNotFoundError:
        return []


def soak(args: argparse.Namespace) -> dict[str, Any]:
    """Run all jobs and return the line."""
    flags = ("--engine", "fake", "--fake-tokens-per-s", "1000000", "--max-num-seqs", "64", "--log-level", "warning")
    memory = Memory()
    with local_redis() as url, Redis.from_url(url, protocol=2) as redis, Client(url, queue=QUEUE) as client:
        with running_worker(url, flags, queue=QUEUE) as worker:
            begin = time.perf_counter()
            num_wrong = _run(client, redis, worker.child.pid, memory, args)
            took = time.perf_counter() - begin
            _wait_for_sweep(redis)
        left = _keys_left(redis)
    growths = {
        "worker": round(memory.growth(memory.worker, args.jobs), 5),
        "server": round(memory.growth(memory.server, args.jobs), 5),
    }
    return {
        "soak": args.jobs,
        "seconds": round(took, 1),
        "jobs_s": round(args.jobs / took, 1),
        "wrong": num_wrong,
        "worker_mb": round(memory.worker[-1] / 1e6, 1),
        "server_mb": round(memory.server[-1] / 1e6, 2),
        "growth_of_last_half": growths,
        "keys_left": left,
    }


def _run(client: Client, redis: Redis, pid: int, memory: Memory, args: argparse.Namespace) -> int:
    """Submit, read and forget all jobs, with readings between; returns how many did not end well."""
    jobs = make_jobs(args.jobs, args.prompt_chars, args.max_tokens)
    open_ids: list[str] = []
    num_done = num_wrong = 0
    while num_done < args.jobs:
        while len(open_ids) < args.in_flight and (batch := list(itertools.islice(jobs, _BATCH))):
            open_ids += [accepted.job_id for accepted in client.submit_many(batch)]
        due, open_ids = open_ids[:_BATCH], open_ids[_BATCH:]
        for result in client.finished(due, wait_s=_WAIT_S):
            num_wrong += result.status != "done"
            client.forget(result.job_id)
        num_done += len(due)
        if num_done * _SAMPLES // args.jobs > len(memory.num_done):
            memory.num_done.append(num_done)
            memory.worker.append(resident_bytes(pid))
            memory.server.append(redis.info("memory")["used_memory"])
    return num_wrong


def _wait_for_sweep(redis: Redis) -> None:
    """The sweeper strikes off the streams that have nothing in workers' hands any more."""
    deadline = time.monotonic() + _WAIT_S
    while redis.exists(f"{QueueKeys(QUEUE).base}:pending") and time.monotonic() < deadline:
        time.sleep(0.1)


def _keys_left(redis: Redis) -> list[str]:
    """Keys that neither expire nor are named as permanent."""
    base = QueueKeys(QUEUE).base
    names = (key.decode() for key in redis.scan_iter(match=f"{base}:*", count=1000))
    return sorted(name for name in names if not is_permanent(name) and redis.ttl(name) < 0)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1_000_000)
    parser.add_argument("--in-flight", type=int, default=4000, help="jobs that are submitted and not read yet")
    parser.add_argument("--prompt-chars", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=16)
    line = soak(parser.parse_args(argv))
    print(json.dumps(line), flush=True)
    grown = any(growth >= MAX_GROWTH for growth in line["growth_of_last_half"].values())
    return int(grown or bool(line["wrong"]) or bool(line["keys_left"]))


if __name__ == "__main__":
    sys.exit(main())
