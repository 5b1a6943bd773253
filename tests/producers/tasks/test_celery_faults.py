"""Celery's side under faults: processes that are killed and servers that go away lose and double nothing."""

import os
import random
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from celery import chord, signature

from pagemill.client import Client
from pagemill.ids import uuid7
from pagemill.keys import QueueKeys
from producers.child import Child
from producers.tasks.ids import job_id_of
from tests.support.celery_box import Caller, CeleryBox, calling, comes_up, up
from tests.support.redis_process import RedisProcess
from tests.support.servers import wait_for
from tests.support.services import RunningService
from worker.fake_engine import FakeEngine

pytestmark = pytest.mark.slow

QUEUE = "celery-faults"

# what a dead process held goes to another one soon
IMPATIENT = {"PAGEMILL_CELERY_VISIBILITY_TIMEOUT_S": "3", "PAGEMILL_CELERY_REPLY_CLAIM_S": "2"}


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[RedisProcess, RedisProcess]]:
    """The queue's, and Celery's."""
    with RedisProcess(tmp_path / "queue") as queue, RedisProcess(tmp_path / "celery") as broker:
        yield queue, broker


@pytest.fixture
def box(servers: tuple[RedisProcess, RedisProcess], tmp_path: Path) -> CeleryBox:
    queue, broker = servers
    return CeleryBox(tmp_path, queue.url, QUEUE, broker.url, f"{broker.url[:-1]}1")


@pytest.fixture
def caller(box: CeleryBox) -> Iterator[Caller]:
    with calling(box) as caller:
        yield caller


def serving(box: CeleryBox, tokens_per_s: float = 2000) -> RunningService:
    return RunningService(box.queue_url, QUEUE, engine=FakeEngine(tokens_per_s=tokens_per_s), lease_s=2.0)


def generate(caller: Caller, prompt: str) -> Any:
    kwargs = {"prompt": prompt, "options": {"max_tokens": 20}}
    return signature("pagemill.generate", kwargs=kwargs, queue="pagemill.ingress", app=caller.app)


def killed(process: Child) -> None:
    os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: process.exit_code() is not None)


def test_completers_may_die_at_any_point(box: CeleryBox, caller: Caller) -> None:
    """
    Five completers are killed while a chord of 150 goes: its body runs once, with every answer in its place, and
    each callback runs for each part.
    """
    draws = random.Random(5)
    with ExitStack() as stack:
        ingress = stack.enter_context(box.ingress(PAGEMILL_CELERY_COMPLETER="false", **IMPATIENT))
        foreign = stack.enter_context(box.foreign_worker())
        # slow enough for five starts: eight seconds
        stack.enter_context(serving(box, 400))
        comes_up(ingress)
        comes_up(foreign)
        notes = [uuid7() for _ in range(150)]
        parts = [generate(caller, f"{n}") for n in range(150)]
        for part, note in zip(parts, notes, strict=True):
            part.link(signature("foreign.note", app=caller.app).set(task_id=note))
        body = chord(parts, signature("foreign.join", app=caller.app)).apply_async()

        for round_ in range(5):
            with up(box.completer(f"completer-{round_}", **IMPATIENT), "completer.started") as completer:
                many = draws.randint(1, 10)
                wait_for(lambda: completer.log.read_text().count("completer.completed") >= many, 30)  # noqa: B023
                killed(completer)
        stack.enter_context(box.completer("last", **IMPATIENT))
        texts = caller.value(body.id, 60)

    answers = [caller.value(note)["noted"] for note in notes]
    assert 150 == len({answer["job_id"] for answer in answers})
    assert [answer["text"] for answer in answers] == texts
    assert 1 == foreign.log.read_text().count("Task foreign.join[" + body.id + "] received")


def test_an_ingress_that_dies_before_it_acknowledged_makes_no_second_job(
    box: CeleryBox, caller: Caller, servers: tuple[RedisProcess, RedisProcess]
) -> None:
    """
    Killed after the submit, with its message still in the broker: another ingress gets that and finds the job.
    """
    queue, broker = servers
    with box.completer(), Client(queue.url, queue=QUEUE) as client:
        with up(box.ingress(PAGEMILL_CELERY_COMPLETER="false", **IMPATIENT)) as first:
            queue.pause()
            task_id = caller.generate("once")
            wait_for(lambda: f"pagemill.generate[{task_id}] received" in first.log.read_text())
            broker.pause()
            queue.resume()
            wait_for(lambda: exists(client, task_id))
            killed(first)
        broker.resume()
        with up(box.ingress(name="second", PAGEMILL_CELERY_COMPLETER="false", **IMPATIENT)) as second, serving(box):
            wait_for(lambda: f"pagemill.generate[{task_id}] ignored" in second.log.read_text(), 60)
            value = caller.value(task_id)

        assert job_id_of(task_id) == value["job_id"]
        assert 1 == client.stats().totals["accepted"]


def exists(client: Client, task_id: str) -> bool:
    try:
        return client.status(job_id_of(task_id)).state == "queued"
    except Exception:
        return False


