"""
`pagemill bulk`: put the documents of a folder or a bucket through a queue, and write what comes out.

    python -m producers.bulk run --input s3://bucket/in/ --output s3://bucket/out/ --template summarise

Ctrl-C and SIGTERM stop a run in order; it goes on with `resume`, or by the same `run`. Exit code 0
where all rows have answers, 1 where some have none or the run was stopped, 2 where the command or a
setting is wrong.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any

from pagemill.bulk_client import BulkClient
from pagemill.errors import SettingsError
from producers.bulk import status
from producers.bulk.errors import SpecError
from producers.bulk.exit_codes import exit_code, heed_signals
from producers.bulk.io_errors import OutputError
from producers.bulk.jobs import BulkRunner, Hooks, resume_job, run_job
from producers.bulk.lease import OutputLease
from producers.bulk.locations import open_folder
from producers.bulk.manifest import read_manifest
from producers.bulk.planner import find_or_make, settled
from producers.bulk.report import Summary, lines, summarise
from producers.bulk.spec import BulkSpec, assign, merge, read_file, read_section
from producers.bulk.work import Counts
from producers.extras import need
from producers.programs import observed
from producers.progress import Display, Meter, Moment, tell_of_no_worker

# flags that are fields of the spec by the same name, and what they say in the help
_FIELDS = {
    "input": "object or folder to read: s3://, file:// or a path; {date} stands for --date",
    "output": "folder to write; one job's alone",
    "format": "jsonl, parquet or text; without it the names of the objects tell",
    "text-field": "column of the text (text)",
    "id-field": "column of the custom_id (custom_id)",
    "limit": "take so many rows of the input",
    "template": "summarise, classify, extract, translate, or a template file (summarise)",
    "model": "the model that must answer",
    "tenant": "who pays",
    "deadline": "when all is to end, as 2026-12-01T06:00:00+01:00",
    "rows-per-chunk": "rows of the input that make a file of the output (512)",
    "max-jobs": "most jobs in the queue at a time (2048)",
    "max-tokens": "most estimated tokens in the queue at a time (4,000,000)",
    "output-format": "jsonl.zst, jsonl or parquet (jsonl.zst)",
    "prompt-price": "of a million tokens",
    "completion-price": "of a million tokens",
}
_WRITERS = {"jsonl.zst": ("zstandard",), "parquet": ("pyarrow",)}
_RESUME = ("deadline", "max-jobs", "max-tokens", "prompt-price", "completion-price")


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line().parse_args(arguments)
    return exit_code("bulk", lambda: int(options.command(options)), (SpecError, SettingsError))


def _run(options: argparse.Namespace) -> int:
    spec = _spec(options)
    # before jobs run whose answers could not be written
    need("bulk", *_WRITERS.get(spec.output_format, ()))
    return _work(options, lambda client, hooks: run_job(spec, client, hooks))


def _resume(options: argparse.Namespace) -> int:
    changes = _given(options, _RESUME)
    return _work(
        options, lambda client, hooks: resume_job(options.output, client, hooks, failed=options.failed, changes=changes)
    )


def _plan(options: argparse.Namespace) -> int:
    spec = settled(_spec(options))
    store = open_folder(spec.output)
    with _client(options) as client, OutputLease(client, store.url("")):
        plan = find_or_make(spec, store, client)
    if options.json:
        print(plan.model_dump_json(exclude_unset=True))
    else:
        print("\n".join(status.plan_lines(plan)))
    return 0


def _status(options: argparse.Namespace) -> int:
    with _client(options) as client:
        found = status.look(options.output, client)
    print(found.model_dump_json() if options.json else "\n".join(status.lines(found)))
    return 0


def _report(options: argparse.Namespace) -> int:
    store = open_folder(options.output)
    manifest = read_manifest(store)
    if manifest is None:
        raise OutputError(f"{options.output} has no manifest: its job is not done; `status` says how far it is")
    return _tell(options, summarise(manifest))


def _work(options: argparse.Namespace, work: Callable[[BulkClient, Hooks], Summary]) -> int:
    """Do a job with a display, stopped in order by signals."""
    with ExitStack() as stack:
        voice = stack.enter_context(observed("pagemill-bulk"))
        client = stack.enter_context(_client(options))
        tell_of_no_worker(client, voice.warn)
        display = stack.enter_context(voice.display())
        display.show(Moment(0, 0, "planning", unit="rows", kv_usage=None))
        summary = work(client, _hooks(display))
    return _tell(options, summary)


def _hooks(display: Display) -> Hooks:
    meter = Meter()
    left, total = 0, 0

    def started(runner: BulkRunner, rows_left: int, rows: int) -> None:
        nonlocal left, total
        left, total = rows_left, rows
        heed_signals(runner)

    def turned(counts: Counts) -> None:
        stage = "waiting for a full queue" if counts.busy else "running"
        rate = meter.read(counts.completion_tokens)
        done = total - left + counts.rows
        display.show(Moment(done, total, stage, tokens_per_s=rate, unit="rows", kv_usage=None))

    return Hooks(started, turned)


def _tell(options: argparse.Namespace, summary: Summary) -> int:
    print(summary.model_dump_json() if options.json else "\n".join(lines(summary)))
    return 0 if summary.num_failed == 0 else 1


def _client(options: argparse.Namespace) -> BulkClient:
    return BulkClient(options.redis_url, queue=options.queue, object_store=options.object_store)


def _spec(options: argparse.Namespace) -> BulkSpec:
    fields: dict[str, Any] = {}
    if options.config is not None:
        fields = read_file(options.config)
    if options.name is not None:
        fields = merge(fields, read_section(options.name, os.environ))
    fields = merge(fields, _given(options, _FIELDS))
    if options.param:
        fields = merge(fields, {"params": assign(options.param, "--param")})
    if options.option:
        fields = merge(fields, {"options": assign(options.option, "--option")})
    spec = BulkSpec.build(fields)
    return spec if options.date is None else spec.on(options.date)


def _given(options: argparse.Namespace, flags: Sequence[str] | dict[str, str]) -> dict[str, Any]:
    values = {flag.replace("-", "_"): getattr(options, flag.replace("-", "_")) for flag in flags}
    return {name: value for name, value in values.items() if value is not None}


def command_line() -> argparse.ArgumentParser:
    """What may be written behind `pagemill bulk`."""
    parser = argparse.ArgumentParser(
        prog="pagemill bulk", description="Put many documents through a queue, and write what comes out."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command, about in (
        ("run", _run, "do a job, or what is left of it"),
        ("plan", _plan, "read the input and write the plan alone"),
    ):
        one = _command(commands, name, command, about)
        one.add_argument("name", nargs="?", help="a job of pagemill.toml: its section [bulk.NAME]")
        one.add_argument("--config", type=Path, help="TOML or JSON file with the fields of the job")
        one.add_argument("--date", type=_day, help="the day that {date} stands for, as 2026-12-01")
        one.add_argument("--param", action="append", metavar="NAME=VALUE", help="for the template; may be repeated")
        one.add_argument("--option", "-o", action="append", metavar="NAME=VALUE", help="of each job, as max_tokens=60")
        for flag, text in _FIELDS.items():
            one.add_argument(f"--{flag}", help=text)
    again = _command(commands, "resume", _resume, "go on with a job that was stopped or killed")
    again.add_argument("output", help="the folder that it writes")
    again.add_argument("--failed", action="store_true", help="and run the rows again that have no answer")
    for flag in _RESUME:
        again.add_argument(f"--{flag}", help=_FIELDS[flag])
    for name, command, about in (
        ("status", _status, "show how far a job is"),
        ("report", _report, "show what a job came to that is done"),
    ):
        _command(commands, name, command, about).add_argument("output", help="the folder that it writes")
    return parser


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no day: want one as 2026-12-01") from None


def _command(
    commands: Any, name: str, command: Callable[[argparse.Namespace], int], about: str
) -> argparse.ArgumentParser:
    one: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about)
    one.set_defaults(command=command)
    one.add_argument("--redis-url", help="the server, as redis://host:port/0")
    one.add_argument("--queue", help="name of the queue")
    one.add_argument("--object-store", help="where large payloads and results are")
    one.add_argument("--json", action="store_true", help="print JSON")
    return one


if __name__ == "__main__":
    sys.exit(main())
