"""
Kills, stops, pauses and poisons workers while they work, restarts the server, and counts the results.

    python -m tests.chaos.driver --jobs 20000 --workers 4 --lease 2 --poison 6 --restarts 2

Workers are real processes with the fake engine, under their supervisors, and a real server between
them that writes every change to its append-only file. Every now and then one of the workers is
killed, alone or with its supervisor, told to drain, or paused for longer than its lease; those that
ended are started again. Some jobs kill whoever runs them. At the end each accepted job must have
exactly one result with the text that an undisturbed run gives, the dead letters must be the poison
and nothing else, and nothing may be left in the queue. Where the jobs end before each kind of fault
has happened, more are submitted. Prints one line of JSON and exits with 1 where anything is wrong,
or where the jobs of a worker that was ended ran elsewhere too late.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from redis import Redis

from engine.request import Request
from engine.sampling_params import SamplingParams
from pagemill.client import Client
from pagemill.errors import QueueUnavailable
from pagemill.keys import QueueKeys
from pagemill.schema import Job
from tests.chaos.fleet import Fleet
from tests.chaos.report import Report
from tests.chaos.resumes import Resumes
from tests.support.redis_process import RedisProcess
from tests.support.servers import leaked_keys
from worker.fake_engine import ByteTokenizer, FakeEngine

QUEUE = "chaos"
MAX_TOKENS = 60
POISONS = ("segv", "raise", "exit", "hang", "cuda")

# one worker: 16 jobs at a time, half a second each
WORKER_FLAGS = (
    *("--engine", "fake", "--queue", QUEUE, "--max-num-seqs", "16", "--fake-tokens-per-s", "2000"),
    *("--fake-poison", "--step-timeout-s", "5", "--restart-s", "0.1"),
)
_LOOK_S = 0.05

# jobs that are waiting while a kind of fault has yet to happen
_WORK_LEFT = 100


def chaos(
    jobs: int,
    workers: int,
    lease_s: float,
    seed: int,
    *,
    poison: int = 0,
    restarts: int = 0,
    every_s: tuple[float, float] = (0.3, 1.2),
    timeout_s: float = 600.0,
    server: Path | None = None,
) -> Report:
    """
    Run all jobs under faults and check what came out.

    Args:
        poison: Jobs among them that kill their worker.
        restarts: How often the server is killed and started again, evenly over the jobs.
        every_s: Between two faults.
        server: The program of the server; by default what `find_server` finds.
    """
    report = Report(jobs, workers, lease_s, seed, poison=poison)
    draw = random.Random(seed)
    submitted = make_jobs(jobs, poison, draw)
    started = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pagemill-chaos-")))
        redis_server = stack.enter_context(RedisProcess(folder / "redis", binary=server))
        client = stack.enter_context(Client(redis_server.url, queue=QUEUE))
        client.submit_many(submitted)
        resumes = Resumes(redis_server.client, QUEUE, report.longest_resume_s, lease_s=lease_s)
        fleet = Fleet((*WORKER_FLAGS, "--redis-url", redis_server.url), folder, report, resumes, draw)
        try:
            run = _Run(client, redis_server, fleet, resumes, submitted, draw)
            run.until_all_ended(restarts, every_s, started + timeout_s)
            report.jobs, report.server_restarts = len(submitted), run.restarts
            codes = fleet.drain()
        finally:
            fleet.kill()
        report.seconds = round(time.monotonic() - started, 1)
        report.faults += [f"a drained worker ended with {code}" for code in codes if code != 0]
        _check_results(client, redis_server.client, submitted, report)
        _check_queue(client, redis_server.client, report)
    return report


class _Run:
    """The time in which faults happen."""

    def __init__(
        self,
        client: Client,
        server: RedisProcess,
        fleet: Fleet,
        resumes: Resumes,
        jobs: list[Job],
        draw: random.Random,
    ) -> None:
        self._client, self._server, self._fleet, self._resumes = client, server, fleet, resumes
        self._jobs, self._draw = jobs, draw
        self.restarts = 0

    def until_all_ended(self, restarts: int, every_s: tuple[float, float], deadline: float) -> None:
        restarts_at = [len(self._jobs) * (number + 1) // (restarts + 1) for number in range(restarts)]
        next_fault = 0.0
        while (num_left := len(self._jobs) - _num_ended(self._client)) > 0 and time.monotonic() < deadline:
            if restarts_at and len(self._jobs) - num_left >= restarts_at[0]:
                del restarts_at[0]
                self._restart_server()
            if self._fleet.has_faults_due and num_left < _WORK_LEFT:
                self._submit_more()
            self._fleet.mend()
            if time.monotonic() >= next_fault:
                self._fleet.disturb()
                next_fault = time.monotonic() + self._draw.uniform(*every_s)
            self._resumes.look()
            time.sleep(_LOOK_S)

    def _submit_more(self) -> None:
        more = [_job(number) for number in range(len(self._jobs), len(self._jobs) + _WORK_LEFT)]
        self._client.submit_many(more)
        self._jobs += more

    def _restart_server(self) -> None:
        self.restarts += 1
        self._server.kill()
        time.sleep(self._draw.uniform(0.2, 1.0))
        self._server.start()
        self._resumes.forget()


def make_jobs(num_jobs: int, num_poison: int, draw: random.Random) -> list[Job]:
    """Jobs with their seeds; the poison lies anywhere among them."""
    places = dict(zip(draw.sample(range(num_jobs), num_poison), range(num_poison), strict=True))
    return [
        _job(number, f"poison:{POISONS[places[number] % len(POISONS)]}") if number in places else _job(number)
        for number in range(num_jobs)
    ]


def _job(number: int, prompt: str = "") -> Job:
    options = {"max_tokens": MAX_TOKENS, "seed": number}
    return Job.build(prompt=prompt or f"prompt number {number}", options=options)


def is_poison(job: Job) -> bool:
    return str(job.prompt).startswith("poison:")


def _num_ended(client: Client) -> int:
    try:
        totals = client.stats().totals
    except QueueUnavailable:
        return 0
    return sum(totals.get(state, 0) for state in ("done", "failed", "cancelled", "expired"))


def _check_results(client: Client, redis: Redis, jobs: Sequence[Job], report: Report) -> None:
    ends = Counter(fields[b"j"].decode() for _, fields in redis.xrange(QueueKeys(QUEUE).events) if b"j" in fields)
    report.results = len(ends)
    report.duplicated = sum(1 for count in ends.values() if count > 1)
    report.missing = sum(1 for job in jobs if job.id not in ends)
    if report.duplicated or report.missing or len(ends) != len(jobs):
        report.faults.append(
            f"{len(jobs)} jobs: {len(ends)} ended, {report.duplicated} of them several times, {report.missing} missing"
        )
    good = [job for job in jobs if not is_poison(job)]
    wrong = 0
    for job, text in zip(good, expected_texts(good), strict=True):
        if job.id in ends:
            result = client.result(job.id)
            wrong += (result.status, result.text) != ("done", text)
            report.taken_over += redis.hget(QueueKeys(QUEUE).job(job.id), "lapses") is not None
    if wrong:
        report.faults.append(f"{wrong} results differ from those of an undisturbed run")
    _check_dead(client, jobs, report)


def _check_dead(client: Client, jobs: Sequence[Job], report: Report) -> None:
    letters = client.dead_letters(limit=report.jobs)
    report.dead = len(letters)
    found, wanted = sorted(letter.job_id for letter in letters), sorted(job.id for job in jobs if is_poison(job))
    if found != wanted or any(letter.why != "poison" for letter in letters):
        reasons = Counter(letter.why for letter in letters)
        innocent = len(set(found) - set(wanted))
        report.faults.append(f"{len(wanted)} jobs are poison and {len(found)} dead, {innocent} innocent: {reasons}")


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
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--poison", type=int, default=6, help="jobs that kill their worker")
    parser.add_argument("--restarts", type=int, default=2, help="of the server")
    parser.add_argument("--every", type=float, nargs=2, default=(1.0, 4.0), help="seconds between two faults")
    parser.add_argument("--lease", type=float, default=2.0, help="seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds after which it has failed")
    flags = parser.parse_args()
    report = chaos(
        flags.jobs,
        flags.workers,
        flags.lease,
        flags.seed,
        poison=flags.poison,
        restarts=flags.restarts,
        every_s=tuple(flags.every),
        timeout_s=flags.timeout,
    )
    print(json.dumps(report.line()))
    return 0 if report.ok and not report.late else 1


if __name__ == "__main__":
    sys.exit(main())
