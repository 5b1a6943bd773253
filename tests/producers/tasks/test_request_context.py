"""What travels of a task's request."""

import pytest
from celery.app.task import Context

from producers.tasks.request_context import pack, unpack


def a_request(**fields: object) -> Context:
    return Context(
        {"id": "t", "task": "pagemill.generate", "delivery_info": {"priority": 3, "redelivered": None}} | fields
    )


def test_what_completes_a_task_comes_back() -> None:
    """
    All that Celery's backend asks of a request: its place in groups, chords and chains, and its callbacks.
    """
    sent = {
        "group": "g", "group_index": 0, "chord": {"task": "b"}, "chain": [{"task": "c"}], "callbacks": [{"task": "d"}],
        "errbacks": [{"task": "e"}], "root_id": "r", "parent_id": "p", "ignore_result": True,
    }  # fmt: skip

    request = unpack(pack(a_request(**sent)))

    assert sent == {name: getattr(request, name) for name in sent}
    assert ("t", "pagemill.generate", 3) == (request.id, request.task, request.delivery_info["priority"])


def test_each_delivery_of_a_message_is_packed_alike() -> None:
    """
    A message that comes again, or is tried again, makes the same job.
    """
    first = a_request(retries=0, callbacks=None, chain=[])
    again = a_request(retries=4, hostname="other", callbacks=[])
    again.delivery_info["redelivered"] = True

    assert pack(first) == pack(again)


def test_neither_prompt_nor_arguments_travel() -> None:
    """
    The job has them already.
    """
    assert "long" not in pack(a_request(args=["long"], kwargs={"prompt": "long"}))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"id": 7}', "null"])
def test_what_nobody_packed_is_refused(text: str) -> None:
    """
    Anybody may name our stream of replies.
    """
    with pytest.raises(ValueError, match=r"no task's context|Expecting"):
        unpack(text)
