"""
What a producer may have to catch, by who must act.

PagemillError
├── InvalidJob              change the job: `code` says what kind of fault
│   └── NewerVersion        it is of a later wire format: a newer Pagemill takes it
├── UnknownModel            no queue serves that model
├── Conflict                the id or idempotency key was used for something else
├── BatchNotFound           no such batch, or it has expired
├── BatchClosed             the batch was sealed or cancelled: put the job into another one
├── Busy                    the queue is full: try again after `retry_after_s`
├── JobNotFound             no such job, or its result has expired
├── JobFailed               the job ended without an answer: `result` says why
├── WaitTimeout             the job has not ended yet
├── QueueUnavailable        the server cannot be reached or refuses: operator
│   ├── ServerAway          out of reach, loading, or no master now: it may come back by itself
│   └── ServerFull          it is out of memory; a submit raises Busy instead
├── UnsafeServer            the server's settings can lose jobs: operator
├── ObjectStoreError        an object cannot be read or written: operator
│   ├── StoreAway           out of reach, or overloaded: it may come back by itself
│   ├── ObjectNotFound      there is no such object (any more)
│   ├── ObjectChanged       it is not the object that was looked at before
│   └── ObjectExists        there is one already, and it was not to be replaced
└── SettingsError           a setting is unknown or out of range: operator
"""

from typing import Any, Literal

BusyReason = Literal["memory", "tokens", "tenant", "lane"]


class PagemillError(Exception):
    """Base of all errors that Pagemill raises on purpose."""


class InvalidJob(PagemillError):
    """Raised when a job breaks the schema; nothing was submitted."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class NewerVersion(InvalidJob):
    """Raised when a job is of a wire format that came after this Pagemill."""

    def __init__(self, version: int, message: str) -> None:
        super().__init__("unsupported_version", message)
        self.version = version


class UnknownModel(PagemillError):
    """Raised when no worker has ever registered the model that a job asks for."""


class Conflict(PagemillError):
    """Raised when an id or key comes back with another content; `job_id` is the first one's, or the batch's."""

    def __init__(self, job_id: str, message: str) -> None:
        super().__init__(message)
        self.job_id = job_id


class BatchNotFound(PagemillError):
    """Raised when the queue does not know the batch, or not any more."""


class BatchClosed(PagemillError):
    """Raised when a job comes for a batch that takes no more; the job was not accepted."""


class Busy(PagemillError):
    """
    Raised when the queue takes no more for now; the job was not accepted.

    Args:
        reason: What is full: the server's memory, all that may wait (max_queued_tokens), or the
            operator's limit for the tenant or the lane.
        retry_after_s: When there may be room, as fast as jobs end now.
    """

    def __init__(self, message: str, *, reason: BusyReason, retry_after_s: float) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class JobNotFound(PagemillError):
    """Raised when the queue does not know the job, or not any more."""


class JobFailed(PagemillError):
    """Raised when an answer was asked for and the job ended without one."""

    def __init__(self, result: Any, message: str) -> None:
        super().__init__(message)
        # a pagemill.schema.Result; that module imports this one, so the type is not named
        self.result = result


class WaitTimeout(PagemillError):
    """Raised when the time to wait is over and the job has not ended; it goes on."""


class QueueUnavailable(PagemillError):
    """
    Raised when the server cannot be reached, is loading, or refuses a command.

    After a submit, `job_id` is the job that may be in the queue or not: submitting the same
    again with that id is safe.
    """

    def __init__(self, message: str, *, job_id: str | None = None) -> None:
        super().__init__(message)
        self.job_id = job_id


class ServerAway(QueueUnavailable):
    """Raised when the server is out of reach, or not ready: what failed may be tried again later."""


class ServerFull(QueueUnavailable):
    """Raised when the server is out of memory, by all calls but submits."""


class UnsafeServer(PagemillError):
    """Raised when the server is set up so that accepted jobs can vanish."""


class ObjectStoreError(PagemillError):
    """Raised when an object cannot be read or written, after all retries."""


class StoreAway(ObjectStoreError):
    """Raised when the store cannot be reached, or is overloaded; whoever asks later may be served."""


class ObjectNotFound(ObjectStoreError):
    """Raised when there is no object under that name."""


class ObjectChanged(ObjectStoreError):
    """Raised when an object was written anew since its etag was read."""


class ObjectExists(ObjectStoreError):
    """Raised when an object is there already and must not be written over."""


class SettingsError(PagemillError):
    """Raised when a setting is unknown, has the wrong type, or is out of range."""
