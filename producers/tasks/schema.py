"""
The arguments of the tasks as JSON Schema.

    python -m producers.tasks.schema > docs/celery.schema.json
"""

import json
from typing import Any

from pagemill.schema import Job
from producers.tasks.batches import ARGUMENTS, MAX_ROWS
from producers.tasks.ingress import MAX_RESULTS, RESERVED

_TEXT = {"type": "string"}
_OBJECT = {"type": "object"}
# types of what a batch takes
_BATCH: dict[str, dict[str, Any]] = {
    "items": {"type": "array", "maxItems": MAX_ROWS, "items": {"anyOf": [_TEXT, {"$ref": "#/$defs/Job"}]}},
    "uri": _TEXT,
    "idem": _TEXT,
    "defaults": _OBJECT,
    "callback": {"anyOf": [_TEXT, {"type": "object", "required": ["task"]}]},
    "result_ttl_s": {"type": "integer", "minimum": 1},
    "tenant": _TEXT,
    "model": _TEXT,
    "webhook": _TEXT,
    "metadata": {"type": "object", "additionalProperties": _TEXT},
}


def schemas() -> dict[str, Any]:
    """The keyword arguments of each task, by its name; `generate` takes its prompt by place too."""
    job = Job.model_json_schema(ref_template="#/$defs/{model}")
    shared = job.pop("$defs")
    answer = {"type": "object", "properties": {"text": _TEXT}, "required": ["text"]}
    generate = {name: field for name, field in job["properties"].items() if name not in RESERVED}
    generate["prompt"] = {"anyOf": [*generate["prompt"]["anyOf"], answer]}
    ids = {"type": "array", "maxItems": MAX_RESULTS, "items": _TEXT}
    tasks = {
        "pagemill.generate": _arguments(generate),
        "pagemill.submit": _arguments(job["properties"]),
        "pagemill.results": _arguments({"job_ids": ids}, "job_ids"),
        "pagemill.submit_batch": _arguments({name: _BATCH[name] for name in ARGUMENTS}),
        "pagemill.batch_status": _arguments({"batch_id": _TEXT}, "batch_id"),
        "pagemill.cancel": _arguments({"job_id": _TEXT, "task_id": _TEXT, "batch_id": _TEXT}),
        "pagemill.bulk": _arguments({"name": _TEXT, "date": {"type": "string", "format": "date"}}, "name"),
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Keyword arguments of Pagemill's Celery tasks",
        "properties": tasks,
        "$defs": {**shared, "Job": _arguments(job["properties"])},
    }


def _arguments(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        **({"required": list(required)} if required else {}),
    }


if __name__ == "__main__":
    print(json.dumps(schemas(), indent=1))
