"""A batch file from an input to an output in a folder."""

import gzip
import io
import json
from pathlib import Path

import pytest

from pagemill.bulk_client import BulkClient
from pagemill.errors import JobNotFound
from pagemill.object_store import open_store
from producers.batch_file.errors import BatchFileError, Rejected
from producers.batch_file.local import spool
from tests.producers.batch_file.conftest import RunFile
from tests.support.batch_files import CHAT, chat_line, ids_of, plain_line, read_lines, write_lines

pytestmark = pytest.mark.usefixtures("service")


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.fixture
def errors(tmp_path: Path) -> Path:
    return tmp_path / "out.errors.jsonl"


def test_each_line_has_a_response_in_the_order_of_the_input(run: RunFile, tmp_path: Path, output: Path) -> None:
    """
    The output has OpenAI's lines, one for each of the input, in its order; nothing else is left behind.
    """
    source = write_lines(tmp_path / "in.jsonl", (chat_line(number) for number in range(50)))

    summary = run(source)

    lines = read_lines(output)
    assert ("completed", 50, 50, 0) == (summary.status, summary.total, summary.completed, summary.failed)
    assert [f"line-{number}" for number in range(50)] == ids_of(lines)
    assert {("id", "custom_id", "response", "error")} == {tuple(line) for line in lines}
    first = lines[0]
    assert first["error"] is None
    assert 200 == first["response"]["status_code"]
    body = first["response"]["body"]
    assert ("chat.completion", "fake", 4) == (body["object"], body["model"], body["usage"]["completion_tokens"])
    assert "assistant" == body["choices"][0]["message"]["role"]
    assert 50 == len({line["id"] for line in lines})
    assert {"in.jsonl", "out.jsonl", "out.jsonl.batch"} == {path.name for path in tmp_path.iterdir()}
    assert ["done.json"] == [path.name for path in (tmp_path / "out.jsonl.batch").iterdir() if path.is_file()]


def test_a_plain_completion_of_several_prompts_is_one_line(run: RunFile, tmp_path: Path, output: Path) -> None:
    """
    A line is a job a prompt, and its response has the choices of all.
    """
    source = write_lines(tmp_path / "in.jsonl", [plain_line(0, prompt=["a", "b", "c"], n=2), plain_line(1)])

    run(source)

    first, second = (line["response"]["body"] for line in read_lines(output))
    assert [0, 1, 2, 3, 4, 5] == [choice["index"] for choice in first["choices"]]
    assert ("text_completion", 1) == (second["object"], len(second["choices"]))


def test_a_bad_line_is_an_error_and_the_others_go_on(run: RunFile, tmp_path: Path, output: Path, errors: Path) -> None:
    """
    Whatever is wrong with a line is told in the error file, in OpenAI's words and with a status.
    """
    no_body = {key: value for key, value in chat_line(3).items() if key != "body"}
    lines = [
        b"\xef\xbb\xbf" + json.dumps(chat_line(0)).encode() + b"\r",
        b"{broken",
        b"[1]",
        no_body,
        chat_line(4) | {"method": "GET"},
        plain_line(5),
        chat_line(0),
        chat_line(7, model="gpt-9"),
        chat_line(8) | {"custom_id": 8},
        b"",
        b'{"custom_id": "\xff"}',
        chat_line(11, max_tokens=0),
        chat_line(12) | {"extra": 1},
        chat_line(13) | {"body": {"model": "fake", "messages": [{"role": "user", "content": "x" * 9000}]}},
        b'{"custom_id": "\\ud800"}',
        b"x" * 20_000,
        chat_line(16) | {"body": chat_line(16)["body"] | {"stream": True}},
        chat_line(17),
    ]
    source = write_lines(tmp_path / "in.jsonl", lines)

    summary = run(source, max_line_bytes=12_000)

    assert ["line-0", "line-17"] == ids_of(read_lines(output))
    assert (18, 2, 16) == (summary.total, summary.completed, summary.failed)
    told = [
        (line["custom_id"], line["response"]["status_code"], line["response"]["body"]["error"]["code"])
        for line in read_lines(errors)
    ]
    assert [
        ("", 400, "invalid_json_line"),
        ("", 400, "invalid_json_line"),
        ("line-3", 400, "invalid_value"),
        ("line-4", 400, "invalid_value"),
        ("line-5", 400, "mismatched_endpoint"),
        ("line-0", 400, "duplicate_custom_id"),
        ("line-7", 400, "mismatched_model"),
        ("", 400, "invalid_custom_id"),
        ("", 400, "blank_line"),
        ("", 400, "invalid_encoding"),
        ("line-11", 400, "invalid_value"),
        ("line-12", 400, "invalid_value"),
        ("line-13", 400, "context_length_exceeded"),
        ("", 400, "invalid_json_line"),
        ("", 413, "line_too_long"),
        ("line-16", 400, None),
        # in the order of the input
    ] == told
    assert "line 2: " in read_lines(errors)[0]["response"]["body"]["error"]["message"]


