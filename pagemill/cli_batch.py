"""`pagemill batch`: open and seal batches, see how far they are, wait for them, cancel them."""

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from pagemill.cli_common import PASS_ON, AsJson, become, hand_down, open_client, to_json

if TYPE_CHECKING:
    from pagemill.messages import BatchStatus

app = typer.Typer(name="batch", help="Batches: jobs that are counted and ended together.", no_args_is_help=True)

_BatchId = Annotated[str, typer.Argument(help="The id that `batch create` printed.")]


@app.command()
def create(
    context: typer.Context,
    batch_id: Annotated[str | None, typer.Argument(help="An id of your own; creating it again finds it.")] = None,
    model: Annotated[str | None, typer.Option(help="The model that its jobs ask for.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Whose it is.")] = None,
    webhook: Annotated[str | None, typer.Option(help="A URL that is told when it has ended.")] = None,
    metadata: Annotated[list[str] | None, typer.Option(help="NAME=VALUE, kept with it.")] = None,
) -> None:
    """Open a batch and print its id; jobs join it with `submit --batch`."""
    from pagemill.job_input import read_assignments

    named = read_assignments(metadata or (), option="--metadata")
    with open_client(context) as client:
        print(client.create_batch(batch_id, model=model, tenant=tenant, webhook=webhook, metadata=named).batch_id)


@app.command()
def seal(context: typer.Context, batch_id: _BatchId) -> None:
    """Let no more jobs join: the batch ends with its last job."""
    with open_client(context) as client:
        print(_progress(client.seal_batch(batch_id)))


@app.command()
def status(context: typer.Context, batch_id: _BatchId, as_json: AsJson = False) -> None:
    """Show how far a batch is, and what it took."""
    with open_client(context) as client:
        batch = client.batch_status(batch_id)
    print(to_json(batch) if as_json else "\n".join(_lines(batch)))


@app.command()
def wait(
    context: typer.Context,
    batch_id: _BatchId,
    wait_s: Annotated[float | None, typer.Option("--wait-s", help="Wait so many seconds at most.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print how far a batch is until it has ended; exit code 1 where jobs of it have no answer."""
    with open_client(context) as client:
        for batch in client.watch_batch(batch_id, wait_s=wait_s):
            print(to_json(batch) if as_json else _progress(batch), flush=True)
    if batch.done < batch.total:
        raise typer.Exit(1)


@app.command()
def cancel(context: typer.Context, batch_id: _BatchId) -> None:
    """Seal a batch and end its jobs; text made so far stays in their results."""
    with open_client(context) as client:
        print(_progress(client.cancel_batch(batch_id)))


@app.command(context_settings=PASS_ON)
def run(context: typer.Context) -> NoReturn:
    """Put an OpenAI batch file through the queue: `run input.jsonl -o output.jsonl`; `run --help` has its flags."""
    hand_down(context)
    become("producers.batch_file", ["run", *context.args])


@app.command("list")
def list_batches(
    context: typer.Context,
    limit: Annotated[int, typer.Option(help="Most batches.", min=1)] = 20,
    as_json: AsJson = False,
) -> None:
    """List the batches of the queue, newest first; with --json one a line."""
    with open_client(context) as client:
        found = client.list_batches(limit)
    for line in map(to_json, found) if as_json else _rows(found):
        print(line)


def _progress(batch: "BatchStatus") -> str:
    ended = batch.total - batch.num_open
    percent = f" ({ended / batch.total:.0%})" if batch.total else ""
    return f"{batch.batch_id} {batch.state}: {ended:,} of {batch.total:,} ended{percent}, {_ends(batch)}"


def _ends(batch: "BatchStatus") -> str:
    words = {"done": batch.done, "failed": batch.failed, "cancelled": batch.cancelled, "expired": batch.expired}
    return ", ".join(f"{name} {number:,}" for name, number in words.items() if number or name == "done")


def _lines(batch: "BatchStatus") -> Iterator[str]:
    from pagemill.cli_status import instant

    yield f"state     {batch.state}{', cancelled' if batch.cancel_requested and batch.ended else ''}"
    yield f"queue     {batch.queue}, tenant {batch.tenant}"
    yield f"jobs      {batch.total:,}: {_ends(batch)}, open {batch.num_open:,}"
    yield f"tokens    {batch.prompt_tokens:,} of prompts, {batch.completion_tokens:,} of answers"
    yield f"engine    {batch.gpu_ms / 1000:,.1f} s"
    for name, millis in (("created", batch.created_ms), ("sealed", batch.sealed_ms), ("ended", batch.ended_ms)):
        if millis:
            yield f"{name:9} {instant(millis)}"
    if batch.webhook:
        yield f"webhook   {batch.webhook}{_delivery(batch)}"
    if batch.metadata:
        yield f"metadata  {json.dumps(batch.metadata)}"


def _delivery(batch: "BatchStatus") -> str:
    if not batch.webhook_state:
        return ""
    why = f": {batch.webhook_reason}" if batch.webhook_reason else ""
    return f", {batch.webhook_state} after {batch.webhook_tries} tries{why}"


def _rows(batches: "Sequence[BatchStatus]") -> Iterator[str]:
    from pagemill.cli_status import instant, table

    header = ("batch", "state", "jobs", "open", "done", "failed", "cancelled", "expired", "created")
    rows = [
        (
            one.batch_id,
            one.state,
            *(f"{n:,}" for n in (one.total, one.num_open, one.done, one.failed, one.cancelled, one.expired)),
            instant(one.created_ms),
        )
        for one in batches
    ]
    yield from table(header, rows) if rows else ["no batches"]
