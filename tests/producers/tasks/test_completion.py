"""Completing a task from its job's reply: once, twice, late, and with what goes wrong."""

import base64
import json
from typing import Any

import pytest
from celery import Celery, chord, signature, states
from celery.app.task import Context
from celery.exceptions import TaskRevokedError
from redis import Redis

from pagemill.client import Client
from pagemill.errors import QueueUnavailable
from pagemill.ids import uuid7
from pagemill.messages import Finished
from pagemill.replies import Replies, Reply
from pagemill.schema import Failure, Result, ResultStatus
from producers.tasks.completion import Completion, ending_of
from producers.tasks.ids import job_id_of
from producers.tasks.request_context import pack
from tests.support.servers import BlockingConsumer, MakeConsumer, a_job, result_of


def a_request(**fields: Any) -> Context:
    return Context({"id": uuid7(), "task": "pagemill.generate", "delivery_info": {}} | fields)


def submitted(client: Client, request: Context, **fields: Any) -> str:
    """A task's job, in the queue."""
    job = a_job(id=job_id_of(request.id), reply_to="celery", reply_context=pack(request), **fields)
    return client.submit(job).job_id


def ended(worker: BlockingConsumer, redis: Redis, queue: str, status: ResultStatus = "done", **fields: Any) -> Reply:
    """The reply of the one job that waits."""
    [job] = worker.pull()
    result = result_of(job, status).model_copy(update=fields)
    worker.run(worker.consumer.finish([Finished(job, result)]))
    replies = Replies(redis, queue, "celery", block_s=0.01)
    [reply] = replies.take()
    replies.ack([reply])
    return reply


def state_of(app: Celery, task_id: str) -> str:
    """A task's state, as its caller would see it."""
    state: str = app.backend.get_task_meta(task_id)["status"]
    return state


def value_of(app: Celery, task_id: str) -> Any:
    """What a task gave, or raised."""
    return app.backend.get_task_meta(task_id)["result"]


def sent(broker: Redis, name: str = "foreign") -> list[tuple[str, str, list[Any]]]:
    """What went to a queue of the broker: the tasks, their ids, and their arguments; oldest first."""
    found = []
    for text in reversed(broker.lrange(name, 0, -1)):
        message = json.loads(text)
        args, _, _ = json.loads(base64.b64decode(message["body"]))
        found.append((message["headers"]["task"], message["headers"]["id"], args))
    return found


def test_an_answer_is_the_tasks_value(
    app: Celery, completion: Completion, client: Client, consumer: MakeConsumer, redis: Redis, queue: str
) -> None:
    """
    The caller gets the text, and the rest of the result beside it; token ids stay in the queue.
    """
    request = a_request()
    job_id = submitted(client, request, metadata={"page": "7"})

    completion.complete(ended(consumer(), redis, queue, metadata={"page": "7"}))

    value = value_of(app, request.id)
    assert ("answer", job_id, {"page": "7"}) == (value["text"], value["job_id"], value["metadata"])
    assert (3, 2) == (value["usage"]["prompt_tokens"], value["usage"]["completion_tokens"])
    assert "token_ids" not in value["completions"][0]


def test_callbacks_and_the_next_step_get_the_answer_once(
    app: Celery, completion: Completion, client: Client, consumer: MakeConsumer, redis: Redis, queue: str, broker: Redis
) -> None:
    """
    They keep the ids that the caller knows them by; a reply that comes again sends nothing.
    """
    links = [signature("a.link", task_id="link"), signature("a.other", task_id="other", args=(7,))]
    chain = [signature("a.last", task_id="last"), signature("a.next", task_id="next")]
    request = a_request(callbacks=[dict(one) for one in links], chain=[dict(one) for one in chain])
    submitted(client, request)
    reply = ended(consumer(), redis, queue)

    completion.complete(reply)
    completion.complete(reply)

    value = value_of(app, request.id)
    expected = [("a.link", "link", [value]), ("a.other", "other", [value, 7]), ("a.next", "next", [value])]
    assert expected == sent(broker)
    assert states.SUCCESS == state_of(app, request.id)