def test_a_queue_that_is_restarted_loses_no_task(
    box: CeleryBox, caller: Caller, servers: tuple[RedisProcess, RedisProcess]
) -> None:
    """
    Tasks that come, run and end meanwhile are all completed.
    """
    queue, _ = servers
    with box.ingress(**IMPATIENT) as ingress, serving(box, 1000):
        comes_up(ingress)
        first = [caller.generate(f"{n}", 40) for n in range(60)]
        wait_for(lambda: any(caller.state(task_id) == "SUCCESS" for task_id in first), 30)
        queue.stop()
        second = [caller.generate(f"more {n}", 40) for n in range(20)]
        wait_for(lambda: any(caller.state(task_id) == "RETRY" for task_id in second), 60)
        queue.start()

        texts = [caller.value(task_id, 90)["text"] for task_id in first + second]

    assert {40} == {len(text) for text in texts}


def test_a_broker_that_is_restarted_makes_no_second_job(
    box: CeleryBox, caller: Caller, servers: tuple[RedisProcess, RedisProcess]
) -> None:
    """
    Celery may lose a message that its broker was handing over when it ended, and a worker of it may end: another
    ingress, and a caller that sends again what it hears nothing of, by the same task id, get one job and one answer
    for each task.
    """
    queue, broker = servers
    tasks = {uuid7(): f"{n}" for n in range(60)}

    def send(task_id: str) -> None:
        options = {"max_tokens": 40}
        caller.send("generate", tasks[task_id], own_id=task_id, options=options)

    with box.ingress(**IMPATIENT) as ingress, serving(box, 1000), Client(queue.url, queue=QUEUE) as client:
        comes_up(ingress)
        for task_id in tasks:
            send(task_id)
        wait_for(lambda: any(caller.state(task_id) == "SUCCESS" for task_id in tasks), 30)
        broker.stop()
        wait_for(lambda: "Connection" in ingress.log.read_text(), 30)
        broker.start()
        with up(box.ingress(name="second", **IMPATIENT)):
            for task_id in tasks:
                send(task_id)
            texts = [caller.value(task_id, 60)["text"] for task_id in tasks]
            # those that were sent twice have all been seen
            wait_for(lambda: not broker.client.llen("pagemill.ingress"), 30)

        assert {40} == {len(text) for text in texts}
        assert 60 == client.stats().totals["accepted"]


def test_an_ingress_may_die_at_any_time(
    box: CeleryBox, caller: Caller, servers: tuple[RedisProcess, RedisProcess]
) -> None:
    """
    Killed three times with all its children while 120 tasks go. Celery may lose a message that a killed worker was
    just taking: its caller sends it again, by the same task id, and each task has one job and its answer.
    """
    draws = random.Random(7)
    tasks = {uuid7(): f"{n}" for n in range(120)}

    def send(task_id: str) -> None:
        caller.send("generate", tasks[task_id], own_id=task_id, options={"max_tokens": 10})

    with serving(box), Client(servers[0].url, queue=QUEUE) as client:
        for task_id in tasks:
            send(task_id)
        for round_ in range(3):
            with up(box.ingress("-c", "2", name=f"round-{round_}", **IMPATIENT)) as ingress:
                many = draws.randint(5, 30)
                wait_for(lambda: ingress.log.read_text().count(" ignored") >= many, 30)  # noqa: B023
                killed(ingress)
        with up(box.ingress("-c", "2", name="last", **IMPATIENT)):
            for task_id in tasks:
                send(task_id)
            texts = [caller.value(task_id, 90)["text"] for task_id in tasks]
            wait_for(lambda: not servers[1].client.llen("pagemill.ingress"), 30)

        assert {10} == {len(text) for text in texts}
        assert 120 == client.stats().totals["accepted"]
        wait_for(lambda: servers[0].client.xlen(QueueKeys(QUEUE).replies("celery")) == 0)


def test_a_busy_queue_takes_all_in_the_end(box: CeleryBox, caller: Caller) -> None:
    """
    A tenant's limit refuses most of what comes at once: the tasks wait, and every one is answered.
    """
    # one runs and four are at hand: the others wait in the queue, where there is room for two
    engine = FakeEngine(tokens_per_s=4000, max_num_seqs=1)
    service = RunningService(box.queue_url, QUEUE, engine=engine, lease_s=2.0)
    with box.ingress(**IMPATIENT) as ingress, service, Client(box.queue_url, queue=QUEUE) as client:
        comes_up(ingress)
        client.set_tenant("small", max_queued_tokens=1000)
        tasks = [caller.generate(f"{n}", 400, tenant="small") for n in range(12)]

        texts = [caller.value(task_id, 110)["text"] for task_id in tasks]

    assert {400} == {len(text) for text in texts}
    assert "retry: Retry" in ingress.log.read_text()


def test_the_queue_may_be_away_for_the_whole_of_a_start(
    box: CeleryBox, caller: Caller, servers: tuple[RedisProcess, RedisProcess]
) -> None:
    """
    An ingress and its completer come up without the queue's server, and serve when it is there.
    """
    queue, _ = servers
    queue.stop()
    with box.ingress(**IMPATIENT) as ingress:
        comes_up(ingress)
        task_id = caller.generate("patient")
        wait_for(lambda: caller.state(task_id) == "RETRY", 60)
        queue.start()
        with serving(box):
            assert 8 == len(caller.value(task_id, 90)["text"])
