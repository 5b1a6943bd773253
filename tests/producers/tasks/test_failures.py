"""What callers see raised."""

import json
import pickle
import re
from typing import get_args

import pytest
from celery import Celery

from pagemill import errors
from pagemill.errors import Busy, Conflict, InvalidJob, PagemillError, ServerAway, StoreAway
from pagemill.schema import Failure, FailureCode
from producers.tasks import failures
from producers.tasks.failures import TaskFailure, failure, of_error, of_job


@pytest.mark.parametrize("code", get_args(FailureCode))
def test_each_code_has_a_class_of_its_name(code: str) -> None:
    """
    A caller tells failures apart by the name of the class, and has message and code as args.
    """
    raised = of_job(Failure(code=code, message="why"))  # type: ignore[arg-type]

    assert code == re.sub(r"(?<!^)([A-Z])", r"_\1", type(raised).__name__).lower()
    assert ("why", code) == raised.args
    assert getattr(failures, type(raised).__name__) is type(raised)


def test_a_failure_passes_between_the_processes_of_a_pool() -> None:
    """
    It is pickled there.
    """
    again = pickle.loads(pickle.dumps(failure("prompt_too_long", "why")))

    assert ("PromptTooLong", ("why", "prompt_too_long")) == (type(again).__name__, again.args)


def test_a_caller_without_our_code_gets_the_same_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Celery makes the class from what the backend holds: a name and args.
    """
    monkeypatch.delitem(__import__("sys").modules, "producers.tasks.failures")
    backend = Celery(set_as_current=False, broker="memory://", backend="cache+memory://").backend
    stored = json.loads(
        backend.encode_result(failure("poison", "why"), "FAILURE")
        and backend.encode(backend.prepare_exception(failure("poison", "why")))
    )

    raised = backend.exception_to_python(stored)

    assert ("Poison", ("why", "poison")) == (type(raised).__name__, raised.args)
    assert not isinstance(raised, TaskFailure)


def test_a_later_code_is_a_failure_all_the_same() -> None:
    """
    A newer worker may end a job with a code that came after this ingress.
    """
    raised = failure("of_a_later_version", "why")

    assert (TaskFailure, ("why", "of_a_later_version")) == (type(raised), raised.args)


def test_all_that_a_client_raises_has_a_name() -> None:
    """
    Each error that a task may meet is a failure of its own, known by its code.
    """
    met: list[tuple[PagemillError, str]] = [
        (InvalidJob("empty_prompt", "e"), "EmptyPrompt"),
        (errors.NewerVersion(9, "e"), "UnsupportedVersion"),
        (errors.UnknownModel("e"), "UnknownModel"),
        (Conflict("j", "e"), "Conflict"),
        (errors.BatchNotFound("e"), "BatchNotFound"),
        (errors.BatchClosed("e"), "BatchClosed"),
        (errors.JobNotFound("e"), "JobNotFound"),
        (Busy("e", reason="tokens", retry_after_s=1.0), "Busy"),
        (ServerAway("e"), "QueueUnavailable"),
        (StoreAway("e"), "ObjectStoreError"),
        (errors.SettingsError("e"), "TaskFailure"),
    ]

    assert [name for _, name in met] == [type(of_error(error)).__name__ for error, _ in met]
