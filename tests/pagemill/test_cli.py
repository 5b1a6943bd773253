import asyncio
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from pagemill import __version__, cli
from pagemill.client import Client
from pagemill.connection import connect_async
from pagemill.consumer import Consumer
from pagemill.ids import uuid7
from pagemill.messages import Finished, Room
from pagemill.schema import Completion, Failure, Job, Result, Usage
from tests.support.servers import wait_for

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (
    "submit",
    "result",
    "status",
    "cancel",
    "batch",
    "dead",
    "tenants",
    "lanes",
    "worker",
    "demo",
    "gateway",
    "models",
)


@pytest.fixture
def queue(newest_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """A queue of its own, named by the environment as users do it."""
    name = f"cli-{uuid7()}"
    monkeypatch.setenv("PAGEMILL_REDIS_URL", newest_server)
    monkeypatch.setenv("PAGEMILL_QUEUE", name)
    monkeypatch.chdir(tmp_path)
    return SimpleNamespace(url=newest_server, name=name)


Run = Callable[..., tuple[int, str, str]]


def answer(queue: SimpleNamespace, reply: Callable[[Job], Result]) -> list[Job]:
    """Be a worker for a moment: end all jobs that wait, and return them."""

    async def work() -> list[Job]:
        redis = connect_async(queue.url)
        try:
            async with Consumer(redis, queue.name, worker_id=uuid7(), lease_ms=30_000) as consumer:
                held = await consumer.pull(rooms=[Room(100, 1_000_000)] * 3)
                jobs = [Job.parse(one.payload or b"") for one in held]
                await consumer.finish([Finished(one, reply(job)) for one, job in zip(held, jobs, strict=True)])
                return jobs
        finally:
            await redis.aclose()

    return asyncio.run(work())


def echo(job: Job) -> Result:
    text = job.messages[-1].content.upper() if job.messages else str(job.prompt).upper()
    answers = tuple(
        Completion(index=index, text=text, finish_reason="stop", token_ids=(1, 2)) for index in range(job.options.n)
    )
    return Result(job_id=job.id, status="done", completions=answers, usage=Usage(completion_tokens=2))


def refuse(job: Job) -> Result:
    failure = Failure(code="prompt_too_long", message="the prompt has 9 tokens and the model takes 8")
    return Result(job_id=job.id, status="failed", failure=failure)


def test_the_version_is_that_of_the_package(run: Run) -> None:
    """
    It needs no server.
    """
    assert (0, f"pagemill {__version__}\n", "") == run("--version")


def test_submit_prints_an_id_whose_result_can_be_fetched(queue: SimpleNamespace, run: Run) -> None:
    """
    The prompt becomes a chat with the given options, and `result` prints the answer.
    """
    code, job_id, _ = run("submit", "hello", "--system", "be kind", "--max-tokens", "7", "-o", "min_p=0.5", "--top-k=3")
    assert 0 == code

    [job] = answer(queue, echo)

    assert [("system", "be kind"), ("user", "hello")] == [(turn.role, turn.content) for turn in job.messages or ()]
    assert (7, 0.5, 3) == (job.options.max_tokens, job.options.min_p, job.options.top_k)
    assert (0, "HELLO\n", "") == run("result", job_id.strip())
    assert (0, "HELLO\n", "") == run("result", "--wait", job_id.strip())


def test_answers_are_bound_by_options(queue: SimpleNamespace, run: Run, tmp_path: Path) -> None:
    """
    A schema as itself or in a file, a regex, or choices; mistakes are told before anything is sent.
    """
    schema = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}}
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(schema))
    given: dict[tuple[str, ...], tuple[str, object]] = {
        ("--json-schema", json.dumps(schema)): ("json_schema", schema),
        ("--json-schema", str(file)): ("json_schema", schema),
        ("--regex", "[a-z]+"): ("regex", "[a-z]+"),
        ("--choice", "yes", "--choice", "no"): ("choice", ("yes", "no")),
    }

    for arguments, (name, value) in given.items():
        assert 0 == run("submit", "hello", *arguments)[0]
        [job] = answer(queue, echo)
        assert value == getattr(job.options, name)
    for arguments, told in (
        (("--json-schema", "{no json"), "--json-schema is no JSON"),
        (("--json-schema", "nowhere.json"), "No such file"),
        (("--json-schema", '{"not": {}}'), "options.json_schema at #: not is not supported"),
        (("--regex", r"\bword"), "word boundaries"),
        (("--regex", "a", "--choice", "b"), "regex and choice are given"),
    ):
        code, _, error = run("submit", "hello", *arguments)
        assert (1, True) == (code, told in error), error


