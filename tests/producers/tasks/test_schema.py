"""The published schema of the tasks' arguments."""

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from producers.tasks.schema import schemas

PAGE = Path(__file__).resolve().parents[3] / "docs" / "celery.schema.json"


def test_the_published_schema_is_that_of_the_code() -> None:
    """
    `python -m producers.tasks.schema > docs/celery.schema.json` makes it anew.
    """
    assert schemas() == json.loads(PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("task", "arguments", "is_valid"),
    [
        ("generate", {"prompt": "a", "options": {"max_tokens": 3}, "lane": "bulk"}, True),
        ("generate", {"prompt": {"text": "an answer", "usage": {}}}, True),
        ("generate", {"prompt": "a", "id": "mine"}, False),
        ("generate", {"prompt": "a", "prioritty": 1}, False),
        ("generate", {"prompt": "a", "options": {"temperature": "hot"}}, False),
        ("submit", {"prompt": [1, 2], "id": "mine"}, True),
        ("submit_batch", {"items": ["a", {"prompt": "b"}], "callback": {"task": "x"}}, True),
        ("submit_batch", {"items": [{"promt": "b"}]}, False),
        ("results", {"job_ids": ["a"] * 257}, False),
        ("batch_status", {}, False),
    ],
)
def test_the_schema_says_what_the_tasks_take(task: str, arguments: dict[str, Any], is_valid: bool) -> None:
    """
    A service may check its arguments before it sends them.
    """
    schema = schemas()
    one = {"$defs": schema["$defs"], **schema["properties"][f"pagemill.{task}"]}

    assert is_valid == Draft202012Validator(one).is_valid(arguments)