def test_a_chord_counts_each_part_once(
    app: Celery, completion: Completion, client: Client, consumer: MakeConsumer, redis: Redis, queue: str, broker: Redis
) -> None:
    """
    Replies that come twice, and in another order, complete a chord once, with the answers in the parts' order.
    """
    worker = consumer()
    parts = [signature("pagemill.generate", kwargs={"prompt": f"{n}"}, app=app) for n in range(3)]
    body = chord(parts, signature("a.body", app=app)).apply_async()
    requests = [request_of(text) for text in reversed(broker.lrange("pagemill.ingress", 0, -1))]
    replies = []
    for place, request in enumerate(requests):
        submitted(client, request, prompt=f"{place}")
        replies.append(ended(worker, redis, queue, metadata={"place": f"{place}"}))

    for reply in (replies[2], replies[2], replies[0], replies[0]):
        completion.complete(reply)
    assert [] == sent(broker)
    for reply in (replies[1], replies[1], replies[2]):
        completion.complete(reply)

    [(name, task_id, [values])] = sent(broker)
    assert ("a.body", body.id, ["0", "1", "2"]) == (name, task_id, [value["metadata"]["place"] for value in values])


def request_of(text: bytes) -> Context:
    """The request of a message, as a worker has it."""
    message = json.loads(text)
    _, _, embed = json.loads(base64.b64decode(message["body"]))
    return Context(message["headers"] | embed | {"delivery_info": message["properties"]["delivery_info"]})


def test_a_failure_reaches_the_chain_and_the_errbacks(
    app: Celery, completion: Completion, client: Client, consumer: MakeConsumer, redis: Redis, queue: str, broker: Redis
) -> None:
    """
    The task raises by the failure's code, the steps behind it fail with it, and errbacks get the task's id.
    """
    request = a_request(
        errbacks=[dict(signature("a.alarm", task_id="alarm"))], chain=[dict(signature("a.next", task_id="next"))]
    )
    submitted(client, request)
    failure = Failure(code="prompt_too_long", message="too long")

    completion.complete(ended(consumer(), redis, queue, "failed", failure=failure, completions=()))

    for task_id in (request.id, "next"):
        raised = value_of(app, task_id)
        assert ("PromptTooLong", ("too long", "prompt_too_long")) == (type(raised).__name__, raised.args)
    assert [("a.alarm", "alarm", [request.id])] == sent(broker)


def test_a_cancelled_job_is_a_revoked_task(
    app: Celery, completion: Completion, client: Client, consumer: MakeConsumer, redis: Redis, queue: str
) -> None:
    """
    Its caller hears TaskRevokedError.
    """
    request = a_request()
    submitted(client, request)

    completion.complete(ended(consumer(), redis, queue, "cancelled"))

    assert states.REVOKED == state_of(app, request.id)
    assert isinstance(value_of(app, request.id), TaskRevokedError)


def test_an_answer_that_comes_after_the_revoke_changes_nothing(
    app: Celery, completion: Completion, client: Client, consumer: MakeConsumer, redis: Redis, queue: str, broker: Redis
) -> None:
    """
    A caller that has seen REVOKED does not see SUCCESS later, and nothing behind the task runs.
    """
    request = a_request(callbacks=[dict(signature("a.link"))])
    submitted(client, request)
    app.backend.mark_as_revoked(request.id, "revoked")

    completion.complete(ended(consumer(), redis, queue))

    assert states.REVOKED == state_of(app, request.id)
    assert [] == sent(broker)


def test_a_result_that_nobody_wants_is_not_kept(
    app: Celery, completion: Completion, client: Client, consumer: MakeConsumer, redis: Redis, queue: str, broker: Redis
) -> None:
    """
    With ignore_result the backend holds nothing, and callbacks run all the same.
    """
    request = a_request(ignore_result=True, callbacks=[dict(signature("a.link", task_id="link"))])
    submitted(client, request)

    completion.complete(ended(consumer(), redis, queue))

    assert [("a.link", "link")] == [(name, task_id) for name, task_id, _ in sent(broker)]
    assert [] == app.backend.client.keys("celery-task-meta-*")


def test_results_expire(
    app: Celery, completion: Completion, client: Client, consumer: MakeConsumer, redis: Redis, queue: str
) -> None:
    """
    The backend forgets a completed task when it is time to.
    """
    request = a_request()
    submitted(client, request)

    completion.complete(ended(consumer(), redis, queue))

    assert 86000 < app.backend.client.ttl(f"celery-task-meta-{request.id}") <= 86400


def test_a_result_that_is_gone_is_a_failure(
    app: Celery, completion: Completion, client: Client, consumer: MakeConsumer, redis: Redis, queue: str
) -> None:
    """
    No caller waits for ever because the completer was away for longer than results are kept.
    """
    request = a_request()
    job_id = submitted(client, request)
    reply = ended(consumer(), redis, queue)
    client.forget(job_id)

    completion.complete(reply)

    assert ("ResultLost", "result_lost") == (
        type(value_of(app, request.id)).__name__,
        value_of(app, request.id).args[1],
    )


