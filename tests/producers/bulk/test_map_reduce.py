"""Long documents, part by part."""

import json
from pathlib import Path

import pytest

from pagemill.bulk_client import BulkClient
from producers.bulk.errors import Interrupted, SpecError
from producers.bulk.jobs import resume_job, run_job
from producers.bulk.map_reduce import Plan, TooLong, levels
from producers.bulk.spec import MapReduce
from producers.bulk.split import Estimate, Tokens
from tests.producers.bulk.conftest import MakeSpec
from tests.producers.bulk.test_jobs import Stopper
from tests.support.bulk_runs import output_rows
from tests.support.services import RunningService
from worker.fake_engine import ByteTokenizer

BYTES = Tokens(ByteTokenizer().to_json())


def plan(*, context: int = 400, max_tokens: int = 40, template: str = "summarise", **settings: object) -> Plan:
    return Plan(BYTES, MapReduce.model_validate(settings), template, context, max_tokens)


def played(text: str, plan: Plan, answer: str) -> list[list[str]]:
    """All levels, where each text is answered the same."""
    asking = levels(text, plan, "prompt")
    seen = [next(asking)]
    while True:
        try:
            seen.append(asking.send([answer] * len(seen[-1])))
        except StopIteration:
            return seen


def test_what_fits_is_asked_about_once() -> None:
    """
    A short text is one part of one level.
    """
    assert [["short"]] == played("short", plan(), "answer")


def test_answers_are_reduced_until_one_is_left() -> None:
    """
    The parts of the text, then their answers together, level by level; each fits into the context.
    """
    text = "A sentence of some words. " * 400

    seen = played(text, plan(), "a" * 40)

    assert text == "".join(seen[0])
    assert [37, 7, 2, 1] == [len(level) for level in seen]
    # beside the answer, the prompt and the margin
    assert all(len(part.encode()) <= 400 - 40 - len("prompt") - 64 for level in seen for part in level)


def test_joined_answers_are_not_asked_about_again() -> None:
    """
    A translation has one level, however many parts.
    """
    assert 1 == len(played("word " * 1000, plan(template="translate"), "ord"))


def test_a_text_is_not_cut_where_that_is_off() -> None:
    """
    The templates whose answers cannot be put together leave a long text whole.
    """
    text = "word " * 1000

    assert [[text]] == played(text, plan(template="classify"), "x")
    assert [[text]] == played(text, plan(mode="off"), "x")


def test_levels_are_bounded() -> None:
    """
    Answers that do not get fewer end the row with a fault that says what to change.
    """
    with pytest.raises(TooLong, match=r"raise map_reduce\.max_levels"):
        played("word " * 1000, plan(max_levels=1), "a" * 40)


def test_a_context_without_room_is_the_jobs_fault() -> None:
    """
    Where two answers do not fit into a prompt, nothing can be reduced: all rows would fail.
    """
    with pytest.raises(SpecError, match=r"lower options\.max_tokens"):
        played("word " * 1000, plan(max_tokens=150), "x")


def test_an_estimate_leaves_as_much_room() -> None:
    """
    Without the model's tokenizer a token counts three bytes.
    """
    rough = Plan(Estimate(), MapReduce(), "summarise", 400, 40)

    seen = played("A sentence of some words. " * 400, rough, "a" * 40)

    assert all(len(part.encode()) <= 3 * 300 for level in seen for part in level)


@pytest.fixture
def long_documents(tmp_path: Path) -> None:
    sentence = "In the year {} the town built a bridge, and {} people came to see it. "
    texts = ["short", "".join(sentence.format(1800 + n, n * n) for n in range(150)), "shorter"]
    rows = [json.dumps({"custom_id": f"t{number}", "text": text}) for number, text in enumerate(texts)]
    (tmp_path / "documents.jsonl").write_text("\n".join(rows))


@pytest.mark.usefixtures("service", "long_documents")
def test_long_documents_come_out_as_one_row(make_spec: MakeSpec, client: BulkClient) -> None:
    """
    Cut by the worker's own tokenizer, no part is too long for it, and the row adds up what all parts took.
    """
    spec = make_spec(map_reduce={"context_tokens": 900}, options={"max_tokens": 60})

    summary = run_job(spec, client)

    rows = output_rows(spec.output)
    assert ["done"] * 3 == [row.status for row in rows]
    assert 60 == rows[0].usage.completion_tokens
    assert rows[1].usage.completion_tokens >= 20 * 60
    assert 60 >= len(rows[1].text or "")
    [batch] = client.list_batches()
    assert summary.usage.completion_tokens == 60 * batch.done
    assert (batch.total, 0) == (batch.done, batch.failed)


@pytest.mark.usefixtures("service", "long_documents")
def test_parts_that_were_answered_are_not_asked_about_again(make_spec: MakeSpec, client: BulkClient) -> None:
    """
    A run that is stopped in the middle of a long document finds the answers of its parts.
    """
    spec = make_spec(map_reduce={"context_tokens": 900}, options={"max_tokens": 60, "seed": 7}, max_jobs=2)
    stopper = Stopper(99)
    stopper.hooks.turned = lambda counts: stopper.runner.stop() if counts.jobs >= 9 else None
    with pytest.raises(Interrupted):
        run_job(spec, client, stopper.hooks)
    [before] = client.list_batches()

    summary = resume_job(spec.output, client)

    [after] = client.list_batches()
    assert 9 <= before.total < after.total
    assert 60 * after.done == summary.usage.completion_tokens
    assert after.total == after.done


@pytest.mark.usefixtures("long_documents")
def test_too_long_for_the_worker_is_the_rows_error(
    service: RunningService, make_spec: MakeSpec, client: BulkClient
) -> None:
    """
    With map-reduce off the worker refuses the long one alone.
    """
    spec = make_spec(map_reduce={"mode": "off"})

    summary = run_job(spec, client)

    assert service.engine.max_model_len < 150 * 60
    assert {"prompt_too_long": 1} == summary.errors
    assert ["done", "failed", "done"] == [row.status for row in output_rows(spec.output)]
