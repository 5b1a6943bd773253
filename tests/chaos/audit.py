"""What a run under faults left behind: one result for each job, the poison dead, and nothing else."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from redis import Redis

from pagemill.client import Client
from pagemill.keys import QueueKeys
from pagemill.schema import Job
from tests.support.jobs import expected_texts
from tests.support.servers import leaked_keys


@dataclass(slots=True)
class Audit:
    """
    Args:
        results: Jobs that have ended.
        missing: Jobs without an end; duplicated: with more than one.
        dead: Dead letters.
        taken_over: Jobs that a worker had lost to another before they ended.
        faults: Whatever is wrong, in words.
    """

    results: int = 0
    missing: int = 0
    duplicated: int = 0
    dead: int = 0
    taken_over: int = 0
    faults: list[str] = field(default_factory=list)


def audit(client: Client, redis: Redis, queue: str, jobs: Sequence[Job], found: Audit) -> None:
    """Look at every job, at the dead letters and at what is left, once nothing runs any more; fills `found`."""
    keys = QueueKeys(queue)
    ends = Counter(fields[b"j"].decode() for _, fields in redis.xrange(keys.events) if b"j" in fields)
    _check_ends(ends, jobs, found)
    _check_results(client, redis, keys, [job for job in jobs if job.id in ends and not is_poison(job)], found)
    _check_dead(client, jobs, found)
    _check_queue(client, redis, keys, found)
    found.faults += [f"key {name} would stay for ever" for name in leaked_keys(redis, queue)]


def is_poison(job: Job) -> bool:
    """Whether it is meant to kill its worker."""
    return str(job.prompt).startswith("poison:")


def _check_ends(ends: Counter[str], jobs: Sequence[Job], found: Audit) -> None:
    missing = [job.id for job in jobs if job.id not in ends]
    duplicated = [job_id for job_id, count in ends.items() if count > 1]
    unknown = set(ends).difference(job.id for job in jobs)
    found.results, found.missing, found.duplicated = len(ends), len(missing), len(duplicated)
    for job_ids, what in ((missing, "have not ended"), (duplicated, "ended several times"), (unknown, "are unknown")):
        if job_ids:
            found.faults.append(f"{len(job_ids)} of {len(jobs)} jobs {what}, {_some(job_ids)} among them")


def _check_results(client: Client, redis: Redis, keys: QueueKeys, jobs: Sequence[Job], found: Audit) -> None:
    wrong = []
    for job, text in zip(jobs, expected_texts(jobs), strict=True):
        result = client.result(job.id, wait_s=0)
        if (result.status, result.text) != ("done", text):
            wrong.append(job.id)
        found.taken_over += redis.hget(keys.job(job.id), "lapses") is not None
    if wrong:
        found.faults.append(f"{len(wrong)} results differ from those of an undisturbed run, {_some(wrong)} among them")


def _check_dead(client: Client, jobs: Sequence[Job], found: Audit) -> None:
    letters = client.dead_letters(limit=len(jobs) + 1)
    found.dead = len(letters)
    dead, poison = sorted(letter.job_id for letter in letters), sorted(job.id for job in jobs if is_poison(job))
    if dead != poison or any(letter.why != "poison" for letter in letters):
        reasons = Counter(letter.why for letter in letters)
        innocent = len(set(dead) - set(poison))
        found.faults.append(f"{len(poison)} jobs are poison and {len(dead)} dead, {innocent} innocent: {reasons}")


def _check_queue(client: Client, redis: Redis, keys: QueueKeys, found: Audit) -> None:
    for stream in redis.scan_iter(match=f"{keys.base}:s:*"):
        length, pending = redis.xlen(stream), sum(group["pending"] for group in redis.xinfo_groups(stream))
        if length or pending:
            found.faults.append(f"{stream.decode()} has {length} entries, {pending} pending")
    stats = client.stats()
    if stats.running or any(stats.queued.values()) or stats.delayed:
        found.faults.append(f"the counters say that work is left: {stats}")


def _some(job_ids: Iterable[str]) -> str:
    return ", ".join(sorted(job_ids)[:3])
