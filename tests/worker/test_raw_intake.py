"""Jobs that any program writes: adopted soon and once, and nothing that is written stops a worker."""

import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from pagemill.client import Client
from pagemill.keys import QueueKeys
from pagemill.messages import JobState
from pagemill.raw import RawEntry
from pagemill.schema import MAX_PAYLOAD_BYTES, Result
from producers.local_redis import local_redis
from tests.support.servers import wait_for
from tests.support.services import RunningService, worker_process
from worker.fake_engine import FakeEngine
from worker.raw_intake import judge

GARBAGE: dict[str, bytes] = {
    "nothing": b"",
    "a blank": b" ",
    "a NUL": b"\0",
    "no JSON": b"Why is the sky blue?",
    "half of it": b'{"prompt": "Why',
    "two of it": b'{"prompt": "Why?"}{"prompt": "Why?"}',
    "a NUL behind it": b'{"prompt": "Why?"}\0',
    "a NUL in a text": b'{"prompt": "W\0y?"}',
    "no UTF-8": b'{"prompt": "\xff\xfe"}',
    "UTF-16": '{"prompt": "Why?"}'.encode("utf-16"),
    "half a surrogate": b'{"prompt": "\\ud800"}',
    "a byte order mark": b'\xef\xbb\xbf{"prompt": "Why?"}',
    "pickled": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x06prompt\x94.",
    "null": b"null",
    "a number": b"17",
    "a list": b'[{"prompt": "Why?"}]',
    "a text": b'"Why?"',
    "no field": b"{}",
    "no prompt": b'{"lane": "bulk"}',
    "two inputs": b'{"prompt": "Why?", "messages": [{"role": "user", "content": "Why?"}]}',
    "an unknown field": b'{"prompt": "Why?", "promt": "Why?"}',
    "an unknown option": b'{"prompt": "Why?", "options": {"max_token": 3}}',
    "a prompt that is a number": b'{"prompt": 17}',
    "a prompt that is an object": b'{"prompt": {"text": "Why?"}}',
    "an empty prompt": b'{"prompt": ""}',
    "tokens that are none": b'{"prompt": [1, 2, "three"]}',
    "options that are a list": b'{"prompt": "Why?", "options": [1]}',
    "NaN": b'{"prompt": "Why?", "options": {"temperature": NaN}}',
    "endless": b'{"prompt": "Why?", "options": {"temperature": 1e999}}',
    "a number of thousands of digits": b'{"prompt": "Why?", "options": {"seed": %b}}' % (b"9" * 10_000),
    "a lane that is none": b'{"prompt": "Why?", "lane": "fast"}',
    "an id that is none": b'{"prompt": "Why?", "id": "a b"}',
    "an id with a line end": b'{"prompt": "Why?", "id": "a\\n"}',
    "an id that is a list": b'{"prompt": "Why?", "id": ["a"]}',
    "a tenant that is a path": b'{"prompt": "Why?", "tenant": "../../etc"}',
    "a time before now": b'{"prompt": "Why?", "timeout_s": -1}',
    "a version from the future": b'{"prompt": "Why?", "version": 99}',
    "a version that is none": b'{"prompt": "Why?", "version": "new"}',
    "very deep": b'{"prompt": ' + b"[" * 100_000,
    "very wide": b'{"prompt": "Why?", "metadata": {%b}}' % b",".join(b'"%d": "x"' % n for n in range(100_000)),
    "a million faults": b'{"prompt": [%b]}' % b",".join([b'"x"'] * 1_000_000),
    "10 MB": b'{"prompt": "%b"}' % (b"x" * 10 * 1024 * 1024),
}
NOT_JUST_A_JOB: dict[str, dict[bytes, bytes]] = {
    "another field": {b"job": b'{"prompt": "Why?"}'},
    "the job by field": {b"prompt": b"Why?", b"lane": b"bulk"},
    "a field beside it": {b"d": b'{"prompt": "Why?"}', b"e": b"1"},
    "a field without a name": {b"": b'{"prompt": "Why?"}'},
    "many fields": {b"%d" % number: b"x" for number in range(20_000)},
}
# alone in an entry, each of these is a job
UNUSUAL = (
    b' {"prompt": "Why?"}\r\n',
    b'{"prompt": "\\u0000"}',
    '{"prompt": "\u2028 \U0001f600"}'.encode(),
    b'{"prompt": [1, 2, 3]}',
    b'{"prompt": "one", "prompt": "two"}',
)


def state_of(redis: Redis, queue: str, job_id: str) -> JobState | None:
    state = redis.hget(QueueKeys(queue).job(job_id), "st")
    return state.decode() if state else None  # type: ignore[return-value]


