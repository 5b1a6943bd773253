"""Two versions of the wire format in one queue: who reads what, and who leaves it to another."""

import json
from dataclasses import replace
from hashlib import sha1
from typing import get_args

import pytest
from redis import Redis

from pagemill import calls
from pagemill.client import Client
from pagemill.client_core import prepare
from pagemill.connection import connect
from pagemill.errors import InvalidJob, NewerVersion
from pagemill.keys import QueueKeys
from pagemill.messages import Accepted, Delivery
from pagemill.obituary import report_death
from pagemill.raw import RawEntry, Refusal
from pagemill.schema import GRAMMARS, Failure, FailureCode, Job, Options, Result, Usage
from pagemill.scripts import Script, load, run
from pagemill.versions import JOB_FIELDS_SINCE, SCHEMA_VERSION, code_for, taken_by
from tests.support.servers import MakeConsumer, a_job
from tests.support.wire import FIELDS_OF_1, JOBS_OF_1, RECORD, RESULTS_OF_1, unknown_to_1

BEFORE = SCHEMA_VERSION - 1


def of_version(version: int, **fields: object) -> Job:
    return a_job(version=version, **fields)


def ids(jobs: list[Delivery]) -> list[str]:
    return [job.job_id for job in jobs]


def test_a_worker_takes_its_own_version_and_the_one_before() -> None:
    """
    No more: what it would have to remember of old formats is bounded.
    """
    assert {BEFORE, SCHEMA_VERSION} == taken_by(SCHEMA_VERSION)
    assert [{1}, {1, 2}, {2, 3}] == [taken_by(version) for version in (1, 2, 3)]


@pytest.mark.parametrize("payload", JOBS_OF_1)
def test_jobs_of_version_1_are_read(payload: bytes) -> None:
    """
    What that release wrote is a job here, and is written again as it was.
    """
    job = Job.parse(payload)

    assert (1, payload) == (job.version, job.payload())


@pytest.mark.parametrize("record", RESULTS_OF_1)
def test_results_of_version_1_are_read(record: bytes) -> None:
    """
    A client of today reads what a worker of that release wrote.
    """
    assert 1 == Result.model_validate_json(record).version


def test_what_was_added_since_version_1_is_known() -> None:
    """
    A field that is added to a job without a version of its own breaks here: old workers would refuse it.
    """
    grammars = {f"options.{name}" for name in GRAMMARS}
    fields = {"batch", "reply_to", "reply_context", "traceparent", "tracestate"}
    assert dict.fromkeys(fields | grammars, 2) == JOB_FIELDS_SINCE
    assert fields == set(Job.model_fields) - FIELDS_OF_1["Job"]
    # json_schema was a name without use
    assert {"regex", "choice"} == set(Options.model_fields) - FIELDS_OF_1["Options"]
    assert {"gpu_ms"} == set(Usage.model_fields) - FIELDS_OF_1["Usage"]
    assert set() == set(Result.model_fields) - FIELDS_OF_1["Result"]
    assert {"poison", "invalid_grammar"} == set(get_args(FailureCode)) - set(RECORD["codes"])


@pytest.mark.parametrize("code", sorted(set(get_args(FailureCode)) - {"poison"}))
def test_a_failure_of_a_version_1_job_has_a_code_that_its_reader_knows(code: str) -> None:
    """
    What came later is told by the nearest code of then; that of poison is written by a script.
    """
    assert code == code_for(SCHEMA_VERSION, code)
    assert code_for(1, code) in RECORD["codes"]
    assert (code in RECORD["codes"]) == (code == code_for(1, code))


@pytest.mark.parametrize("options", [{"json_schema": {}}, {"regex": "a"}, {"choice": ["a"]}])
def test_a_job_of_version_1_has_no_grammar(options: dict[str, object]) -> None:
    """
    Its number would promise an older worker what that cannot read.
    """
    job = {"prompt": "x", "options": options}
    assert Job.build(**job).options.model_fields_set == options.keys()

    with pytest.raises(InvalidJob, match=r"options\.\w+: came with version 2, and the job says 1") as caught:
        Job.build(version=1, **job)

    assert "invalid_job" == caught.value.code


def test_a_schema_of_null_was_no_schema() -> None:
    """
    Version 1 took that, so its jobs may have it.
    """
    assert Job.parse(b'{"version":1,"prompt":"x","options":{"json_schema":null}}').options.json_schema is None


