"""Tasks as other services call them: real servers, a Celery worker as the ingress, a worker with the fake engine."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import signature
from redis import Redis

from pagemill.client import Client
from pagemill.ids import uuid7
from pagemill.keys import MODELS, QueueKeys
from producers.local_redis import local_redis
from producers.tasks.ids import job_id_of
from tests.support.celery_box import Caller, CeleryBox, calling, comes_up
from tests.support.servers import leaked_keys, wait_for
from tests.support.services import RunningService
from worker.fake_engine import FakeEngine

QUEUE = "celery-tests"

# a model that no worker serves now: its jobs wait in a queue of their own
COLD_MODEL, COLD_QUEUE = "cold", "celery-cold"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that batches may be read from."""
    return tmp_path_factory.mktemp("source")


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Iterator[CeleryBox]:
    with local_redis() as queue_url, local_redis() as celery_url:
        base = celery_url[: celery_url.rindex("/")]
        box = CeleryBox(tmp_path_factory.mktemp("celery"), queue_url, QUEUE, celery_url, f"{base}/1")
        with Redis.from_url(queue_url, protocol=2) as redis:
            redis.hset(MODELS, COLD_MODEL, COLD_QUEUE)
            ingress = box.ingress(PAGEMILL_CELERY_BATCH_SOURCE=source.as_uri())
            engine = FakeEngine(tokens_per_s=1000, max_model_len=8192)
            with ingress, box.foreign_worker() as foreign, RunningService(queue_url, QUEUE, engine=engine, lease_s=1.5):
                comes_up(ingress)
                comes_up(foreign)
                yield box
            assert [] == [*leaked_keys(redis, QUEUE), *leaked_keys(redis, COLD_QUEUE)]


@pytest.fixture(scope="module")
def caller(box: CeleryBox) -> Iterator[Caller]:
    with calling(box) as caller:
        yield caller


@pytest.fixture(scope="module")
def jobs(box: CeleryBox) -> Iterator[Client]:
    """A look at the queue itself."""
    with Client(box.queue_url, queue=QUEUE) as client:
        yield client


def test_another_service_shares_no_code(box: CeleryBox) -> None:
    """
    It gets answers, a chord of 20, chains, groups, failures and a revoke, with two URLs and the names of tasks.
    """
    with box.foreign_caller("20") as service:
        wait_for(lambda: service.exit_code() is not None, 60)

        assert 0 == service.exit_code(), service.last_lines(40)

    expected = {"get": 1, "chord": 20, "chain": 3, "group": 5, "failure": 4, "revoke": 1}
    assert expected == json.loads(box.seen.read_text())


def test_a_task_that_is_sent_twice_is_one_job(caller: Caller, jobs: Client) -> None:
    """
    A message that comes again finds the job of the first, whatever differs of it.
    """
    task_id = uuid7()
    accepted = jobs.stats().totals["accepted"]

    for prompt in ("once", "once", "another"):
        caller.send("generate", prompt, own_id=task_id)
    value = caller.value(task_id)
    # all three have been seen when what was sent behind them has ended
    caller.call("results", [])

    assert job_id_of(task_id) == value["job_id"]
    assert 1 == jobs.stats().totals["accepted"] - accepted


def test_a_submitted_job_is_asked_for_later(caller: Caller) -> None:
    """
    The handle comes at once; the results of many jobs come in one call, whatever became of them.
    """
    handle = caller.call("submit", prompt="later", options={"max_tokens": 4}, lane="bulk")
    waiting = caller.call("submit", prompt="never", model=COLD_MODEL)

    def asked() -> Any:
        found = caller.call("results", [handle["job_id"], waiting["job_id"], "no-such-job"])
        return found if found[0]["result"] else None

    ended, queued, unknown = wait_for(asked)
    assert ("done", 4) == (ended["state"], len(ended["result"]["text"]))
    assert ("queued", None) == (queued["state"], queued["result"])
    assert ("unknown", None) == (unknown["state"], unknown["result"])
    assert {"state": "cancelled"} == caller.call("cancel", job_id=waiting["job_id"])


@pytest.mark.parametrize("how", ["revoke", "cancel"])
@pytest.mark.parametrize("where", ["queued", "running"])
def test_a_revoked_task_has_no_job(caller: Caller, jobs: Client, where: str, how: str) -> None:
    """
    Celery's revoke and our cancel end the job, where it waits and where it runs; the task ends as revoked.
    """
    fields = {"model": COLD_MODEL} if where == "queued" else {}
    task_id = caller.generate("long", 8000, **fields)
    job_id = job_id_of(task_id)
    wait_for(lambda: caller.call("results", [job_id])[0]["state"] == where)

    if how == "revoke":
        caller.app.control.revoke(task_id)
    else:
        caller.call("cancel", task_id=task_id)

    state, raised = caller.ends(task_id)
    assert ("REVOKED", "TaskRevokedError") == (state, type(raised).__name__)
    wait_for(lambda: jobs.status(job_id).state == "cancelled")


def test_a_deadline_is_a_failure_of_its_own(caller: Caller) -> None:
    """
    A job that is not answered in time raises DeadlinePassed.
    """
    name, _, code = caller.failure(caller.generate("long", 8000, timeout_s=0.2))

    assert ("DeadlinePassed", "deadline_passed") == (name, code)