def test_a_job_that_runs_anew_is_waited_for(
    app: Celery, completion: Completion, client: Client, consumer: MakeConsumer, redis: Redis, queue: str
) -> None:
    """
    A dead letter may be requeued before its failure was told to Celery: the new end counts.
    """
    request = a_request()
    submitted(client, request)
    worker = consumer()
    [job] = worker.pull()
    worker.run(worker.consumer.bury(job, why="retries", message="8 attempts failed"))
    replies = Replies(redis, queue, "celery", block_s=0.01)
    [early] = replies.take()
    replies.ack([early])
    client.requeue_dead(client.dead_letters()[0].entry_id)

    completion.complete(early)
    assert states.PENDING == state_of(app, request.id)
    completion.complete(ended(worker, redis, queue))

    assert "answer" == value_of(app, request.id)["text"]


def test_a_failure_that_was_told_is_followed_by_the_answer(
    app: Celery, completion: Completion, client: Client, consumer: MakeConsumer, redis: Redis, queue: str
) -> None:
    """
    A dead letter that is requeued after its failure was told gives the task its answer in the end.
    """
    request = a_request()
    submitted(client, request)
    worker = consumer()
    [job] = worker.pull()
    worker.run(worker.consumer.bury(job, why="retries", message="8 attempts failed"))
    replies = Replies(redis, queue, "celery", block_s=0.01)
    [early] = replies.take()
    replies.ack([early])
    completion.complete(early)
    assert "EngineError" == type(value_of(app, request.id)).__name__

    client.requeue_dead(client.dead_letters()[0].entry_id)
    completion.complete(ended(worker, redis, queue))

    assert states.SUCCESS == state_of(app, request.id)


@pytest.mark.parametrize("context", ["", "{", "[]", '{"id": null}', '{"callback": 7}'])
def test_a_reply_of_somebody_else_is_passed_over(completion: Completion, context: str) -> None:
    """
    A job or a batch of any producer may name our stream: it stops nothing.
    """
    completion.complete(Reply("1-0", "a-job", "", "done", context))
    if "callback" not in context:
        completion.complete(Reply("1-0", "", "a-batch", "ended", context))


def test_what_cannot_be_completed_fails(app: Celery, completion: Completion) -> None:
    """
    Where the completer's own code fails, the caller hears of it.
    """
    request = a_request(callbacks=[{"task": None}])

    completion.give_up(Reply("1-0", "a-job", "", "done", pack(request)), TypeError("no such callback"))

    raised = value_of(app, request.id)
    assert ("ResultLost", True) == (type(raised).__name__, "TypeError: no such callback" in raised.args[0])


def test_a_queue_that_is_away_is_no_failure(app: Celery) -> None:
    """
    The reply is to be tried again.
    """
    request = a_request()
    with Client("redis://127.0.0.1:1/0", queue="q") as away, pytest.raises(QueueUnavailable):
        Completion(app, away).complete(Reply("1-0", "a-job", "", "done", pack(request)))

    assert states.PENDING == state_of(app, request.id)


def test_the_end_of_a_batch_calls_back(
    completion: Completion, client: Client, consumer: MakeConsumer, redis: Redis, queue: str, broker: Redis
) -> None:
    """
    The caller's task gets the batch's counts; should the reply come twice, the second call has the same id.
    """
    context = json.dumps({"callback": {"task": "a.night_is_done", "kwargs": {"x": 1}}})
    batch_id = client.create_batch(reply_to="celery", reply_context=context).batch_id
    client.submit(a_job(batch=batch_id))
    worker = consumer()
    worker.finish(*worker.pull())
    client.seal_batch(batch_id)
    replies = Replies(redis, queue, "celery", block_s=0.01)
    [reply] = replies.take()
    replies.ack([reply])

    completion.complete(reply)
    completion.complete(reply)

    (name, task_id, [status]), again = sent(broker)
    assert ("a.night_is_done", "ended", 1, 0) == (name, status["state"], status["done"], status["num_open"])
    assert task_id == again[1]


@pytest.mark.parametrize("status", ["done", "failed", "cancelled", "expired"])
def test_every_end_of_a_job_ends_a_task(status: ResultStatus) -> None:
    """
    Also where a running job that expired says no more than that.
    """
    failure = Failure(code="poison", message="m") if status == "failed" else None
    ending = ending_of(Result(job_id="j", status=status, failure=failure))

    expected = {
        "done": (states.SUCCESS, None),
        "failed": (states.FAILURE, "Poison"),
        "cancelled": (states.REVOKED, None),
        "expired": (states.FAILURE, "DeadlinePassed"),
    }[status]
    assert expected == (ending.state, type(ending.error).__name__ if ending.error else None)