def test_a_result_of_version_1_says_only_what_that_knew() -> None:
    """
    The counters are told all; the JSON is for whoever wrote the job.
    """
    usage = Usage(prompt_tokens=3, gpu_ms=17)
    old, new = (Result(version=version, job_id="j", status="done", usage=usage) for version in (1, 2))

    assert [] == unknown_to_1(old.payload())
    assert ({"prompt_tokens": 3}, 17) == (json.loads(old.payload())["usage"], old.usage.gpu_ms)
    assert {"prompt_tokens": 3, "gpu_ms": 17} == json.loads(new.payload())["usage"]


def test_a_field_of_a_later_version_is_refused() -> None:
    """
    A job that says version 1 and uses a field of version 2 is refused by everyone alike.
    """
    with pytest.raises(InvalidJob, match="batch: came with version 2, and the job says 1") as caught:
        Job.build(version=1, prompt="x", batch="night")

    assert "invalid_job" == caught.value.code


def test_a_job_without_a_version_is_of_its_readers() -> None:
    """
    A program that writes raw jobs need not say it.
    """
    assert [1, 2] == [Job.parse(b'{"prompt": "x"}', taker).version for taker in (1, 2)]


@pytest.mark.parametrize("payload", [b'{"version": 3, "prompt": "x"}', b'{"version": 3, "input": {"text": "x"}}'])
def test_a_later_version_is_told_from_garbage(payload: bytes) -> None:
    """
    Whatever its fields are, it is the version that this reader lacks.
    """
    with pytest.raises(NewerVersion, match="schema version 3; this Pagemill takes 1 and 2") as caught:
        Job.parse(payload)

    assert ("unsupported_version", 3) == (caught.value.code, caught.value.version)


def test_too_old_a_version_is_refused() -> None:
    """
    Nobody newer will know it: the program that wrote it has to be updated.
    """
    with pytest.raises(InvalidJob, match="takes 2 and 3") as caught:
        Job.parse(b'{"version": 1, "prompt": "x"}', 3)

    assert ("unsupported_version", False) == (caught.value.code, isinstance(caught.value, NewerVersion))


def test_a_delivery_says_the_jobs_version(client: Client, consumer: MakeConsumer) -> None:
    """
    Also where the payload cannot be read: the result has to be of that version.
    """
    for version in (1, 2):
        client.submit(of_version(version, id=f"job-{version}"))

    assert {"job-1": 1, "job-2": 2} == {job.job_id: job.version for job in consumer().pull()}


def test_a_later_job_is_left_to_a_newer_worker(client: Client, consumer: MakeConsumer) -> None:
    """
    While one lives, the older worker takes what it knows and passes the rest over, in any order.
    """
    old, new = consumer(version=BEFORE), consumer()
    for number, version in enumerate((2, 1, 2, 1)):
        client.submit(of_version(version, id=f"{number}-{version}", tenant=f"tenant-{version}"))

    first, rest = old.pull(), new.pull()

    assert (["1-1", "3-1"], ["0-2", "2-2"]) == (ids(first), ids(rest))
    assert {1} == {job.attempt for job in rest}
    new.finish(*rest)
    old.finish(*first)


def test_a_later_job_that_came_back_is_passed_over_too(client: Client, consumer: MakeConsumer) -> None:
    """
    It heads the hand-backs, and the older worker goes on to the tenants behind.
    """
    new = consumer()
    client.submit(of_version(2, id="new"))
    new.run(new.consumer.release(new.pull()))
    old = consumer(version=BEFORE)
    client.submit(of_version(1, id="old"))

    assert (["old"], ["new"]) == (ids(old.pull()), ids(new.pull()))


def test_what_is_passed_over_rings_for_the_newer_worker(client: Client, consumer: MakeConsumer) -> None:
    """
    A ring that the older worker heard was meant for another one.
    """
    old, new = consumer(version=BEFORE), consumer()
    client.submit(of_version(2))
    old.run(old.consumer.wait_for_work(0.1, ["standard"]))

    assert [] == old.pull()
    assert {"standard"} == old.consumer.behind
    assert new.run(new.consumer.wait_for_work(0.1, ["standard"]))
    assert 1 == len(new.pull())


@pytest.mark.parametrize("gone", ["left", "dead"])
def test_without_a_newer_worker_the_job_is_taken(
    gone: str, client: Client, consumer: MakeConsumer, redis: Redis
) -> None:
    """
    What nobody knows must not stand in the way of what is behind it: whoever takes it puts it off.
    """
    old, new = consumer(version=BEFORE), consumer()
    client.submit(of_version(2))
    assert [] == old.pull()

    if gone == "left":
        new.run(new.consumer.leave())
    else:
        # what happens one lease after its last heartbeat
        redis.delete(new.consumer.keys.worker(new.worker_id), f"{new.consumer.keys.base}:newest")

    assert 1 == len(old.pull())