@pytest.mark.parametrize(
    ("lines", "code", "line"),
    [
        ([], "empty_file", None),
        ([b"", b"  "], "empty_file", None),
        ([b"a,b,c", b"1,2,3"], "invalid_json", 1),
        ([chat_line(0, model="gpt-9"), chat_line(1, model="gpt-9")], "model_not_found", 1),
        ([chat_line(0) | {"url": "/v1/embeddings"}], "invalid_url", 1),
        ([chat_line(0) | {"body": {}}], "missing_model", 1),
    ],
)
def test_a_file_without_any_line_that_could_run_is_rejected(
    run: RunFile, tmp_path: Path, output: Path, lines: list[bytes], code: str, line: int | None
) -> None:
    """
    An empty file, one that is no JSON lines, and one for a model that nobody serves fail as a whole.
    """
    source = write_lines(tmp_path / "in.jsonl", lines)

    with pytest.raises(Rejected) as caught:
        run(source)

    assert (code, line) == (caught.value.faults[0].code, caught.value.faults[0].line)
    assert not output.exists()


@pytest.mark.parametrize(
    ("limit", "code"), [({"max_lines": 9}, "too_many_lines"), ({"max_bytes": 99}, "file_too_large")]
)
def test_a_file_over_its_limits_is_rejected(run: RunFile, tmp_path: Path, limit: dict[str, int], code: str) -> None:
    """
    More lines or bytes than allowed fail the whole.
    """
    source = write_lines(tmp_path / "in.jsonl", (chat_line(number) for number in range(10)))

    with pytest.raises(Rejected) as caught:
        run(source, **limit)

    assert [code] == [fault.code for fault in caught.value.faults]


def test_the_same_command_again_tells_the_same_and_does_nothing(
    run: RunFile, tmp_path: Path, output: Path, client: BulkClient
) -> None:
    """
    What is done is not done again; without its output it is, as new jobs.
    """
    source = write_lines(tmp_path / "in.jsonl", (chat_line(number) for number in range(10)))
    first = run(source)
    written = output.stat().st_mtime_ns

    again = run(source)

    assert first == again
    assert written == output.stat().st_mtime_ns
    assert 10 == sum(batch.total for batch in client.list_batches())
    output.unlink()
    assert first.completed == run(source).completed
    assert 20 == sum(batch.total for batch in client.list_batches())


def test_a_file_that_nobody_of_us_wrote_is_not_written_over(run: RunFile, tmp_path: Path, output: Path) -> None:
    """
    An output that is there already is refused before anything is submitted.
    """
    source = write_lines(tmp_path / "in.jsonl", [chat_line(0)])
    output.write_text("mine")

    with pytest.raises(BatchFileError, match="there already"):
        run(source)

    assert "mine" == output.read_text()


def test_another_input_is_not_mixed_into_a_half_done_output(run: RunFile, tmp_path: Path) -> None:
    """
    A run that was interrupted goes on only with the input that it began with.
    """
    source = write_lines(tmp_path / "in.jsonl", (chat_line(number) for number in range(10)))

    def interrupt(_: object) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        run(source, on_turn=interrupt)
    write_lines(source, (chat_line(number) for number in range(11)))

    with pytest.raises(BatchFileError, match="has changed"):
        run(source)


def test_packed_inputs_are_read_as_they_are(run: RunFile, tmp_path: Path, output: Path) -> None:
    """
    An input whose name ends in .gz is unpacked on the way.
    """
    source = tmp_path / "in.jsonl.gz"
    source.write_bytes(gzip.compress(b"".join(json.dumps(chat_line(number)).encode() + b"\n" for number in range(20))))

    assert 20 == run(source).completed
    assert [f"line-{number}" for number in range(20)] == ids_of(read_lines(output))


def test_the_endpoint_may_be_named(run: RunFile, tmp_path: Path, output: Path) -> None:
    """
    Lines of another endpoint than the named one are errors, the first one too.
    """
    source = write_lines(tmp_path / "in.jsonl", [plain_line(0), chat_line(1)])

    run(source, endpoint=CHAT)

    assert ["line-1"] == ids_of(read_lines(output))


def test_the_queue_forgets_what_is_written_down(run: RunFile, tmp_path: Path, output: Path, client: BulkClient) -> None:
    """
    What is written down is forgotten in the queue, and the batch is sealed.
    """
    source = write_lines(tmp_path / "in.jsonl", (chat_line(number) for number in range(30)))

    run(source)

    [batch] = client.list_batches()
    assert ("ended", 30, 30) == (batch.state, batch.total, batch.done)
    [job_id] = {line["id"].removeprefix("batch_req_") for line in read_lines(output)[:1]}
    with pytest.raises(JobNotFound):
        client.status(job_id)


def test_an_output_stays_done_whatever_is_tried_on_it(run: RunFile, tmp_path: Path) -> None:
    """
    Another input for it is refused, and the first one still tells what it came to.
    """
    source = write_lines(tmp_path / "in.jsonl", [chat_line(0)])
    other = write_lines(tmp_path / "other.jsonl", [chat_line(1)])
    first = run(source)

    with pytest.raises(BatchFileError, match="there already"):
        run(other)

    assert first == run(source)


def test_what_comes_by_a_pipe_is_told_apart_by_its_bytes(tmp_path: Path, output: Path) -> None:
    """
    The same bytes are one input, which stays as it is; others do not take its place under a run that has begun.
    """
    first = spool(io.BytesIO(b"one"), str(output))
    store = open_store((tmp_path / "out.jsonl.batch").as_uri())
    etag = store.stat(first).etag

    other, again = spool(io.BytesIO(b"other"), str(output)), spool(io.BytesIO(b"one"), str(output))

    assert (first, etag) == (again, store.stat(again).etag)
    assert (b"one", b"other") == (store.get(first), store.get(other))
