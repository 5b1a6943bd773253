"""
Completes tasks that their ingress has ignored: from a reply to what Celery would have done in its worker.

A reply may come twice, and every part of this may: next steps have their ids from the caller, a state that is
SUCCESS stays so, and a chord counts each of its parts once.
"""

import json
import uuid
from typing import Any, NamedTuple

import structlog
from celery import Celery, group, signature, states
from celery.app.task import Context

from pagemill.client import Client
from pagemill.errors import BatchNotFound, JobNotFound, ObjectStoreError, StoreAway, WaitTimeout
from pagemill.replies import Reply
from pagemill.schema import Failure, Result
from producers.tasks.failures import TaskFailure, failure, of_job
from producers.tasks.ingress import answer, batch_fields
from producers.tasks.request_context import unpack

log = structlog.get_logger(__name__)

# callbacks of batches have ids of their own, the same each time
_NAMES = uuid.UUID("5a1dc6c6-1d2f-4a8e-9c2b-8f4f3c1a7b52")


class Ending(NamedTuple):
    """How a task ends: in `state`, with a value or with an exception."""

    state: str
    value: dict[str, Any] | None = None
    error: TaskFailure | None = None


class Completion:
    """
    What one thread completes tasks with.

    Args:
        client: Of the queue that the replies are from.
    """

    def __init__(self, app: Celery, client: Client) -> None:
        self._app = app
        self._client = client

    def complete(self, reply: Reply) -> None:
        """
        Do all that the reply's task or batch waits for; a context that nobody of us wrote is passed over.

        Raises:
            QueueUnavailable, StoreAway: it cannot be read now.
            Whatever Celery raises where its broker or its backend is away.
        """
        try:
            if reply.batch_id:
                sent = json.loads(reply.context)["callback"]
            else:
                request = unpack(reply.context)
        except (ValueError, KeyError, TypeError) as error:
            log.error("completer.no_context", **ids_of(reply), error=type(error).__name__)
            return
        if reply.batch_id:
            self._call_back(sent, reply.batch_id)
            return
        ending = self._ending(reply.job_id)
        if ending is not None:
            self._end(request, ending)

    def give_up(self, reply: Reply, error: Exception) -> None:
        """End a task that cannot be completed as a failure, without its callbacks, which may be the cause."""
        if not reply.job_id:
            return
        request = unpack(reply.context)
        request.update(callbacks=None, errbacks=None, chain=None)
        reason = failure("result_lost", f"the task could not be completed: {type(error).__name__}: {error}")
        self._app.backend.mark_as_failure(request.id, reason, request=request, store_result=not request.ignore_result)

    def _ending(self, job_id: str) -> Ending | None:
        """How the job ended; None where it runs anew, and will tell again."""
        try:
            return ending_of(self._client.result(job_id, wait_s=0))
        except WaitTimeout:
            return None
        except JobNotFound:
            message = f"the result of job {job_id} has expired before its task was completed"
            return Ending(states.FAILURE, error=failure("result_lost", message))
        except StoreAway:
            raise
        except ObjectStoreError as error:
            return Ending(states.FAILURE, error=failure("object_store_error", str(error)))

    def _end(self, request: Context, ending: Ending) -> None:
        backend = self._app.backend
        # a task that has ended as revoked has been told of: an answer that came too late does not change that
        known = states.PENDING if request.ignore_result else backend.get_state(request.id)
        stored = not request.ignore_result
        if ending.state == states.REVOKED or known == states.REVOKED:
            backend.mark_as_revoked(request.id, "cancelled", request=request, store_result=stored)
        elif ending.state == states.FAILURE:
            backend.mark_as_failure(request.id, ending.error, request=request, store_result=stored)
        else:
            if known != states.SUCCESS:
                # before the state, as Celery does it: a SUCCESS says that these were sent
                self._go_on(request, ending.value)
            backend.mark_as_done(request.id, ending.value, request=request, store_result=stored)
        log.info("completer.completed", task_id=request.id, state=ending.state)

    def _go_on(self, request: Context, value: Any) -> None:
        """Send the callbacks and the next step of the chain."""
        options: dict[str, Any] = {"parent_id": request.id, "root_id": request.root_id or request.id}
        if request.headers:
            # the trace that the task was of
            options["headers"] = dict(request.headers)
        if self._app.conf.task_inherit_parent_priority:
            options["priority"] = request.delivery_info.get("priority")
        calls = [signature(one, app=self._app) for one in request.callbacks or ()]
        groups = [one for one in calls if isinstance(one, group)]
        single = [one for one in calls if not isinstance(one, group)]
        for one in groups:
            request.children.append(one.apply_async((value,), **options))
        if len(single) > 1:
            request.children.append(group(single, app=self._app).apply_async((value,), **options))
        elif single:
            request.children.append(single[0].apply_async((value,), **options))
        if request.chain:
            *later, step = request.chain
            following = signature(step, app=self._app)
            request.children.append(following.apply_async((value,), chain=later, **options))

    def _call_back(self, sent: dict[str, Any], batch_id: str) -> None:
        try:
            status = batch_fields(self._client, batch_id)
        except BatchNotFound:
            status = {"batch_id": batch_id, "state": "ended"}
        call = signature({"args": [], "kwargs": {}, "options": {}, **sent}, app=self._app)
        task_id = call.options.get("task_id") or str(uuid.uuid5(_NAMES, batch_id))
        call.apply_async((status,), task_id=task_id)
        log.info("completer.called_back", batch_id=batch_id, task_id=task_id)


def ids_of(reply: Reply) -> dict[str, str]:
    """What a line about a reply says of it."""
    return {"batch_id": reply.batch_id} if reply.batch_id else {"job_id": reply.job_id}


def ending_of(result: Result) -> Ending:
    """How the task of a job ends."""
    if result.status == "done":
        return Ending(states.SUCCESS, value=answer(result))
    if result.status == "cancelled":
        return Ending(states.REVOKED)
    reason = result.failure
    if reason is None:
        # it ran when its deadline passed
        reason = Failure(code="deadline_passed", message="the deadline passed before the answer was complete")
    return Ending(states.FAILURE, error=of_job(reason))
