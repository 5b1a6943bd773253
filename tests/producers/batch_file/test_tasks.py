"""From lines to jobs and back, without a queue."""

import json
import random
from typing import Any

import pytest

from pagemill.schema import Completion, Job, Result, Usage
from producers.batch_file.lines import parse_line
from producers.batch_file.parts import LineEnd
from producers.batch_file.tasks import LineTask, Tally, terms_of
from producers.bulk.columns import Columns
from producers.bulk.rows import Document
from tests.support.batch_files import CHAT, PLAIN, chat_line, plain_line


def a_task(*, name: str = "night", endpoint: str = CHAT, tally: Tally | None = None) -> LineTask:
    return LineTask(name, endpoint, "fake", terms_of("acme", "batch-1", 4096), tally or Tally())


def begin(task: LineTask, line: bytes, row: int = 0) -> list[Job] | LineEnd:
    """The jobs of a line, or how it ended without any."""
    item = parse_line(line, Columns(), row)
    if not isinstance(item, Document):
        return task.fault(item)
    try:
        return list(next(task.work(item)))
    except StopIteration as end:
        found: LineEnd = end.value
        return found


def finish(task: LineTask, line: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The line that a line became whose jobs have ended like that."""
    item = parse_line(json.dumps(line).encode(), Columns(), 0)
    assert isinstance(item, Document)
    work = task.work(item)
    jobs = next(work)
    with pytest.raises(StopIteration) as end:
        work.send([Result(job_id=job.id, **fields) for job in jobs])
    told: dict[str, Any] = json.loads(end.value.value.data)
    return told


def ids(task: LineTask, line: dict[str, Any]) -> list[str]:
    jobs = begin(task, json.dumps(line).encode())
    assert isinstance(jobs, list)
    return [job.id for job in jobs]


def test_ids_are_of_the_batch_the_name_and_the_request() -> None:
    """
    The same line gives the same jobs in each run; another batch, name or prompt gives others.
    """
    lines = [chat_line(1), chat_line(2), chat_line(1, custom_id="other"), chat_line(1, max_tokens=5)]
    first = [ids(a_task(), line) for line in lines]

    assert first == [ids(a_task(), line) for line in lines]
    assert 5 == len({*map(tuple, first), tuple(ids(a_task(name="day"), lines[0]))})
    several = ids(a_task(endpoint=PLAIN), plain_line(0, prompt=["a", "a", "b"]))
    assert 3 == len(set(several))


def test_jobs_are_bulk_work_of_the_tenant() -> None:
    """
    They join the batch, in the bulk lane, and answers without a limit have the context's.
    """
    line = chat_line(0)
    del line["body"]["max_tokens"]

    jobs = begin(a_task(), json.dumps(line).encode())

    assert isinstance(jobs, list)
    [job] = jobs
    assert ("bulk", "acme", "batch-1", 4096) == (job.lane, job.tenant, job.batch, job.options.max_tokens)


@pytest.mark.parametrize(("status", "code"), [("cancelled", "batch_cancelled"), ("expired", "batch_expired")])
def test_jobs_that_were_ended_early_are_told_by_why(status: str, code: str) -> None:
    """
    A line without a response says whether somebody cancelled it or the time was over.
    """
    told = finish(a_task(), chat_line(0), status=status)

    assert (None, code) == (told["response"], told["error"]["code"])


def test_lines_are_counted_as_they_end() -> None:
    """
    The tally has each line once, under what became of it.
    """
    tally = Tally()
    task = a_task(tally=tally)
    answer = Completion(index=0, text="yes", finish_reason="stop")
    usage = Usage(prompt_tokens=1, completion_tokens=1)

    finish(task, chat_line(0), status="done", completions=(answer,), usage=usage)
    finish(task, chat_line(1), status="expired")
    begin(task, b"{")
    begin(task, json.dumps(chat_line(2, model="other")).encode())

    assert (1, 3) == (tally.completed, tally.failed)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_a_line_holds_it_is_a_job_or_an_error(seed: int) -> None:
    """
    Lines with bytes changed, cut and doubled, and with fields of any type, never raise; errors have OpenAI's shape.
    """
    draw = random.Random(seed)
    values: list[Any] = [None, True, -1, 1e308, "", "x", [], {}, [[]], {"a": [1]}, "\ud800", 2**70]
    task = a_task()
    num_errors = 0
    for row in range(1500):
        line = chat_line(row)
        target = draw.choice([line, line["body"], line["body"]["messages"][0]])
        if draw.random() < 0.5:
            target[draw.choice(sorted(target))] = draw.choice(values)
        data = bytearray(json.dumps(line).encode())
        for _ in range(draw.choice([0, 0, 1, 3])):
            place = draw.randrange(len(data))
            data[place : place + draw.randrange(3)] = draw.randbytes(draw.randrange(3))
        found = begin(task, bytes(data).replace(b"\n", b""), row)
        if isinstance(found, LineEnd):
            num_errors += 1
            told = json.loads(found.data)
            assert found.data.endswith(b"\n")
            assert 1 == found.data.count(b"\n")
            assert {"id", "custom_id", "response", "error"} == told.keys()
            assert {"message", "type", "param", "code"} == told["response"]["body"]["error"].keys()
            assert 400 <= told["response"]["status_code"] < 500
    assert 200 < num_errors < 1400
