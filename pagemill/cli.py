"""
The command line: submit jobs, fetch results, look at a queue, and start what a checkout holds.

Client commands need this package alone. `worker`, `bulk`, `demo` and `models` start programs that lie
beside it in a checkout or an image, and say so where they do not.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, NoReturn

import typer

from pagemill import __version__
from pagemill.cli_batch import app as batch_app
from pagemill.cli_common import PASS_ON as _PASS_ON
from pagemill.cli_common import AsJson, hand_down, open_client, to_json
from pagemill.cli_common import become as _become
from pagemill.cli_dead import app as dead_app
from pagemill.cli_shares import lanes_app, tenants_app
from pagemill.errors import (
    BatchClosed,
    BatchNotFound,
    Conflict,
    InvalidJob,
    JobFailed,
    PagemillError,
    ServerAway,
    UnknownModel,
)

if TYPE_CHECKING:
    from pagemill.client import Client
    from pagemill.schema import Job

# jobs of a JSONL file that are read and sent together
BATCH_JOBS = 256

# a full queue empties: a file of jobs waits that long for it before it gives up
BUSY_WAIT_S = 600.0

# of one job alone: the others of its file can be submitted
REFUSALS = (BatchClosed, BatchNotFound, Conflict, UnknownModel)

app = typer.Typer(
    name="pagemill",
    help="Batch inference through a Redis queue: submit prompts, fetch answers, run workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(batch_app)
app.add_typer(dead_app)
app.add_typer(tenants_app)
app.add_typer(lanes_app)

_JobIds = Annotated[list[str], typer.Argument(metavar="JOB_ID...", help="Ids that `submit` printed.")]
_WaitS = Annotated[float | None, typer.Option("--wait-s", help="Wait so many seconds at most.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pagemill {__version__}")
        raise typer.Exit


@app.callback()
def connection(
    context: typer.Context,
    redis_url: Annotated[
        str | None, typer.Option(help="The server, as redis://host:port/0. (default: redis://localhost:6379/0)")
    ] = None,
    queue: Annotated[str | None, typer.Option(help="Name of the queue. (default: default)")] = None,
    object_store: Annotated[str | None, typer.Option(help="Where large payloads and results are.")] = None,
    version: Annotated[  # noqa: ARG001
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """
    Batch inference through a Redis queue: submit prompts, fetch answers, run workers.

    The options here go before the command. Without them PAGEMILL_REDIS_URL, PAGEMILL_QUEUE and
    PAGEMILL_OBJECT_STORE count, then pagemill.toml, then a server on this machine.
    """
    context.obj = {"redis_url": redis_url, "queue": queue, "object_store": object_store}


@app.command()
def submit(
    context: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - reads it from standard input.")] = None,
    file: Annotated[list[Path] | None, typer.Option(help="Submit this file's text; may be repeated.")] = None,
    stdin: Annotated[bool, typer.Option("--stdin", help="Submit the text on standard input.")] = False,
    jsonl: Annotated[str | None, typer.Option(help="Submit one job a line of this file; - is standard input.")] = None,
    system: Annotated[str | None, typer.Option(help="System message before the prompt.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Send the text as it is, without the chat template.")] = False,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the best tokens with this probability.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from the best k tokens; 0 is all.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed draws the same tokens.")] = None,
    n: Annotated[int | None, typer.Option(help="Answers to each prompt.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    json_schema: Annotated[
        str | None, typer.Option(help="The answer is JSON of this schema: a file, or the schema itself.")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="The whole answer matches this regular expression.")] = None,
    choice: Annotated[list[str] | None, typer.Option(help="The answer is one of these; repeat it.")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="Any other option, as min_p=0.05; may be repeated.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model that must answer.")] = None,
    lane: Annotated[str | None, typer.Option(help="interactive, standard or bulk.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Who pays; a queue is fair between tenants.")] = None,
    timeout_s: Annotated[float | None, typer.Option(help="Seconds after which no answer is wanted.")] = None,
    batch: Annotated[str | None, typer.Option(help="The batch to join, an id of `batch create`.")] = None,
    metadata: Annotated[list[str] | None, typer.Option(help="NAME=VALUE, returned with the result.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Print answers instead of ids.")] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print the answer while it is made.")] = False,
    as_json: AsJson = False,
) -> None:
    """Submit a prompt, files, or a file of jobs. Prints the ids, or with --wait the answers."""
    from pagemill.job_input import prompt_fields, read_assignments, read_json_values, read_schema
    from pagemill.schema import Job

    options = read_json_values(read_assignments(option or (), option="--option"))
    options |= _given(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k)
    options |= _given(seed=seed, n=n, stop=stop or None, regex=regex, choice=choice or None)
    options |= {} if json_schema is None else {"json_schema": read_schema(json_schema)}
    common = _given(options=options or None, model=model, lane=lane, tenant=tenant, timeout_s=timeout_s, batch=batch)
    common |= _given(metadata=read_assignments(metadata or (), option="--metadata") or None, stream=stream or None)
    if jsonl is not None:
        if prompt is not None or file or stdin or system is not None or raw or stream:
            raise typer.BadParameter("a file of jobs goes without prompt, --file, --stdin, --system, --raw, --stream")
        _submit_lines(context, jsonl, common, wait=wait, as_json=as_json)
        return
    texts = list(_texts(prompt, file or (), stdin=stdin))
    if stream and (len(texts) > 1 or as_json):
        raise typer.BadParameter("--stream follows one prompt, and prints text")
    jobs = [Job.build(**common, **prompt_fields(text, raw=raw, system=system)) for text in texts]
    with open_client(context) as client:
        job_ids = [accepted.job_id for accepted in client.submit_many(jobs)]
        if stream or wait:
            _tell_of_no_worker(client)
        if stream:
            _print_stream(client, job_ids[0])
        elif wait:
            _print_results(client, job_ids, wait_s=None, as_json=as_json)
        else:
            print("\n".join(_id_line(job_id, as_json) for job_id in job_ids))


@app.command()
def result(
    context: typer.Context,
    job_ids: _JobIds,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the jobs have ended.")] = False,
    wait_s: _WaitS = None,
    as_json: AsJson = False,
) -> None:
    """Print the answers of jobs that have ended; exit code 1 where a job has none."""
    limit_s = None if wait and wait_s is None else wait_s or 0.0
    with open_client(context) as client:
        _print_results(client, job_ids, wait_s=limit_s, as_json=as_json)


@app.command()
def status(
    context: typer.Context,
    job_id: Annotated[str | None, typer.Argument(help="A job; without it the whole queue is shown.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show where a job stands, or the queue: lanes, totals, workers and their KV use."""
    from pagemill.cli_status import job_lines, look, overview, overview_lines

    if job_id is None:
        survey = look(context.obj["redis_url"], context.obj["queue"])
        print(json.dumps(overview(survey)) if as_json else "\n".join(overview_lines(survey)))
        return
    with open_client(context) as client:
        job = client.status(job_id)
        print(to_json(job) if as_json else "\n".join(job_lines(job)))


