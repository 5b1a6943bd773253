"""Names of jobs and batches that are made of a task's id, so that a task that comes again makes no second one."""

import re
from hashlib import blake2b

from pagemill.schema import NAME

# longer names would not leave room for a row's number
_MAX_CHARS = 100


def job_id_of(task_id: str) -> str:
    """The job of a `pagemill.generate`."""
    return _name("celery", task_id)


def submitted_id_of(task_id: str) -> str:
    """The job of a `pagemill.submit` that names none."""
    return _name("submit", task_id)


def batch_id_of(key: str) -> str:
    """The batch of a `pagemill.submit_batch`, by its key or task id."""
    return _name("batch", key)


def row_id(batch_id: str, index: int) -> str:
    """The job of a batch's row, counted from 0."""
    return f"{batch_id}.{index}"


def _name(kind: str, text: str) -> str:
    name = f"{kind}-{text}"
    if re.fullmatch(NAME, name) and len(name) <= _MAX_CHARS:
        return name
    # Celery takes any text as an id
    return f"{kind}-{blake2b(text.encode(errors='replace'), digest_size=16).hexdigest()}"
