"""
What it takes to complete a task elsewhere: the part of its request that travels with the job.

The job carries it as `reply_context` and its reply brings it back; Celery's backend then gets the same
request as if the task had ended in its worker.
"""

import json
from typing import Any

from celery.app.task import Context

_FIELDS = (
    *("id", "task", "root_id", "parent_id", "group", "group_index", "chord", "chain", "callbacks", "errbacks"),
    *("ignore_result", "replaced_task_nesting", "stamps", "stamped_headers"),
)
# of how the message came: what next steps inherit, and what the backend notes
_DELIVERY = ("priority", "routing_key", "exchange")


def pack(request: Context) -> str:
    """The request as text; the same for each delivery of one message."""
    fields = {name: getattr(request, name, None) for name in _FIELDS}
    delivery = request.delivery_info or {}
    fields["delivery_info"] = {name: delivery[name] for name in _DELIVERY if delivery.get(name) is not None}
    fields["headers"] = headers_of(request)
    # what is empty is left out, as one delivery has none where another has an empty list; a place of 0 stays
    return json.dumps({name: value for name, value in fields.items() if value or type(value) is int})


def headers_of(request: Context) -> dict[str, str]:
    """The trace that a task's message belongs to: W3C's headers, where its sender has set them."""
    given = {**(getattr(request, "headers", None) or {}), **vars(request)}
    return {name: given[name] for name in ("traceparent", "tracestate") if isinstance(given.get(name), str)}


def unpack(text: str) -> Context:
    """
    Raises:
        ValueError: it was not packed here.
    """
    fields: Any = json.loads(text)
    if not isinstance(fields, dict) or not isinstance(fields.get("id"), str):
        raise ValueError(f"no task's context: {text[:80]!r}")
    # a request without a custom header has none, and Celery looks into where it came from
    return Context({"delivery_info": {}, "headers": {}, "args": [], "kwargs": {}, **fields})