def write(redis: Redis, queue: str, payload: bytes | None = None, **fields: Any) -> str:
    """One XADD; the id of the job that it becomes."""
    body = json.dumps({"prompt": "Why?", "options": {"max_tokens": 4}} | fields).encode()
    entry: bytes = redis.xadd(QueueKeys(queue).raw, {"d": body if payload is None else payload})
    return str(fields.get("id", f"raw-{entry.decode()}"))


def wait_for_results(redis: Redis, queue: str, *job_ids: str) -> list[Result]:
    names = [QueueKeys(queue).result(job_id) for job_id in job_ids]
    wait_for(lambda: redis.exists(*names) == len(names), 20)
    return [Result.model_validate_json(record) for record in redis.mget(names)]


def dead_letters(redis: Redis, queue: str) -> dict[str, dict[bytes, bytes]]:
    """By the id of the job."""
    return {fields[b"j"].decode(): fields for _, fields in redis.xrange(f"{QueueKeys(queue).base}:dead")}


@pytest.mark.parametrize("payload", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_told_from_jobs(payload: bytes) -> None:
    """
    Each kind of garbage is refused with a reason, in good time.
    """
    started = time.monotonic()

    adoptions, [refusal] = judge([RawEntry("1-0", (b"d", payload))])

    assert time.monotonic() - started < 10
    assert ([], "1-0", True) == (adoptions, refusal.entry_id, bool(refusal.failure.message))
    assert len(refusal.failure.message) < 2000


@pytest.mark.parametrize("payload", UNUSUAL)
def test_what_looks_odd_may_be_a_job(payload: bytes) -> None:
    """
    Whatever JSON and the schema allow is adopted.
    """
    [adoption], refusals = judge([RawEntry("1-0", (b"d", payload))])

    assert ("raw-1-0", []) == (adoption.submission.job_id, refusals)


def test_any_bytes_are_judged() -> None:
    """
    A job with some of its bytes changed is a job or garbage, and never an exception.
    """
    rng = random.Random(7)
    job = (
        b'{"id": "a", "prompt": "Why?", "options": {"max_tokens": 4, "stop": ["."]}, "lane": "bulk", "timeout_s": 1.5}'
    )
    entries = []
    for number in range(2000):
        damaged = bytearray(job)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        entries.append(RawEntry(f"{number}-0", (b"d", bytes(damaged[: rng.randrange(len(damaged) + 1)]))))

    adoptions, refusals = judge(entries)

    assert {entry.entry_id for entry in entries} == {one.entry_id for one in (*adoptions, *refusals)}
    assert len(entries) == len(adoptions) + len(refusals)


def test_garbage_stops_nobody(server_url: str, queue: str, redis: Redis) -> None:
    """
    Between entries of garbage of every kind the jobs are answered; the dead letters hold exactly the
    garbage, byte for byte, and each of it has a result.
    """
    raw = QueueKeys(queue).raw
    with RunningService(server_url, queue):
        good, bad = [], {}
        for payload in GARBAGE.values():
            # with an id of its own that can be read, it is told under that id
            good.append(write(redis, queue))
            bad[write(redis, queue, payload)] = payload
        for fields in NOT_JUST_A_JOB.values():
            good.append(write(redis, queue))
            entry = redis.xadd(raw, dict(fields)).decode()
            bad[f"raw-{entry}"] = b"\n".join(part for pair in fields.items() for part in pair)
        results = wait_for_results(redis, queue, *good, *bad)
        wait_for(lambda: redis.xlen(raw) == 0)

    assert ["done"] * len(good) == [result.status for result in results[: len(good)]]
    assert ["failed"] * len(bad) == [result.status for result in results[len(good) :]]
    letters = dead_letters(redis, queue)
    assert bad == {job_id: letter[b"raw"] for job_id, letter in letters.items()}
    assert {b"garbage"} == {letter[b"why"] for letter in letters.values()}
    assert 0 == redis.xpending(raw, "workers")["pending"]


def test_an_idle_worker_adopts_at_once(server_url: str, queue: str, redis: Redis) -> None:
    """
    From the XADD to the job in its lane it takes less than 100 ms where nothing else is to do.
    """
    delays = []
    with RunningService(server_url, queue):
        wait_for(lambda: redis.exists(QueueKeys(queue).raw))
        for _ in range(20):
            # whatever part of its idle wait the loop is in
            time.sleep(random.uniform(0.0, 0.1))
            started = time.perf_counter()
            job_id = write(redis, queue)
            while state_of(redis, queue, job_id) is None:
                time.sleep(0.0005)
            delays.append(time.perf_counter() - started)

    assert statistics.median(delays) < 0.1


def test_a_conflict_ends_under_the_entrys_own_id(server_url: str, queue: str, redis: Redis) -> None:
    """
    The second content under an id goes to the dead letters; the first job's result is its own.
    """
    with RunningService(server_url, queue):
        write(redis, queue, id="row-7")
        entry = redis.xadd(QueueKeys(queue).raw, {"d": b'{"id": "row-7", "prompt": "another"}'}).decode()
        first, second = wait_for_results(redis, queue, "row-7", f"raw-{entry}")

    assert ("done", "failed") == (first.status, second.status)
    assert "another content" in (second.failure.message if second.failure else "")
    assert {f"raw-{entry}"} == dead_letters(redis, queue).keys()


def test_entries_wait_while_the_queue_is_full(server_url: str, queue: str, redis: Redis, client: Client) -> None:
    """
    Back-pressure: what the queue has no room for stays in the stream, in order, and is adopted later.
    """
    engine = FakeEngine(tokens_per_s=200.0, max_num_seqs=1, kv_tokens=256)
    with RunningService(server_url, queue, engine=engine, max_queued_tokens=200):
        jobs = [write(redis, queue, prompt="x" * 60, options={"max_tokens": 80}) for _ in range(8)]
        wait_for(lambda: redis.xlen(QueueKeys(queue).raw) in range(1, 8))
        results = wait_for_results(redis, queue, *jobs)

    assert ["done"] * 8 == [result.status for result in results]
    assert 8 == client.stats().totals["accepted"]


def test_a_tenant_at_its_limit_holds_up_nobody_else(server_url: str, queue: str, redis: Redis, client: Client) -> None:
    """
    What one tenant wrote too much of waits; what others wrote behind it is adopted meanwhile.
    """
    redis.hset(f"{QueueKeys(queue).base}:limits", "tenant:flood", 1500)
    engine = FakeEngine(tokens_per_s=5000.0, max_num_seqs=4)
    options = {"max_tokens": 60}
    flood = [write(redis, queue, id=f"flood-{n}", tenant="flood", options=options) for n in range(300)]
    late = write(redis, queue, id="late", tenant="other", lane="interactive")
    with RunningService(server_url, queue, engine=engine):
        wait_for_results(redis, queue, late)
        assert redis.xlen(QueueKeys(queue).raw) > 100
        results = wait_for_results(redis, queue, *flood)

    assert {"done"} == {result.status for result in results}
    assert 301 == client.stats().totals["accepted"]


def test_jobs_of_a_killed_reader_are_adopted(tmp_path: Path, redis: Redis, server_url: str, queue: str) -> None:
    """
    A worker that dies with entries in hand leaves them to the next one, and each is one job.
    """
    raw = QueueKeys(queue).raw
    place = ("--redis-url", server_url, "--queue", queue, "--lease-s", "1")
    # there is room for one that runs, a few that wait with it, and one in the queue
    small = ("--engine", "fake", "--fake-tokens-per-s", "200", "--max-num-seqs", "1", "--max-queued-tokens", "1")
    jobs = [write(redis, queue, id="first", options={"max_tokens": 8000}), *(write(redis, queue) for _ in range(12))]
    with worker_process(tmp_path / "one.log", *place, *small) as first:
        wait_for(lambda: state_of(redis, queue, "first") == "running", 20)
        first.kill()
        in_hand = redis.xpending(raw, "workers")["pending"]
        with RunningService(server_url, queue, lease_s=1.0):
            results = wait_for_results(redis, queue, *jobs)

    assert 0 < in_hand
    assert ["done"] * 13 == [result.status for result in results]


def test_a_flushed_server_is_served_again(queue: str) -> None:
    """
    NOGROUP: after FLUSHALL the stream and its group are made again, and entries are adopted.
    """
    with local_redis() as url, Redis.from_url(url, protocol=2) as redis, RunningService(url, queue):
        wait_for_results(redis, queue, write(redis, queue))
        redis.flushall()
        [result] = wait_for_results(redis, queue, write(redis, queue))

    assert "done" == result.status


def test_a_key_of_another_type_stops_only_the_raw_intake(server_url: str, queue: str, redis: Redis) -> None:
    """
    Somebody put a list where the stream should be: jobs of clients go on, and entries when it is gone.
    """
    with RunningService(server_url, queue), Client(server_url, queue=queue) as client:
        with redis.pipeline() as at_once:
            # a worker makes the stream anew as soon as it misses it
            at_once.delete(QueueKeys(queue).raw)
            at_once.lpush(QueueKeys(queue).raw, "no stream")
            at_once.execute()
        assert client.text(client.submit(prompt="Why?").job_id, wait_s=10)
        redis.delete(QueueKeys(queue).raw)
        [result] = wait_for_results(redis, queue, write(redis, queue))

    assert "done" == result.status


def test_a_large_job_is_a_job(server_url: str, queue: str, redis: Redis) -> None:
    """
    Up to the limit of a payload an entry is adopted like any other.
    """
    text = "x" * (MAX_PAYLOAD_BYTES - 100)
    with RunningService(server_url, queue):
        options = {"truncate": "left", "max_tokens": 4}
        [result] = wait_for_results(redis, queue, write(redis, queue, prompt=text, options=options))

    assert "done" == result.status