def test_an_older_worker_does_not_pass_for_the_newest(client: Client, consumer: MakeConsumer) -> None:
    """
    Its heartbeat leaves the note of the newer one alone, whoever came first.
    """
    old = consumer(version=BEFORE)
    consumer()
    old.run(old.consumer.heartbeat({}))
    client.submit(of_version(2))

    assert [] == old.pull()
    assert {"1", "2"} == {fields["version"] for fields in client.workers().values()}


@pytest.mark.parametrize(("version", "code"), [(1, "engine_error"), (2, "poison"), (3, "poison")])
def test_the_failure_of_a_dead_letter_has_a_code_that_its_reader_knows(
    version: int, code: str, client: Client, consumer: MakeConsumer, server_url: str, queue: str
) -> None:
    """
    Version 1 had no word for poison; the letter itself says it.
    """
    accepted = client.submit(of_version(min(2, version)))
    with connect(server_url) as redis:
        redis.hset(QueueKeys(queue).job(accepted.job_id), "v", version)
        worker = consumer()
        worker.pull()
        report_death(redis, queue, worker.worker_id, cause="crash", why="SIGSEGV")
        for _ in range(2):
            worker = consumer()
            if worker.run(worker.consumer.take_suspects()):
                report_death(redis, queue, worker.worker_id, cause="crash", why="SIGSEGV")
        record = redis.get(QueueKeys(queue).result(accepted.job_id))

    assert isinstance(record, bytes)
    result = Result.model_validate_json(record)
    assert (min(2, version), code) == (result.version, result.failure.code if result.failure else None)
    assert (version > 1) == bool(unknown_to_1(record))
    [letter] = client.dead_letters()
    assert "poison" == letter.why
    client.requeue_dead(letter.entry_id)
    assert version == consumer().pull()[0].version


def refusal_of(entry: RawEntry, version: int) -> Refusal:
    failure = Failure(code="unsupported_version", message=f"version {version}")
    return Refusal(entry.entry_id, entry.job_id, failure, version)


def test_a_raw_entry_is_passed_on_to_a_newer_worker(consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    The older worker read it first; the newer one finds it in its own hands, by the same id.
    """
    old, new = consumer(version=BEFORE), consumer()
    redis.xadd(QueueKeys(queue).raw, {"d": b'{"version": 2, "prompt": "x"}'})
    [entry] = old.run(old.consumer.raw.take()).entries

    old.run(old.consumer.raw.refuse([refusal_of(entry, 2)]))

    assert ([], [entry]) == (old.run(old.consumer.raw.take()).entries, new.run(new.consumer.raw.take()).entries)
    assert 0 == redis.exists(QueueKeys(queue).dead)
    new.run(new.consumer.raw.refuse([refusal_of(entry, 0)]))


@pytest.mark.parametrize("version", [0, 2, 3])
def test_a_raw_entry_that_no_living_worker_knows_is_refused(
    version: int, client: Client, consumer: MakeConsumer, redis: Redis, queue: str
) -> None:
    """
    It goes to the dead letters with its bytes: it can be put back when there is a worker for it.
    """
    new = consumer()
    redis.xadd(QueueKeys(queue).raw, {"d": b"{}"})
    [entry] = new.run(new.consumer.raw.take()).entries

    assert 1 == new.run(new.consumer.raw.refuse([refusal_of(entry, version)]))
    assert [b"{}"] == [letter.raw for letter in client.dead_letters()]


def test_scripts_of_two_versions_do_not_meet(server_url: str, queue: str) -> None:
    """
    A script is called by the hash of its text: what another version calls by the same name is another script.
    """
    keys = QueueKeys(queue)
    source = b"-- of the version before\n" + load("submit").source
    theirs = Script(source, sha1(source, usedforsecurity=False).hexdigest())
    answers = []
    with connect(server_url) as redis:
        for number in range(4):
            call = calls.submit(keys, [prepare(a_job(id=f"{number}"))], 0)
            answers += run(redis, replace(call, script=theirs) if number % 2 else call)

    assert [Accepted(f"{number}", "queued", duplicate=False) for number in range(4)] == answers
    assert theirs.sha != load("submit").sha
