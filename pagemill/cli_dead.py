"""`pagemill dead`: look at the jobs that were given up, run them anew, or throw them away."""

import json
import sys
from base64 import b64encode
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from pagemill.cli_common import AsJson, open_client
from pagemill.errors import InvalidJob, JobNotFound

if TYPE_CHECKING:
    from pagemill.client import Client
    from pagemill.dead_letters import DeadLetter

app = typer.Typer(name="dead", help="Dead letters: jobs that were given up.", no_args_is_help=True)

# letters that `--all` handles together
PAGE = 100

SHOWN_BYTES = 2000
SHOWN_MESSAGE = 80

_EntryIds = Annotated[list[str], typer.Argument(metavar="ENTRY_ID...", help="Ids that `dead list` printed.")]
_EntryIdsOrNone = Annotated[
    list[str] | None, typer.Argument(metavar="[ENTRY_ID...]", help="Ids that `dead list` printed.")
]


@app.command("list")
def list_letters(
    context: typer.Context,
    limit: Annotated[int, typer.Option(help="Most letters.", min=1)] = PAGE,
    after: Annotated[str, typer.Option(help="Begin behind this entry id.")] = "-",
    as_json: AsJson = False,
) -> None:
    """List the dead letters, oldest first; with --json one a line, without payloads."""
    with open_client(context) as client:
        letters = client.dead_letters(limit, after)
    for line in map(_json, letters) if as_json else _rows(letters):
        print(line)


@app.command()
def show(context: typer.Context, entry_ids: _EntryIds, as_json: AsJson = False) -> None:
    """Show dead letters with all that is kept of them; --json has the payload too."""
    with open_client(context) as client:
        for entry_id in entry_ids:
            letter = client.dead_letter(entry_id)
            print(_json(letter, whole=True) if as_json else "\n".join(_lines(letter)))


@app.command()
def requeue(
    context: typer.Context,
    entry_ids: _EntryIdsOrNone = None,
    every: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
) -> None:
    """
    Run the jobs of dead letters anew, under their ids; prints each id and its state.

    Raw entries that were refused are judged anew. What cannot be put back is left where it is.
    """
    if bool(entry_ids) == every:
        raise typer.BadParameter("give entry ids, or --all")
    num_left = 0
    with open_client(context) as client:
        for entry_id in entry_ids or _ids_to_requeue(client):
            try:
                accepted = client.requeue_dead(entry_id)
            except (JobNotFound, InvalidJob) as error:
                num_left += 1
                print(f"pagemill: {error}", file=sys.stderr)
                continue
            print(f"{accepted.job_id} {'there already: ' if accepted.duplicate else ''}{accepted.state}")
    # of all letters some may go meanwhile, by another hand
    if num_left and not every:
        raise typer.Exit(1)


@app.command()
def purge(
    context: typer.Context,
    entry_ids: _EntryIdsOrNone = None,
    older_than_h: Annotated[float | None, typer.Option(help="Those given up so many hours ago.", min=0)] = None,
    every: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
) -> None:
    """Delete dead letters for good, payloads included; prints how many."""
    if bool(entry_ids) + (older_than_h is not None) + every != 1:
        raise typer.BadParameter("give entry ids, --older-than-h or --all")
    with open_client(context) as client:
        if entry_ids:
            purged = client.purge_dead(entry_ids)
        else:
            purged = client.purge_dead(older_than_s=3600 * (older_than_h or 0))
    print(f"{purged} purged")


def _ids_to_requeue(client: "Client") -> list[str]:
    """Ids of the letters that are there now: what dies again meanwhile is not taken a second time."""
    ids: list[str] = []
    last = "-"
    while letters := client.dead_letters(PAGE, last):
        last = letters[-1].entry_id
        ids += (letter.entry_id for letter in letters if letter.can_be_requeued)
    return ids


def _rows(letters: "Sequence[DeadLetter]") -> Iterator[str]:
    from pagemill.cli_status import instant, table

    header = ("entry", "why", "job", "lane", "given up", "message")
    rows = [
        (one.entry_id, one.why, one.job_id or "-", one.lane or "-", instant(one.at_ms), _first_line(one.message))
        for one in letters
    ]
    yield from table(header, rows) if rows else ["no dead letters"]


def _lines(letter: "DeadLetter") -> Iterator[str]:
    from pagemill.cli_status import instant

    yield f"entry     {letter.entry_id}"
    if letter.job_id:
        yield f"job       {letter.job_id}, lane {letter.lane}, tenant {letter.tenant}"
    yield f"given up  {instant(letter.at_ms)}, for {letter.why}"
    yield f"message   {letter.message}"
    yield f"history   attempt {letter.attempt}, {letter.crashes} crashes alone, {letter.lapses} lapses"
    if letter.worker:
        yield f"worker    {letter.worker}"
    if letter.payload_ref:
        yield f"payload   at {letter.payload_ref}"
    content = letter.payload if letter.raw is None else letter.raw
    if content is not None:
        yield f"payload   {len(content):,} bytes: {content[:SHOWN_BYTES].decode(errors='replace')}"


def _json(letter: "DeadLetter", *, whole: bool = False) -> str:
    from dataclasses import asdict

    fields = asdict(letter)
    for name in ("payload", "raw"):
        content: bytes | None = fields.pop(name)
        if whole and content is not None:
            # what is no text can only be a stranger's; base64 keeps it
            fields[name] = _text_or_base64(content)
    return json.dumps(fields)


def _text_or_base64(content: bytes) -> str | dict[str, str]:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return {"base64": b64encode(content).decode()}


def _first_line(text: str) -> str:
    line = text.partition("\n")[0]
    return line if len(line) <= SHOWN_MESSAGE else line[: SHOWN_MESSAGE - 3] + "..."