def test_raw_text_files_and_standard_input_are_prompts(queue: SimpleNamespace, run: Run, tmp_path: Path) -> None:
    """
    Several sources in one call are one job each, in order; --raw leaves the template out.
    """
    (tmp_path / "one.txt").write_text("from a file")

    code, ids, _ = run("submit", "--raw", "given", "--file", "one.txt", "--stdin", stdin="gelesen, é".encode())

    assert (0, 3) == (code, len(ids.split()))
    assert {"given", "from a file", "gelesen, é"} == {job.prompt for job in answer(queue, echo)}
    assert (0, "GIVEN\nFROM A FILE\nGELESEN, É\n", "") == run("result", *ids.split())


def test_bad_lines_are_named_and_good_ones_submitted(queue: SimpleNamespace, run: Run, tmp_path: Path) -> None:
    """
    Each faulty line of JSONL is one message with its number; the others become jobs, flags as defaults.
    """
    lines = [
        b'{"prompt": "good one", "options": {"temperature": 0.5}}',
        b"",
        b"{not json",
        b'{"prompt": "x", "optoins": {}}',
        b'{"prompt": "x", "options": {"max_tokens": 0}}',
        b'["a list"]',
        b'{"prompt": "\xff"}',
        b'{"prompt": "x", "model": "nobody-serves-this"}',
        b'{"messages": [{"role": "user", "content": "good two"}]}',
    ]
    (tmp_path / "jobs.jsonl").write_bytes(b"\n".join(lines))

    code, ids, errors = run("submit", "--jsonl", "jobs.jsonl", "--max-tokens", "9")

    jobs = answer(queue, echo)
    assert 1 == code
    assert [job.id for job in jobs] == ids.split()
    assert [(9, 0.5), (9, 0.0)] == [(job.options.max_tokens, job.options.temperature) for job in jobs]
    told = [line.partition(": ") for line in errors.splitlines()]
    assert ["line 3", "line 4", "line 5", "line 6", "line 7", "line 8"] == [where for where, _, _ in told[:-1]]
    assert "optoins: unknown field" == told[1][2]
    assert "6 lines were refused, 2 jobs were submitted" == told[-1][2]


def test_jsonl_comes_from_standard_input_too(queue: SimpleNamespace, run: Run) -> None:
    """
    A dash reads the lines of a pipe.
    """
    code, ids, errors = run("submit", "--jsonl", "-", stdin=b'{"prompt": "a"}\n{"prompt": "b"}\n')

    assert (0, 2, "") == (code, len(ids.split()), errors)
    assert ["a", "b"] == [job.prompt for job in answer(queue, echo)]


def test_several_answers_and_json_are_printed(queue: SimpleNamespace, run: Run) -> None:
    """
    With n over 1 each answer has its index; --json is the whole result, one line a job.
    """
    _, job_id, _ = run("submit", "hi", "--n", "2")
    answer(queue, echo)

    assert (0, "[0] HI\n[1] HI\n", "") == run("result", job_id.strip())
    code, printed, _ = run("result", "--json", job_id.strip())
    assert (0, "done") == (code, Result.model_validate_json(printed).status)


