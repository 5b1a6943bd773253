"""The tasks that other services call by name, and what is tried again."""

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from celery import Celery, Task
from celery.exceptions import Ignore, Reject, Retry
from kombu.exceptions import OperationalError
from structlog.contextvars import bound_contextvars

from pagemill.client import Client
from pagemill.client_core import store_of
from pagemill.errors import Busy, PagemillError, QueueUnavailable, StoreAway
from producers.tasks.batches import submit_batch
from producers.tasks.bulk import RunsElsewhere, run_bulk
from producers.tasks.config import today
from producers.tasks.failures import TaskFailure, failure, of_error
from producers.tasks.ingress import Ingress
from producers.tasks.request_context import headers_of
from producers.tasks.settings import CelerySettings

if TYPE_CHECKING:
    from pagemill.tracing import Tracer

# between tries while a server is away: twice as long each time
MAX_PAUSE_S = 60.0

# until it is asked again whether a bulk job still runs elsewhere
BULK_PAUSE_S = 60.0


def register(app: Celery, settings: CelerySettings) -> Client:
    """Give the app our tasks, and return the client that they share; it connects with the first of them."""
    client = Client(
        settings.redis_url,
        queue=settings.queue,
        object_store=settings.object_store,
        max_queued_tokens=settings.max_queued_tokens,
    )
    ingress = Ingress(
        client,
        reply_to=settings.celery_reply_to,
        result_ttl_s=settings.celery_result_expires_s,
        revoke=app.control.revoke,
    )
    # a caller's mistake is no error of this worker's: it is logged without a traceback
    # not shared: the completer's app in this process sends to these tasks as any caller does
    declare = partial(app.task, bind=True, max_retries=None, throws=(TaskFailure,), shared=False)
    within = partial(told, tracer=client.tracer)
    _register_jobs(declare, within, ingress)
    _register_batches(declare, within, ingress, client, settings)
    _register_bulk(declare, within, settings)
    return client


def _register_jobs(declare: Any, within: Any, ingress: Ingress) -> None:
    @declare(name="pagemill.generate")
    def generate(self: Task, prompt: Any = None, **fields: Any) -> None:
        with within(self):
            job_id = ingress.generate(self.request, prompt, fields)
        raise Ignore(f"job {job_id}: the completer ends this task")

    @declare(name="pagemill.submit")
    def submit(self: Task, **fields: Any) -> dict[str, Any]:
        with within(self):
            return ingress.submit(self.request.id, fields)

    @declare(name="pagemill.results")
    def results(self: Task, job_ids: list[str]) -> list[dict[str, Any]]:
        with within(self):
            return ingress.results(job_ids)

    @declare(name="pagemill.cancel")
    def cancel(self: Task, job_id: str | None = None, task_id: str | None = None, batch_id: str | None = None) -> Any:
        with within(self):
            return ingress.cancel({"job_id": job_id, "task_id": task_id, "batch_id": batch_id})


def _register_batches(declare: Any, within: Any, ingress: Ingress, client: Client, settings: CelerySettings) -> None:
    source = store_of(settings.celery_batch_source or settings.object_store)

    @declare(name="pagemill.submit_batch")
    def batch(self: Task, **given: Any) -> dict[str, Any]:
        with within(self):
            return submit_batch(client, self.request.id, given, reply_to=settings.celery_reply_to, source=source)

    @declare(name="pagemill.batch_status")
    def batch_status(self: Task, batch_id: str) -> dict[str, Any]:
        with within(self):
            return ingress.batch_status(batch_id)


def _register_bulk(declare: Any, within: Any, settings: CelerySettings) -> None:
    @declare(name="pagemill.bulk")
    def bulk(self: Task, name: str, date: str | None = None) -> dict[str, Any]:
        with within(self):
            return run_bulk(name, date or today(settings.celery_timezone))


@contextmanager
def told(task: Task, tracer: "Tracer | None" = None) -> Iterator[None]:
    """
    Do a task's work under its name in the log, and within its span where traces are on; turn our errors into what
    Celery knows: try again what passes, fail at once what does not.

    A retried task goes back into the broker before this message is acknowledged, so that it is not lost.

    Raises:
        Retry, Reject: the queue is busy, or a server is away.
        TaskFailure: it will never go otherwise.
    """
    request = task.request
    span: AbstractContextManager[object] = nullcontext()
    if tracer is not None:
        span = tracer.processing(task.name, request.id, headers_of(request))
    try:
        with bound_contextvars(task_id=request.id, task=task.name), span:
            yield
    except Busy as error:
        # a little later than told, and not all at once
        raise _again(task, of_error(error), error.retry_after_s * random.uniform(1.0, 1.25)) from error
    except (QueueUnavailable, StoreAway) as error:
        pause_s = min(MAX_PAUSE_S, 2.0 ** min(task.request.retries, 6)) * random.uniform(0.5, 1.0)
        raise _again(task, of_error(error), pause_s) from error
    except RunsElsewhere as error:
        raise _again(task, failure("busy", str(error)), BULK_PAUSE_S) from error
    except PagemillError as error:
        raise of_error(error) from None


def _again(task: Task, why: TaskFailure, pause_s: float) -> Retry | Reject:
    """What has Celery try the task again."""
    try:
        return task.retry(exc=why, countdown=pause_s, throw=False)
    except Reject as rejected:
        # where the broker is away, Celery would let go of the message
        return Reject(rejected.reason, requeue=isinstance(rejected.reason, OperationalError))
