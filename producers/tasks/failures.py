"""
What callers see raised.

A caller without our code gets a class of the same name, which Celery makes, with (message, code) as its
args: `type(error).__name__` is "PromptTooLong" where the code is "prompt_too_long".
"""

from typing import get_args

# by their modules: names of this one are those of codes
from pagemill import errors, schema

_OWN_CODES = (
    *(
        "batch_closed",
        "batch_not_found",
        "bulk_error",
        "busy",
        "conflict",
        "invalid_arguments",
        "invalid_batch",
        "job_not_found",
    ),
    *("object_store_error", "queue_unavailable", "result_lost", "spec_error"),
)


class TaskFailure(Exception):
    """Base of all that our tasks raise: a message for people, and a code for programs."""

    def __init__(self, message: str, code: str = "task_failure") -> None:
        super().__init__(message, code)


def _class_name(code: str) -> str:
    return "".join(word.capitalize() for word in code.split("_"))


# codes are added with versions of the wire format: each has its class
CLASSES: dict[str, type[TaskFailure]] = {
    code: type(_class_name(code), (TaskFailure,), {"__module__": __name__, "__doc__": f"Raised for {code}."})
    for code in (*get_args(schema.FailureCode), *_OWN_CODES)
}
# where the processes of a pool, and callers that have our code, find them
globals().update({kind.__name__: kind for kind in CLASSES.values()})


def failure(code: str, message: str) -> TaskFailure:
    return CLASSES.get(code, TaskFailure)(message, code)


def of_job(reason: schema.Failure) -> TaskFailure:
    """What a job that failed raises."""
    return failure(reason.code, reason.message)


def of_error(error: errors.PagemillError) -> TaskFailure:
    """What a refused submit raises: by its code, or named as our own error."""
    if isinstance(error, errors.InvalidJob):
        return failure(error.code, str(error))
    for kind in type(error).__mro__:
        code = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in kind.__name__).lstrip("_")
        if code in CLASSES:
            return failure(code, str(error))
    return TaskFailure(str(error))
