"""From documents to jobs and back to rows."""

import weakref
from collections.abc import Sequence
from typing import Any

import pytest

from pagemill.schema import Completion, Failure, Job, Result, Usage
from producers.bulk.errors import SpecError
from producers.bulk.rows import Document, OutputRow, RowFault, RowUsage
from producers.bulk.spec import BulkSpec
from producers.bulk.split import Estimate
from producers.bulk.tasks import BulkTask, answer_options

DOCUMENT = Document(3, "d-3", "The text.", {"team": "red", "tags": [1]})


def task(*, batch: str | None = "b", generation: int = 0, **fields: Any) -> BulkTask:
    spec = BulkSpec.build({"input": "i", "output": "file:///o", **fields})
    return BulkTask(spec, counter=Estimate(), batch=batch, context_tokens=4096, generation=generation)


def jobs_of(one: BulkTask, document: Document = DOCUMENT) -> Sequence[Job]:
    return next(one.work(document))


def answered(one: BulkTask, text: str, **fields: Any) -> OutputRow:
    """The row of the document when its job has ended so."""
    work = one.work(DOCUMENT)
    [job] = next(work)
    usual = {
        "status": "done",
        "completions": (Completion(index=0, text=text, finish_reason="stop"),),
        "usage": Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=1, gpu_ms=9),
    }
    with pytest.raises(StopIteration) as end:
        work.send([Result(job_id=job.id, **(usual | fields))])
    row: OutputRow = end.value.value
    return row


def test_a_row_has_what_the_job_gave() -> None:
    """
    The answer as it came, its usage and end, and the columns that are kept as text.
    """
    row = answered(task(keep=["team", "tags", "missing"]), " Short. ")

    assert (
        OutputRow(
            custom_id="d-3",
            row=3,
            status="done",
            text=" Short. ",
            usage=RowUsage(prompt_tokens=5, completion_tokens=2, cached_tokens=1),
            finish_reason="stop",
            metadata={"team": "red", "tags": "[1]"},
        )
        == row
    )


def test_a_job_says_what_the_spec_says() -> None:
    """
    Lane, tenant, times, model and batch are the spec's, the messages the template's.
    """
    [job] = jobs_of(task(model="m", tenant="night", timeout_s=60, result_ttl_s=99, options={"temperature": 0.5}))

    assert ("bulk", "night", 60, 99, "m", "b", 0.5) == (
        job.lane,
        job.tenant,
        job.timeout_s,
        job.result_ttl_s,
        job.model,
        job.batch,
        job.options.temperature,
    )
    assert ["system", "user"] == [message.role for message in job.messages or ()]


def test_the_same_document_has_the_same_job() -> None:
    """
    A later run submits the ids that the queue knows; anything that could change the answer changes them.
    """
    [job] = jobs_of(task())

    same = [jobs_of(task())[0].id, jobs_of(task(max_jobs=3, output="file:///o2"))[0].id]
    other = [
        jobs_of(task(name="other"))[0].id,
        jobs_of(task(options={"max_tokens": 9}))[0].id,
        jobs_of(task(generation=1))[0].id,
        jobs_of(task(batch="c"))[0].id,
        jobs_of(task(), Document(3, "d-4", "The text.", {}))[0].id,
        jobs_of(task(), Document(3, "d-3", "The text!", {}))[0].id,
    ]

    assert {job.id} == set(same)
    assert 7 == len({job.id, *other})


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"status": "failed", "failure": Failure(code="prompt_too_long", message="m")}, "failed", "prompt_too_long"),
        ({"status": "cancelled"}, "cancelled", "cancelled"),
        ({"status": "expired"}, "expired", "expired"),
    ],
)
def test_a_job_without_an_answer_is_the_rows_error(fields: dict[str, Any], status: str, code: str) -> None:
    """
    The row has the job's status, its reason, and the text that there was.
    """
    row = answered(task(), "beginning", **fields)

    assert (status, code, "beginning") == (row.status, row.error and row.error.code, row.text)


@pytest.mark.parametrize(
    ("text", "output"), [('{"a": 1}', {"a": 1}), (' {"a": 1}\n', {"a": 1}), ('```json\n{"a": 1}\n```', {"a": 1})]
)
def test_extracted_json_is_in_the_row(text: str, output: object) -> None:
    """
    The parsed answer stands beside the text, also where a model fences it.
    """
    row = answered(task(template="extract", params={"schema": {"type": "object"}}), text)

    assert ("done", output, text) == (row.status, row.output, row.text)


