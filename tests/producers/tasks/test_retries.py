"""What a task does where the queue is busy or away: it goes back into the broker, and is not lost."""

import json
from collections.abc import Iterator

import pytest
from celery import Celery, Signature, Task
from celery.exceptions import Ignore, Reject, Retry
from kombu.exceptions import OperationalError
from redis import Redis

from pagemill.client import Client
from pagemill.errors import Busy, InvalidJob, PagemillError, QueueUnavailable, ServerAway, ServerFull, StoreAway
from pagemill.ids import uuid7
from producers.tasks.bulk import RunsElsewhere
from producers.tasks.config import make_app
from producers.tasks.ids import job_id_of
from producers.tasks.ingress import Ingress
from producers.tasks.settings import CelerySettings
from producers.tasks.tasks import register, told


@pytest.fixture
def generate(
    settings: CelerySettings, server_url: str, queue: str, completers_app: Celery, broker: Redis
) -> Iterator[Task]:
    """The task, of an app whose queue is the test's."""
    # apps of one broker share their connections, which that one closes in the end
    assert completers_app
    assert not broker.exists("pagemill.ingress")
    own = settings.model_copy(update={"queue": queue, "redis_url": server_url})
    with make_app(own) as ingress, register(ingress, own):
        yield ingress.tasks["pagemill.generate"]


def begin(task: Task, **request: object) -> str:
    """Put the task where a worker would run it."""
    task_id = uuid7()
    fields = {"id": task_id, "called_directly": False, "delivery_info": {"routing_key": "pagemill.ingress"}}
    task.push_request(**fields, args=["a"], kwargs={"options": {}}, **request)
    return task_id


def headers(broker: Redis) -> list[dict[str, object]]:
    return [json.loads(text)["headers"] for text in broker.lrange("pagemill.ingress", 0, -1)]


@pytest.mark.parametrize(
    ("error", "least_s", "most_s"),
    [
        (Busy("busy", reason="tokens", retry_after_s=7.0), 7.0, 8.75),
        (ServerAway("away"), 0.5, 1.0),
        (ServerFull("full"), 0.5, 1.0),
        (QueueUnavailable("refused"), 0.5, 1.0),
        (StoreAway("slow down"), 0.5, 1.0),
        (RunsElsewhere("news 2026-11-30"), 60.0, 60.0),
    ],
)
def test_what_passes_is_tried_again(
    generate: Task, broker: Redis, error: Exception, least_s: float, most_s: float
) -> None:
    """
    The same task, with its place in chord and chain, is in the broker when the first try ends; and it does not
    come at once.
    """
    task_id = begin(generate, chord={"task": "b"}, group="g", group_index=0, callbacks=[{"task": "c"}])

    with pytest.raises(Retry) as retry, told(generate):
        raise error

    assert least_s <= retry.value.when <= most_s
    [sent] = headers(broker)
    assert (task_id, "g", 0, 1) == (sent["id"], sent["group"], sent["group_index"], sent["retries"])
    assert sent["eta"] is not None


def test_a_server_that_stays_away_is_asked_less_often(generate: Task) -> None:
    """
    The pauses double, up to a minute, and there is no last try.
    """
    pauses = []
    for retries in (0, 1, 3, 5, 6, 100):
        begin(generate, retries=retries)
        with pytest.raises(Retry) as retry, told(generate):
            raise ServerAway("away")
        pauses.append(retry.value.when)

    assert all(most / 2 <= pause <= most for pause, most in zip(pauses, (1, 2, 8, 32, 60, 60), strict=True))


def test_a_broker_that_is_away_keeps_the_message(generate: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Celery would drop a task that it cannot put back: this one is to be delivered again.
    """

    def away(*_: object, **__: object) -> None:
        raise OperationalError("away")

    begin(generate)
    monkeypatch.setattr(Signature, "apply_async", away)

    with pytest.raises(Reject) as rejected, told(generate):
        raise ServerAway("away")

    assert rejected.value.requeue


@pytest.mark.parametrize("error", [InvalidJob("empty_prompt", "e"), PagemillError("e")])
def test_what_does_not_pass_fails_at_once(generate: Task, broker: Redis, error: PagemillError) -> None:
    """
    Nothing is tried again in vain.
    """
    begin(generate)
    with pytest.raises(Exception, match="e") as raised, told(generate):
        raise error

    assert not isinstance(raised.value, Retry)
    assert [] == headers(broker)


def test_a_busy_queue_gets_the_task_later(generate: Task, broker: Redis, client: Client) -> None:
    """
    A refused submit leaves no job; when there is room the same task makes one.
    """
    client.set_tenant("small", max_queued_tokens=300)
    task_id = begin(generate)
    client.submit(prompt="a", tenant="small", options={"max_tokens": 200})

    with pytest.raises(Retry):
        generate.run("a", tenant="small")
    client.set_tenant("small", max_queued_tokens=0)
    with pytest.raises(Ignore, match=job_id_of(task_id)):
        generate.run("a", tenant="small")

    assert (1, "queued") == (len(headers(broker)), client.status(job_id_of(task_id)).state)


def test_a_retried_message_that_differs_finds_its_job(client: Client) -> None:
    """
    A submit may have arrived although its task was told that it did not; what Celery sends then may differ.
    """
    ingress = Ingress(client, reply_to="celery", result_ttl_s=60, revoke=lambda _: None)

    def request(**fields: object) -> object:
        return type("Request", (), {"id": "t", "delivery_info": {}, **fields})()

    first = ingress.generate(request(), "a", {})  # type: ignore[arg-type]
    again = ingress.generate(request(parent_id="p", delivery_info={"priority": 3}), "a", {})  # type: ignore[arg-type]

    assert first == again == "celery-t"
    assert 1 == client.stats().totals["accepted"]