def test_ids_are_printed_as_json(queue: SimpleNamespace, run: Run) -> None:
    """
    With --json and without --wait, one object a job, from flags and from lines alike.
    """
    code, printed, _ = run("submit", "--json", "--raw", "a", "--stdin", stdin=b"b")
    also, lines, _ = run("submit", "--json", "--jsonl", "-", stdin=b'{"prompt": "c"}\n')

    found = [json.loads(line) for line in (printed + lines).splitlines()]
    jobs = {job.prompt: {"job_id": job.id} for job in answer(queue, echo)}
    assert (0, 0) == (code, also)
    assert [jobs[prompt] for prompt in ("a", "b", "c")] == found


def test_waiting_without_a_worker_is_told(queue: SimpleNamespace, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A wait that may last for ever says why, on standard error; the answer comes all the same.
    """
    looked, tell = threading.Event(), cli._tell_of_no_worker

    def tell_first(client: Client) -> None:
        tell(client)
        looked.set()

    def be_a_worker() -> None:
        # no sooner, or there is one
        assert looked.wait(30)
        wait_for(lambda: answer(queue, echo))

    monkeypatch.setattr(cli, "_tell_of_no_worker", tell_first)
    worker = threading.Thread(target=be_a_worker)
    worker.start()
    code, printed, errors = run("submit", "x", "--wait")
    worker.join()

    assert (0, "X\n") == (code, printed)
    assert "pagemill: no worker is alive: jobs wait until there is one\n" == errors


def test_waiting_for_lines_tells_of_failures(queue: SimpleNamespace, run: Run) -> None:
    """
    A file of jobs that is waited for ends with code 1 when one of them has no answer.
    """
    lines = b'{"prompt": "a"}\n{"prompt": "b"}\n'
    ended: list[Job] = []

    def half(job: Job) -> Result:
        return echo(job) if job.prompt == "a" else refuse(job)

    def serve() -> None:
        wait_for(lambda: ended.extend(answer(queue, half)) or len(ended) == 2)

    worker = threading.Thread(target=serve)
    worker.start()
    code, printed, errors = run("submit", "--wait", "--jsonl", "-", stdin=lines)
    worker.join()

    results = [Result.model_validate_json(line) for line in printed.splitlines()]
    assert (1, ["done", "failed"]) == (code, sorted(result.status for result in results))
    assert "1 of 2 jobs have no answer" in errors


def test_failed_and_unfinished_jobs_are_one_line_and_code_1(queue: SimpleNamespace, run: Run) -> None:
    """
    Whoever asks for an answer that is not there is told why, without a traceback.
    """
    _, job_id, _ = run("submit", "hi")
    job_id = job_id.strip()

    code, printed, errors = run("result", job_id)
    assert (1, "", 1) == (code, printed, errors.count("\n"))
    assert "has not ended" in errors

    answer(queue, refuse)
    code, printed, errors = run("result", job_id)
    assert (1, "", 1) == (code, printed, errors.count("\n"))
    assert "the model takes 8" in errors


@pytest.mark.usefixtures("queue")
def test_cancelled_job_ends_and_status_says_so(run: Run) -> None:
    """
    A job that waits is cancelled at once.
    """
    _, job_id, _ = run("submit", "hi", "--lane", "bulk", "--tenant", "acme")
    job_id = job_id.strip()

    assert (0, f"{job_id} cancelled\n", "") == run("cancel", job_id)

    code, printed, _ = run("status", job_id)
    assert 0 == code
    assert "state     cancelled" in printed
    assert "lane bulk, tenant acme" in printed
    _, as_json, _ = run("status", "--json", job_id)
    assert "cancelled" == json.loads(as_json)["state"]


@pytest.mark.usefixtures("queue")
def test_status_shows_lanes_and_workers(run: Run) -> None:
    """
    The overview counts what waits by lane, and says how to start a worker where none lives.
    """
    run("submit", "hi", "--lane", "interactive")

    code, printed, _ = run("status")
    _, as_json, _ = run("status", "--json")

    lanes = {line.split()[0]: line.split()[1] for line in printed.splitlines()[1:4]}
    assert (0, {"interactive": "1", "standard": "0", "bulk": "0"}) == (code, lanes)
    assert "pagemill worker" in printed
    assert 1 == json.loads(as_json)["queued"]["interactive"]


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("submit",), 2, "give a prompt"),
        (("submit", "x", "--jsonl", "y"), 2, "a file of jobs goes without"),
        (("submit", "--file", "no-such-file"), 2, "no-such-file"),
        (("submit", "x", "--max-tokens", "0"), 1, "max_tokens"),
        (("submit", "x", "-o", "nonsense=1"), 1, "options.nonsense: unknown field"),
        (("submit", "x", "-o", "nonsense"), 1, "want NAME=VALUE"),
        (("submit", ""), 1, "empty"),
        (("submit", "x", "--stream", "--json"), 2, "prints text"),
        (("submit", "x", "--model", "nobody"), 1, "nobody"),
        (("result", "no-such-job"), 1, "no-such-job"),
        (("cancel", "no-such-job"), 1, "no-such-job"),
        (("status", "no-such-job"), 1, "no-such-job"),
        (("--redis-url", "redis://127.0.0.1:1/0", "status"), 1, "Is a Redis running there?"),
        (("--redis-url", "nonsense", "status"), 1, "redis://host:port/0"),
    ],
)
@pytest.mark.usefixtures("queue")
def test_mistakes_are_told_in_words(run: Run, arguments: tuple[str, ...], code: int, told: str) -> None:
    """
    Wrong usage ends with code 2, all else with code 1 and one line; nothing shows a traceback.
    """
    got, printed, errors = run(*arguments)

    assert (code, "") == (got, printed)
    assert told in " ".join(errors.replace("│", " ").split())
    assert "Traceback" not in errors
    assert code == 2 or errors.count("\n") == 1


def test_help_lists_every_command(run: Run) -> None:
    """
    The help names each command; asking for it is no error.
    """
    code, printed, _ = run("--help")

    assert 0 == code
    assert [] == [name for name in COMMANDS if name not in printed]


@pytest.mark.parametrize("name", ["submit", "result", "status", "cancel"])
def test_each_client_command_explains_itself(run: Run, name: str) -> None:
    """
    Every client command has a help page of its own.
    """
    code, printed, _ = run(name, "--help")

    assert 0 == code
    assert f"pagemill {name}" in printed


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("models", "list"), "smollm2"),
        (("worker", "--help"), "--max-num-seqs"),
        (("demo", "--help"), "--documents"),
    ],
)
def test_programs_of_the_checkout_get_their_arguments(tmp_path: Path, arguments: tuple[str, ...], told: str) -> None:
    """
    What follows the command reaches the program, even where a folder of its name stands in the way.
    """
    (tmp_path / "worker").mkdir()
    command = [sys.executable, "-c", "from pagemill.cli import main; main()", *arguments]

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)

    assert told in done.stdout


def test_without_the_checkout_the_programs_are_missed_in_words(tmp_path: Path) -> None:
    """
    From an installed wheel `worker` says where it can be run.
    """
    shutil.copytree(ROOT / "pagemill", tmp_path / "pagemill")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from pagemill.cli import main; main()"

    done = subprocess.run([sys.executable, "-c", code, "worker"], cwd=tmp_path, capture_output=True, text=True)

    assert 1 == done.returncode
    assert "run this from the checkout or the image" in done.stderr


def test_importing_the_command_line_is_light() -> None:
    """
    The help must not wait for Redis, pydantic or boto3.
    """
    code = "import sys, pagemill.cli; print([n for n in ('redis', 'pydantic', 'boto3') if n in sys.modules])"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "[]" == done.stdout.strip()
