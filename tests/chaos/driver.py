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
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from pagemill.client import Client
from pagemill.errors import QueueUnavailable
from pagemill.schema import Job
from tests.chaos.audit import audit
from tests.chaos.fleet import Fleet
from tests.chaos.report import Report
from tests.chaos.resumes import Resumes
from tests.support.jobs import seeded_jobs
from tests.support.redis_process import RedisProcess

QUEUE = "chaos"
MAX_TOKENS = 60
POISONS = ("segv", "raise", "exit", "hang", "cuda")

# of one worker: with 8 seats a job takes a quarter of a second
WORKER_FLAGS = (
    *("--engine", "fake", "--queue", QUEUE, "--fake-tokens-per-s", "2000"),
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
    seats: int = 8,
    every_s: tuple[float, float] = (0.3, 1.2),
    timeout_s: float = 600.0,
    server: Path | None = None,
) -> Report:
    """
    Run all jobs under faults and check what came out.

    Args:
        poison: Jobs among them that kill their worker.
        restarts: How often the server is killed and started again, evenly over the jobs.
        seats: Jobs that a worker runs at a time.
        every_s: Between two faults.
        server: The program of the server; by default what `find_server` finds.
    """
    report = Report(jobs=jobs, workers=workers, seats=seats, lease_s=lease_s, seed=seed, poison=poison)
    draw = random.Random(seed)
    submitted = make_jobs(jobs, poison, draw)
    started = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pagemill-chaos-")))
        redis_server = stack.enter_context(RedisProcess(folder / "redis", binary=server))
        client = stack.enter_context(Client(redis_server.url, queue=QUEUE))
        client.submit_many(submitted)
        resumes = Resumes(redis_server.client, QUEUE, report.longest_resume_s, lease_s=lease_s)
        flags = (*WORKER_FLAGS, "--max-num-seqs", str(seats), "--redis-url", redis_server.url)
        fleet = Fleet(flags, folder, report, resumes, draw)
        try:
            run = _Run(client, redis_server, fleet, resumes, submitted, draw)
            run.until_all_ended(restarts, every_s, started + timeout_s)
            report.jobs, report.server_restarts = len(submitted), run.restarts
            codes = fleet.drain()
        finally:
            fleet.kill()
        report.seconds = round(time.monotonic() - started, 1)
        report.faults += [f"a drained worker ended with {code}" for code in codes if code != 0]
        _look_back(client, redis_server, submitted, report)
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
            self._resumes.look(self._fleet.anybody_serves)
            time.sleep(_LOOK_S)

    def _submit_more(self) -> None:
        more = seeded_jobs(_WORK_LEFT, MAX_TOKENS, first=len(self._jobs))
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
    jobs = seeded_jobs(num_jobs, MAX_TOKENS)
    for number, place in enumerate(draw.sample(range(num_jobs), num_poison)):
        prompt = f"poison:{POISONS[number % len(POISONS)]}"
        jobs[place] = Job.build(prompt=prompt, options={"max_tokens": MAX_TOKENS, "seed": place})
    return jobs


def _num_ended(client: Client) -> int:
    try:
        totals = client.stats().totals
    except QueueUnavailable:
        return 0
    return sum(totals.get(state, 0) for state in ("done", "failed", "cancelled", "expired"))


def _look_back(client: Client, server: RedisProcess, jobs: Sequence[Job], report: Report) -> None:
    """Complete the report, when all has ended."""
    audit(client, server.client, QUEUE, jobs, report)
    totals = client.stats().totals
    report.reclaimed, report.released, report.fenced = (
        totals.get(name, 0) for name in ("reclaimed", "released", "fenced")
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Disturb workers and count the results.")
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--poison", type=int, default=6, help="jobs that kill their worker")
    parser.add_argument("--restarts", type=int, default=2, help="of the server")
    parser.add_argument("--seats", type=int, default=8, help="jobs that a worker runs at a time")
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
        seats=flags.seats,
        every_s=tuple(flags.every),
        timeout_s=flags.timeout,
    )
    print(json.dumps(report.line()))
    return 0 if report.ok and not report.late else 1


if __name__ == "__main__":
    sys.exit(main())
