"""
Answers bound to a schema, a regex or a choice, from a client to SmolLM2 in a worker process and back.

The slow run has 50 prompts:

    pytest -m slow tests/worker/test_structured.py --timeout 900
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pagemill.client import Client
from pagemill.schema import Job, Result
from tests.support.models import real_model
from tests.support.servers import wait_for
from tests.support.services import worker_process

# with a reference, an optional, nested objects and arrays, as pydantic writes them
SCHEMA: dict[str, Any] = {
    "$defs": {
        "Place": {
            "type": "object",
            "properties": {"country": {"type": "string", "maxLength": 20}, "famous": {"type": "boolean"}},
            "required": ["country", "famous"],
            "additionalProperties": False,
        }
    },
    "title": "Subject",
    "type": "object",
    "properties": {
        "name": {"title": "Name", "type": "string"},
        "year": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 2100}, {"type": "null"}], "default": None},
        "kind": {"enum": ["person", "city", "thing"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 3},
        "place": {"$ref": "#/$defs/Place"},
    },
    "required": ["name", "kind", "tags", "place"],
    "additionalProperties": False,
}
NAMES = """
Paris, Einstein, the bicycle, Tokyo, Marie Curie, a violin, Cairo, Mozart, the telephone, Lima, Newton, a bridge,
Rome, Cleopatra, the compass, Oslo, Galileo, a lamp, Delhi, Darwin, the piano, Quito, Ada Lovelace, a clock,
Athens, Socrates, the wheel, Kyoto, Gandhi, a kite, Berlin, Bach, the printing press, Nairobi, Tesla, a mirror,
Havana, Picasso, the radio, Dublin, Turing, a ladder, Seoul, Homer, the lens, Bergen, Euler, a candle, Accra, Noether
"""
SUBJECTS = [name.strip() for name in NAMES.split(",")]


@pytest.fixture
def served(server_url: str, queue: str, client: Client, tmp_path: Path) -> Iterator[Client]:
    """A client whose queue is served by SmolLM2."""
    flags = ("--model", str(real_model()), "--dtype", "float32", "--max-model-len", "512", "--kv-cache-bytes", "512MiB")
    with worker_process(tmp_path / "log", "--redis-url", server_url, "--queue", queue, *flags) as worker:
        wait_for(client.workers, 60)
        # which takes a second, and is for those who need it
        assert not has_loaded(worker.engine_pid, "libxgrammar")
        yield client
        assert [False, True] == [has_loaded(pid, "libxgrammar") for pid in (worker.worker_pid, worker.engine_pid)]


def has_loaded(pid: int, library: str) -> bool:
    return library in Path(f"/proc/{pid}/maps").read_text()


def describe(subjects: list[str], **options: Any) -> list[Job]:
    return [
        Job.build(
            messages=[{"role": "user", "content": f"Describe {subject} with name, year, kind, tags and place."}],
            options={"json_schema": SCHEMA, "seed": seed} | options,
        )
        for seed, subject in enumerate(subjects)
    ]


def check(results: list[Result]) -> Counter[str]:
    """How the answers ended; each that ended by itself validates."""
    ends: Counter[str] = Counter()
    for result in results:
        assert "done" == result.status, result.failure
        for answer in result.completions:
            ends[answer.finish_reason] += 1
            if answer.finish_reason == "stop":
                jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(answer.text))
            else:
                assert not is_json(answer.text)
    return ends


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def submit_and_wait(client: Client, jobs: list[Job]) -> list[Result]:
    client.submit_many(jobs)
    return [client.result(job.id, wait_s=300) for job in jobs]


@pytest.mark.timeout(300)
def test_answers_follow_what_they_are_bound_to(served: Client) -> None:
    """
    Schema, regex and choice; what ends by itself is whole, what is cut says so, what cannot be is a typed failure.
    """
    ask = [{"role": "user", "content": "Is Paris in France?"}]
    others = [
        Job.build(messages=ask, options={"choice": ["yes", "no", "I do not know"]}),
        Job.build(messages=ask, options={"regex": r"\d{3}-\d{4}", "temperature": 1.0, "n": 2}),
        *describe(SUBJECTS[2:3], max_tokens=10),
        Job.build(messages=ask, options={"regex": "()"}),
        Job.build(messages=ask, options={"max_tokens": 4}),
    ]
    jobs = describe(SUBJECTS[:2], max_tokens=200)

    *described, choice, regex, cut, refused, free = submit_and_wait(served, jobs + others)

    assert Counter(stop=2) == check(described)
    assert choice.text in ("yes", "no", "I do not know")
    assert all(re.fullmatch(r"\d{3}-\d{4}", answer.text) for answer in regex.completions)
    assert ["stop"] * 3 == [answer.finish_reason for answer in (*choice.completions, *regex.completions)]
    assert ("length", True) == (cut.completions[0].finish_reason, cut.text.startswith("{"))
    assert ("failed", "invalid_grammar") == (refused.status, refused.failure and refused.failure.code)
    assert 4 == free.usage.completion_tokens


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fifty_prompts_give_fifty_documents(served: Client) -> None:
    """
    Half of them greedy, half drawn; those that are cut by their length are told apart.
    """
    half = len(SUBJECTS) // 2
    jobs = describe(SUBJECTS[:half], max_tokens=200) + describe(SUBJECTS[half:], max_tokens=200, temperature=0.8)

    ends = check(submit_and_wait(served, jobs))
    cut = check(submit_and_wait(served, describe(SUBJECTS[:10], max_tokens=20)))

    print(f"\n{dict(ends)} with 200 tokens, {dict(cut)} with 20")
    assert 50 == ends.total()
    assert ends["stop"] >= 45
    assert Counter(length=10) == cut
