"""
Kills, stops and pauses workers while they work, and counts the results.

    python -m tests.chaos.driver --jobs 3000 --workers 3 --lease 2 --seed 1

Workers are real processes with the fake engine and a real server between them. Every fraction
of a second one of them is killed, told to drain, or paused for longer than its lease; those
that ended are started again. At the end each accepted job must have exactly one result with
the text that an undisturbed run gives, and nothing may be left in the queue. Prints one line
of JSON and exits with 1 where anything is wrong.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from redis import Redis

from engine.request import Request
from engine.sampling_params import SamplingParams
from pagemill.client import Client
from pagemill.keys import QueueKeys
from pagemill.schema import Job
from producers.local_redis import local_redis
from tests.support.servers import leaked_keys, wait_for
from tests.support.services import WorkerProcess
from worker.fake_engine import ByteTokenizer, FakeEngine

QUEUE = "chaos"
MAX_TOKENS = 60

# one worker: 16 jobs at a time, most of a second each
WORKER_FLAGS = ("--engine", "fake", "--queue", QUEUE, "--max-num-seqs", "16", "--fake-tokens-per-s", "1200")


@dataclass(slots=True)
class Report:
    """What was done to the workers, and what came of it."""

    jobs: int
    workers: int
    lease_s: float
    seed: int
    seconds: float = 0.0
    kills: int = 0
    drains: int = 0
    pauses: int = 0
    starts: int = 0
    reclaimed: int = 0
    released: int = 0
    fenced: int = 0
    taken_over: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.faults


class Fleet:
    """Worker processes that are meant to be disturbed."""

    def __init__(self, url: str, folder: Path, report: Report, draw: random.Random) -> None:
        self._flags = (*WORKER_FLAGS, "--redis-url", url, "--lease-s", str(report.lease_s), "--drain-s", "0.5")
        self._folder = folder
        self._report = report
        self._draw = draw
        self._paused: dict[int, float] = {}
        self._due = ["drain", "pause", "kill"]
        self.workers = [self._start() for _ in range(report.workers)]

    def disturb(self) -> None:
        """Let a fault happen to one worker that has come up."""
        place = self._draw.randrange(len(self.workers))
        worker = self.workers[place]
        if place in self._paused or not worker.has_logged("worker.started"):
            return
        # each kind once, and then as it comes
        fault = self._due.pop() if self._due else self._draw.choices(("kill", "drain", "pause"), (4, 3, 3))[0]
        if fault == "kill":
            self._report.kills += 1
            worker.kill()
        elif fault == "drain":
            self._report.drains += 1
            worker.send(signal.SIGTERM)
        else:
            self._report.pauses += 1
            worker.send_worker(signal.SIGSTOP)
            self._paused[place] = time.monotonic() + self._report.lease_s * self._draw.uniform(1.1, 2.0)

    def mend(self) -> None:
        """Wake those whose pause is over and start those that have ended again."""
        for place, until in list(self._paused.items()):
            if time.monotonic() >= until:
                self.workers[place].send_worker(signal.SIGCONT)
                del self._paused[place]
        for place, worker in enumerate(self.workers):
            if not worker.running:
                self.workers[place] = self._start()

    def drain(self) -> list[int]:
        """End all in good order; returns their exit codes."""
        for place in self._paused:
            self.workers[place].send_worker(signal.SIGCONT)
        for worker in self.workers:
            wait_for(lambda worker=worker: worker.has_logged("worker.started") or not worker.running, 30)
            worker.send(signal.SIGTERM)
        return [worker.wait(30) for worker in self.workers]

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()

    def _start(self) -> WorkerProcess:
        self._report.starts += 1
        return WorkerProcess(self._folder / f"worker-{self._report.starts}.log", *self._flags)


def chaos(
    jobs: int, workers: int, lease_s: float, seed: int, *, timeout_s: float = 600.0, server: Path | None = None
) -> Report:
    """
    Run all jobs under faults and check what came out.

    Args:
        server: The program of the server; by default what `local_redis` finds.
    """
    report = Report(jobs, workers, lease_s, seed)
    draw = random.Random(seed)
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="pagemill-chaos-") as folder,
        local_redis(binary=server) as url,
        Redis.from_url(url, protocol=2) as redis,
        Client(url, queue=QUEUE) as client,
    ):
        submitted = [_job(number) for number in range(jobs)]
        client.submit_many(submitted)
        fleet = Fleet(url, Path(folder), report, draw)
        try:
            while _num_ended(client) < jobs and time.monotonic() - started < timeout_s:
                fleet.mend()
                fleet.disturb()
                time.sleep(draw.uniform(0.3, 1.2))
            codes = fleet.drain()
        finally:
            fleet.kill()
        report.seconds = round(time.monotonic() - started, 1)
        report.faults += [f"a drained worker ended with {code}" for code in codes if code != 0]
        _check_results(client, redis, submitted, report)
        _check_queue(client, redis, report)
    return report


def _job(number: int) -> Job:
    return Job.build(prompt=f"prompt number {number}", options={"max_tokens": MAX_TOKENS, "seed": number})


def _num_ended(client: Client) -> int:
    totals = client.stats().totals
    return sum(totals.get(state, 0) for state in ("done", "failed", "cancelled", "expired"))


def _check_results(client: Client, redis: Redis, jobs: Sequence[Job], report: Report) -> None:
    ends = Counter(fields[b"j"].decode() for _, fields in redis.xrange(QueueKeys(QUEUE).events))
    several = sum(1 for count in ends.values() if count > 1)
    missing = sum(1 for job in jobs if job.id not in ends)
    if several or missing or len(ends) != len(jobs):
        report.faults.append(f"{len(jobs)} jobs: {len(ends)} ended, {several} of them several times, {missing} missing")
    wrong = 0
    for job, text in zip(jobs, expected_texts(jobs), strict=True):
        if job.id in ends:
            result = client.result(job.id)
            wrong += (result.status, result.text) != ("done", text)
            report.taken_over += redis.hget(QueueKeys(QUEUE).job(job.id), "lapses") is not None
    if wrong:
        report.faults.append(f"{wrong} results differ from those of an undisturbed run")


def _check_queue(client: Client, redis: Redis, report: Report) -> None:
    keys = QueueKeys(QUEUE)
    stats = client.stats()
    totals = stats.totals
    report.reclaimed, report.released, report.fenced = (
        totals.get(name, 0) for name in ("reclaimed", "released", "fenced")
    )
    for stream in redis.scan_iter(match=f"{keys.base}:s:*"):
        length, pending = redis.xlen(stream), redis.xpending(stream, "workers")["pending"]
        if length or pending:
            report.faults.append(f"{stream.decode()} has {length} entries, {pending} pending")
    if stats.running or any(stats.queued.values()) or stats.delayed:
        report.faults.append(f"the counters say that work is left: {stats}")
    report.faults += [f"key {name} would stay for ever" for name in leaked_keys(redis, QUEUE)]


def expected_texts(jobs: Sequence[Job]) -> list[str]:
    """What the fake engine answers when nothing disturbs it."""
    engine, tokenizer = FakeEngine(kv_tokens=1 << 40, max_num_seqs=len(jobs)), ByteTokenizer()
    for job in jobs:
        params = SamplingParams(max_tokens=job.options.max_tokens, seed=job.options.seed or 0)
        engine.add(Request(job.id, tokenizer.encode(str(job.prompt)), params))
    texts = {output.request_id: output.completions[0].text for output in engine.step().finished}
    return [texts[job.id] for job in jobs]


def main() -> int:
    parser = argparse.ArgumentParser(description="Disturb workers and count the results.")
    parser.add_argument("--jobs", type=int, default=3000)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--lease", type=float, default=2.0, help="seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which it has failed")
    flags = parser.parse_args()
    report = chaos(flags.jobs, flags.workers, flags.lease, flags.seed, timeout_s=flags.timeout)
    print(json.dumps(asdict(report) | {"ok": report.ok}))
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