@app.command()
def cancel(context: typer.Context, job_ids: _JobIds) -> None:
    """End jobs; prints each one's state after that. Text made so far stays in the result."""
    with open_client(context) as client:
        for job_id in job_ids:
            state = client.cancel(job_id)
            print(f"{job_id} {'running, its worker has been told' if state == 'running' else state}")


@app.command(context_settings=_PASS_ON)
def worker(context: typer.Context) -> NoReturn:
    """Run a worker: loads a model, serves a queue until SIGTERM. `pagemill worker --help` has its flags."""
    # what stands before the command is meant for the worker too
    named = {"--redis-url": "redis_url", "--queue": "queue", "--object-store": "object_store"}
    flags = [text for flag, name in named.items() if context.obj[name] for text in (flag, context.obj[name])]
    _become("worker", [*flags, *context.args])


@app.command(context_settings=_PASS_ON)
def demo(context: typer.Context) -> NoReturn:
    """Summarise 24 documents with a real model, starting all that it needs."""
    _become("producers.demo", context.args)


@app.command(context_settings=_PASS_ON)
def gateway(context: typer.Context) -> NoReturn:
    """Serve OpenAI's HTTP API from a queue, until SIGTERM. `pagemill gateway --help` has its flags."""
    named = {"--redis-url": "redis_url", "--queue": "queue", "--object-store": "object_store"}
    flags = [text for flag, name in named.items() if context.obj[name] for text in (flag, context.obj[name])]
    _become("producers.gateway", context.args if context.args[:1] == ["keys"] else [*flags, *context.args])


@app.command(context_settings=_PASS_ON)
def bulk(context: typer.Context) -> NoReturn:
    """Summarise, classify or translate many documents: run, plan, status, resume, report."""
    hand_down(context)
    _become("producers.bulk", context.args)


@app.command(context_settings=_PASS_ON)
def models(context: typer.Context) -> NoReturn:
    """Fetch models (`models pull smollm2`, or a hub id) and list them (`models list`)."""
    _become("worker.models", context.args)


def main() -> None:
    """Run the command line; a typed error is one line and exit code 1."""
    try:
        app()
    except BrokenPipeError:
        # the reader, as `head`, has enough; Python would complain again when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except PagemillError as error:
        hint = ". Is a Redis running there? --redis-url says where to look" if isinstance(error, ServerAway) else ""
        print(f"pagemill: {str(error).rstrip('.') if hint else error}{hint}", file=sys.stderr)
        sys.exit(1)


