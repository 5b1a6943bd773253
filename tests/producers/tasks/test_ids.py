"""Names that are made of task ids."""

import re
import uuid

import pytest

from pagemill.schema import NAME
from producers.tasks.ids import batch_id_of, job_id_of, row_id, submitted_id_of


def test_a_task_is_one_job() -> None:
    """
    The name is a function of the id, and tells apart what the task was for.
    """
    task_id = str(uuid.UUID(int=7))

    assert job_id_of(task_id) == f"celery-{task_id}"
    assert 3 == len({job_id_of(task_id), submitted_id_of(task_id), batch_id_of(task_id)})


@pytest.mark.parametrize("task_id", ["", "a b", "größe", "x" * 500, "\ud800", "{tag}:1", "-", "a" * 93])
def test_any_text_that_celery_takes_gives_a_name(task_id: str) -> None:
    """
    Celery's ids may be any text; two of them never share a job.
    """
    name = job_id_of(task_id)

    assert re.fullmatch(NAME, row_id(name, 99_999))
    assert name == job_id_of(task_id)
    assert name != job_id_of(task_id + "'")