@pytest.mark.parametrize(
    ("name", "arguments", "failure", "word"),
    [
        ("generate", {}, "InvalidJob", "exactly one of prompt and messages"),
        ("generate", {"prompt": ""}, "EmptyPrompt", "empty"),
        ("generate", {"prompt": 7}, "InvalidArguments", "of type int"),
        ("generate", {"prompt": "a", "id": "mine"}, "InvalidArguments", "id: not an argument"),
        ("generate", {"prompt": "a", "prioritty": 1}, "InvalidJob", "prioritty: unknown field"),
        ("generate", {"prompt": "a", "model": "none"}, "UnknownModel", "no worker serves"),
        ("generate", {"prompt": "a", "batch": "none"}, "BatchNotFound", "no batch none"),
        ("submit", {"prompt": ["a"]}, "InvalidJob", "prompt"),
        ("results", {"job_ids": ["a"] * 257}, "InvalidArguments", "256"),
        ("cancel", {}, "InvalidArguments", "exactly one of"),
        ("cancel", {"task_id": ["a"]}, "InvalidArguments", "task_id is of type list"),
        ("cancel", {"job_id": "none"}, "JobNotFound", "no job none"),
        ("batch_status", {"batch_id": "none"}, "BatchNotFound", "none"),
        ("submit_batch", {"items": [{"prompt": "a"}, {"promt": "b"}]}, "InvalidJob", "row 2: promt"),
        ("submit_batch", {"items": [{"prompt": "a", "id": "mine"}]}, "InvalidJob", "row 1: id is not a row's"),
        ("submit_batch", {"items": [7]}, "InvalidJob", "row 1"),
        ("submit_batch", {"items": ["a"], "uri": "file:///a"}, "InvalidArguments", "exactly one of"),
        ("submit_batch", {"items": ["a"], "call": "b"}, "InvalidArguments", "call: unknown argument"),
        ("submit_batch", {"items": ["a"], "metadata": ["b"]}, "InvalidArguments", "metadata: want an object"),
        ("submit_batch", {"items": ["a"], "callback": 7}, "InvalidArguments", "callback"),
        ("submit_batch", {"uri": "file:///etc/passwd"}, "ObjectStoreError", "is not in"),
        ("submit_batch", {"items": ["a"], "webhook": "ftp://x"}, "InvalidBatch", "http"),
    ],
)
def test_a_mistake_is_told_at_once(
    caller: Caller, name: str, arguments: dict[str, Any], failure: str, word: str
) -> None:
    """
    What can never be served fails by its own name, and the message says what is wrong.
    """
    kind, message, _ = caller.failure(caller.send(name, **arguments))

    assert (failure, True) == (kind, word in message), message


def test_a_batch_is_one_handle_and_calls_back(caller: Caller, jobs: Client) -> None:
    """
    All rows are counted together, a failed one too, and the caller's task hears of the end.
    """
    done = uuid7()
    call = signature("foreign.note", app=caller.app).set(task_id=done)
    items = ["one", {"prompt": "two", "options": {"max_tokens": 3}}, {"prompt": "x" * 9000}]

    handle = caller.call("submit_batch", items=items, defaults={"options": {"max_tokens": 5}}, callback=call)
    told = caller.value(done)["noted"]

    batch_id = handle["batch_id"]
    assert (3, "ended", 2, 1) == (handle["total"], told["state"], told["done"], told["failed"])
    assert told == caller.call("batch_status", batch_id)
    rows = caller.call("results", [f"{batch_id}.{row}" for row in range(3)])
    assert [5, 3, 0] == [len(row["result"]["text"]) for row in rows]
    assert "bulk" == jobs.status(f"{batch_id}.0").lane


def test_a_batch_is_submitted_once(caller: Caller, jobs: Client) -> None:
    """
    The same `idem` is the same batch, also from another task; other rows under it are refused.
    """
    first = caller.call("submit_batch", items=["a", "b"], idem="night-7")
    again = caller.call("submit_batch", items=["a", "b"], idem="night-7")

    assert ("batch-night-7", "batch-night-7", 2) == (first["batch_id"], again["batch_id"], again["total"])
    assert "Conflict" == caller.failure(caller.send("submit_batch", items=["a", "c"], idem="night-7"))[0]
    jobs.wait_batch("batch-night-7", 10)
    assert 2 == caller.call("batch_status", "batch-night-7")["done"]


def test_a_batch_is_read_from_the_store(caller: Caller, jobs: Client, source: Path) -> None:
    """
    A file of a job a line, below the folder or prefix that the operator has named.
    """
    (source / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}')

    handle = caller.call("submit_batch", uri=(source / "rows.jsonl").as_uri())

    assert 2 == handle["total"]
    assert 2 == jobs.wait_batch(handle["batch_id"], 10).done


def test_a_batch_can_be_cancelled(caller: Caller, jobs: Client) -> None:
    """
    By its name, with all its jobs.
    """
    handle = caller.call("submit_batch", items=["a", "b"], defaults={"options": {"max_tokens": 8000}})

    caller.call("cancel", batch_id=handle["batch_id"])

    assert (0, 2) == ((ended := jobs.wait_batch(handle["batch_id"], 10)).done, ended.cancelled)


def test_replies_do_not_pile_up(caller: Caller, box: CeleryBox) -> None:
    """
    When a task is complete its reply is gone.
    """
    caller.value(caller.generate("last"))

    with Redis.from_url(box.queue_url, protocol=2) as redis:
        wait_for(lambda: redis.xlen(QueueKeys(QUEUE).replies("celery")) == 0)