def _texts(prompt: str | None, files: Sequence[Path], *, stdin: bool) -> Iterator[str]:
    if prompt is not None and prompt != "-":
        yield prompt
    for path in files:
        try:
            yield path.read_text(encoding="utf-8")
        except OSError as error:
            raise typer.BadParameter(f"{path}: {error.strerror}", param_hint="--file") from None
        except UnicodeDecodeError as error:
            raise InvalidJob("invalid_encoding", f"{path} is not UTF-8 at byte {error.start}") from None
    if stdin or prompt == "-":
        try:
            yield sys.stdin.buffer.read().decode()
        except UnicodeDecodeError as error:
            raise InvalidJob("invalid_encoding", f"standard input is not UTF-8 at byte {error.start}") from None
    elif prompt is None and not files:
        raise typer.BadParameter("give a prompt, --file, --stdin or --jsonl")


def _submit_lines(context: typer.Context, source: str, defaults: dict[str, Any], *, wait: bool, as_json: bool) -> None:
    from pagemill.calls import in_chunks
    from pagemill.job_input import read_jsonl

    num_bad = num_failed = 0
    job_ids: list[str] = []
    with _open_lines(source) as lines, open_client(context) as client:
        for chunk in in_chunks(read_jsonl(lines, defaults), BATCH_JOBS):
            for number, outcome in _submit_chunk(client, chunk):
                if isinstance(outcome, str):
                    job_ids.append(outcome)
                    if not wait:
                        print(_id_line(outcome, as_json), flush=True)
                else:
                    num_bad += 1
                    print(f"line {number}: {outcome}", file=sys.stderr)
        if wait:
            _tell_of_no_worker(client)
            for ended in client.finished(dict.fromkeys(job_ids)):
                print(ended.model_dump_json(), flush=True)
                num_failed += ended.status != "done"
    if num_bad:
        print(f"pagemill: {num_bad} lines were refused, {len(job_ids)} jobs were submitted", file=sys.stderr)
    if num_failed:
        print(f"pagemill: {num_failed} of {len(job_ids)} jobs have no answer", file=sys.stderr)
    if num_bad or num_failed:
        raise typer.Exit(1)


def _submit_chunk(
    client: "Client", chunk: Sequence[tuple[int, "Job | InvalidJob"]]
) -> Iterator[tuple[int, str | PagemillError]]:
    """Each line's job id, or why it was refused, in order."""
    jobs = [job for _, job in chunk if not isinstance(job, InvalidJob)]
    job_ids: dict[str, str | PagemillError]
    try:
        accepted = client.submit_many(jobs, wait_s=BUSY_WAIT_S)
        job_ids = {job.id: one.job_id for job, one in zip(jobs, accepted, strict=True)}
    except REFUSALS:
        # somebody's job was refused: one by one tells whose, and a repeated submit is no second job
        job_ids = {job.id: _submit_alone(client, job) for job in jobs}
    for number, job in chunk:
        yield number, job if isinstance(job, InvalidJob) else job_ids[job.id]


def _submit_alone(client: "Client", job: "Job") -> str | PagemillError:
    try:
        return client.submit_many([job], wait_s=BUSY_WAIT_S)[0].job_id
    except REFUSALS as error:
        return error


def _open_lines(source: str) -> "closing[BinaryIO]":
    if source == "-":
        return closing(sys.stdin.buffer)
    try:
        return closing(Path(source).open("rb"))
    except OSError as error:
        raise typer.BadParameter(f"{source}: {error.strerror}", param_hint="--jsonl") from None


def _tell_of_no_worker(client: "Client") -> None:
    # only a hint: a server that is away is told of by what follows
    with suppress(PagemillError):
        if not client.workers():
            print("pagemill: no worker is alive: jobs wait until there is one", file=sys.stderr, flush=True)


def _print_stream(client: "Client", job_id: str) -> None:
    from pagemill.client_core import answer_of

    for delta in client.stream(job_id):
        # of several answers the first is shown: two at once could not be read
        if delta.index == 0:
            print(delta.text, end="", flush=True)
    print()
    answer_of(client.result(job_id))


def _print_results(client: "Client", job_ids: Sequence[str], *, wait_s: float | None, as_json: bool) -> None:
    from pagemill.client_core import answer_of

    failed = False
    for job_id in job_ids:
        ended = client.result(job_id, wait_s)
        if as_json:
            print(ended.model_dump_json(), flush=True)
            failed = failed or ended.status != "done"
            continue
        try:
            answer_of(ended)
        except JobFailed as error:
            failed = True
            print(f"pagemill: {error}", file=sys.stderr)
        for answer in ended.completions:
            mark = f"[{answer.index}] " if len(ended.completions) > 1 else ""
            print(f"{mark}{answer.text}", flush=True)
    if failed:
        raise typer.Exit(1)


def _id_line(job_id: str, as_json: bool) -> str:
    return json.dumps({"job_id": job_id}) if as_json else job_id


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
