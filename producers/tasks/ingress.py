"""What the tasks do that take a prompt, a job or its name: each a call or two of the client."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from celery.app.task import Context

from pagemill.client import Client
from pagemill.errors import BatchNotFound, Conflict, JobNotFound, WaitTimeout
from pagemill.schema import Job, Result
from producers.tasks.failures import failure
from producers.tasks.ids import job_id_of, submitted_id_of
from producers.tasks.request_context import pack

# what generate says for itself
RESERVED = ("id", "version", "idempotency_key", "reply_to", "reply_context")

# that one call asks for
MAX_RESULTS = 256


def answer(result: Result) -> dict[str, Any]:
    """What `generate` gives: the first answer's text, and all there is but token ids."""
    value = result.model_dump(mode="json", exclude={"version": True, "completions": {"__all__": {"token_ids"}}})
    return {"text": result.text, **value}


class Ingress:
    """
    The short tasks.

    Args:
        revoke: Has Celery's workers discard a task that none of them has begun.
    """

    def __init__(self, client: Client, *, reply_to: str, result_ttl_s: int, revoke: Callable[[str], object]) -> None:
        self._client = client
        self._reply_to = reply_to
        self._result_ttl_s = result_ttl_s
        self._revoke = revoke

    def generate(self, request: Context, prompt: object, fields: Mapping[str, Any]) -> str:
        """
        Put a task's job into the queue, once, and return its id; the completer ends the task.

        Raises:
            InvalidJob, UnknownModel, BatchNotFound, BatchClosed: it is refused for good.
            Busy, QueueUnavailable: it is to be tried again.
        """
        given = {"result_ttl_s": self._result_ttl_s, **fields_of(prompt, fields)}
        job = Job.build(**given, id=job_id_of(request.id), reply_to=self._reply_to, reply_context=pack(request))
        try:
            self._client.submit(job)
        except Conflict as error:
            # a task's id stands for one job: that this message differs in some detail from the one which made
            # it, as a retried one may, makes no second job
            if error.job_id != job.id:
                raise
        return job.id

    def submit(self, task_id: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """As `generate`, for a caller that asks for the result later or never."""
        accepted = self._client.submit(Job.build(**{"id": submitted_id_of(task_id), **fields}))
        return {"job_id": accepted.job_id, "state": accepted.state, "duplicate": accepted.duplicate}

    def results(self, job_ids: object) -> list[dict[str, Any]]:
        """Where these jobs stand, in order, with the results of those that have ended."""
        if not isinstance(job_ids, list) or len(job_ids) > MAX_RESULTS:
            raise failure("invalid_arguments", f"job_ids: want a list of no more than {MAX_RESULTS} ids")
        return [self._result(str(job_id)) for job_id in job_ids]

    def _result(self, job_id: str) -> dict[str, Any]:
        try:
            result = self._client.result(job_id, wait_s=0)
        except WaitTimeout:
            return {"job_id": job_id, "state": self._client.status(job_id).state, "result": None}
        except JobNotFound:
            return {"job_id": job_id, "state": "unknown", "result": None}
        return {"job_id": job_id, "state": result.status, "result": answer(result)}

    def cancel(self, named: Mapping[str, object]) -> dict[str, str]:
        """
        End what is named: a job, the task of one, or a batch.

        Raises:
            JobNotFound, BatchNotFound: there is none of that name.
        """
        given = [(kind, name) for kind, name in named.items() if name is not None]
        if len(given) != 1:
            raise failure("invalid_arguments", f"want exactly one of {', '.join(named)}")
        [(kind, name)] = given
        if not isinstance(name, str):
            raise failure("invalid_arguments", f"{kind} is of type {type(name).__name__}: want a text")
        if kind == "batch_id":
            return {"state": self._client.cancel_batch(name).state}
        if kind == "job_id":
            return {"state": self._client.cancel(name)}
        # first the workers, so that no job comes of it once there was none
        self._revoke(name)
        try:
            return {"state": self._client.cancel(job_id_of(name))}
        except JobNotFound:
            return {"state": "revoked"}

    def batch_status(self, batch_id: str) -> dict[str, Any]:
        """
        Raises:
            BatchNotFound: there is none of that name, or not any more.
        """
        return batch_fields(self._client, batch_id)


def batch_fields(client: Client, batch_id: str) -> dict[str, Any]:
    """
    A batch's counts, as tasks give them.

    Raises:
        BatchNotFound: there is none of that name, or not any more.
    """
    if not isinstance(batch_id, str):
        raise BatchNotFound(f"batch_id is {batch_id!r}: want the name of a batch")
    status = client.batch_status(batch_id)
    return {**asdict(status), "num_open": status.num_open}


def fields_of(prompt: object, fields: Mapping[str, Any]) -> dict[str, Any]:
    """
    The fields of a job from what `generate` was called with.

    A step of a chain gets what the step before it gave: a text, or the answer of another `generate`.

    Raises:
        TaskFailure: an argument is not the caller's to give, or the prompt is neither.
    """
    wrong = sorted(set(fields) & set(RESERVED))
    if wrong:
        raise failure("invalid_arguments", f"{', '.join(wrong)}: not an argument of pagemill.generate")
    if prompt is None:
        return dict(fields)
    if isinstance(prompt, Mapping) and isinstance(prompt.get("text"), str):
        prompt = prompt["text"]
    if not isinstance(prompt, str | Sequence):
        kind = type(prompt).__name__
        raise failure("invalid_arguments", f"the prompt is of type {kind}: want a text, token ids, or an answer")
    return {**fields, "prompt": prompt}