def test_what_is_no_json_is_the_rows_error() -> None:
    """
    The text is kept, for whoever wants to mend it.
    """
    row = answered(task(template="extract", params={"schema": {"type": "object"}}), '{"a": ')

    assert ("failed", "invalid_answer", None, '{"a": ') == (
        row.status,
        row.error and row.error.code,
        row.output,
        row.text,
    )


@pytest.mark.parametrize(
    "text",
    ['"\\ud800"', "[" * 100_000, "[" * 220 + "]" * 220, "[" * 400 + "]" * 400, "NaN", "1e999"],
    ids=["surrogate", "open", "deep", "deeper", "nan", "large"],
)
def test_json_that_cannot_be_kept_is_the_rows_error(text: str) -> None:
    """
    A model may write what no file of the output could hold: the row fails, the job goes on.
    """
    row = answered(task(template="extract", params={"schema": {"type": "object"}}), text)

    assert ("failed", "invalid_answer", None) == (row.status, row.error and row.error.code, row.output)
    assert row == OutputRow.model_validate_json(row.model_dump_json())


@pytest.mark.parametrize(("text", "output"), [("U.S.", "U.S."), (" u.s\n", "U.S."), ("us", "us"), ("US", "US")])
def test_a_label_is_found_as_it_is_written_first(text: str, output: str) -> None:
    """
    Labels may have marks of their own, and differ in nothing but their case.
    """
    labels = ["us", "US", "U.S."]

    row = answered(task(template="classify", params={"labels": labels}, structured=False), text)

    assert ("done", output) == (row.status, row.output)


def test_a_document_that_waits_holds_no_columns_that_are_not_kept() -> None:
    """
    Thousands of documents may be in flight, however wide their rows are.
    """

    class Wide:
        """Stands for megabytes."""

    wide = Wide()
    seen = weakref.ref(wide)
    document = Document(0, "a", "text", {"wide": wide, "team": "red"})
    work = task(keep=["team"]).work(document)

    [job] = next(work)
    del document, wide

    assert seen() is None
    with pytest.raises(StopIteration) as end:
        work.send([Result(job_id=job.id, status="cancelled")])
    assert {"team": "red"} == end.value.value.metadata


def test_a_row_that_fills_its_prompt_fails_alone() -> None:
    """
    Where a template says a long column around each part, that row has no room for parts; others have.
    """
    one = task(template="mine", template_text="{{ fields.note }} {{ text }}", map_reduce={"mode": "reduce"})
    text = "word " * 5000

    with pytest.raises(StopIteration) as end:
        next(one.work(Document(0, "a", text, {"note": "x" * 20_000})))

    assert "no_room" == end.value.value.error.code
    assert 1 < len(next(one.work(Document(1, "b", text, {"note": "x"}))))


@pytest.mark.parametrize(("text", "output"), [("Good", "good"), ("'bad'.", "bad"), ("both", None)])
def test_a_label_is_in_the_row(text: str, output: str | None) -> None:
    """
    It is written as in the list; another answer is an error.
    """
    row = answered(task(template="classify", params={"labels": ["good", "bad"]}, structured=False), text)

    assert (output, "done" if output else "failed") == (row.output, row.status)


def test_a_fault_keeps_its_place_and_reason() -> None:
    """
    A row that cannot be worked on comes out as a failed one.
    """
    row = task().fault(RowFault(4, None, "invalid_json", "no JSON"))

    assert (None, 4, "failed", "invalid_json") == (row.custom_id, row.row, row.status, row.error and row.error.code)


def test_a_missing_column_fails_its_row_alone() -> None:
    """
    The template's fault ends in a row, not in the job's end.
    """
    work = task(template="mine", template_text="{{ fields.author }} {{ text }}").work(DOCUMENT)

    with pytest.raises(StopIteration) as end:
        next(work)

    assert "template_failed" == end.value.value.error.code


def test_the_engine_binds_the_answers() -> None:
    """
    Schema and labels go to the engine too, unless the job says its own, or that they do not.
    """

    def options(**fields: Any) -> Any:
        return answer_options(BulkSpec.build({"input": "i", "output": "file:///o", **fields}))

    labels = {"template": "classify", "params": {"labels": ["a", 2]}}
    schema = {"template": "extract", "params": {"schema": {"type": "object"}}}

    assert ("a", "2") == options(**labels).choice
    assert {"type": "object"} == options(**schema).json_schema
    assert options(**labels, structured=False).choice is None
    assert options(**schema, options={"regex": "a+"}).json_schema is None
    with pytest.raises(SpecError, match=r"params\.labels"):
        options(template="classify", params={"labels": ["a", ""]})
