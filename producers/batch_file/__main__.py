"""
`pagemill batch run`: put an OpenAI batch file through a queue, and write what the API would give.

    python -m producers.batch_file run input.jsonl -o output.jsonl
    python -m producers.batch_file serve

Ctrl-C and SIGTERM stop either in order; the same command goes on with what is left. Exit code of
`run`: 0 where all lines have a response, 1 where some have none or it was stopped, 2 where it cannot
start.
"""

import argparse
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

from pagemill.bulk_client import BulkClient
from pagemill.errors import SettingsError
from pagemill.logs import bind, configure_logging
from pagemill.settings import ClientSettings, LogSettings
from pagemill.traces import exported
from producers.batch_file.errors import BatchFileError
from producers.batch_file.local import Summary, errors_beside, run_file, spool
from producers.batch_file.plan import ROWS_PER_CHUNK, Order
from producers.batch_file.server import BatchServer, Capacity
from producers.batch_file.service import folder_of
from producers.batch_file.work import Progress
from producers.bulk.errors import BulkError
from producers.bulk.exit_codes import exit_code, heed_signals
from producers.bulk.io_errors import SourceError
from producers.openai_api.batch_lines import ENDPOINTS
from producers.programs import observed
from producers.progress import Display, Meter, Moment, tell_of_no_worker


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line().parse_args(arguments)
    return exit_code(
        "batch", lambda: int(options.command(options)), (BatchFileError, BulkError, SettingsError, SourceError)
    )


def _run(options: argparse.Namespace) -> int:
    with ExitStack() as stack:
        output = options.output
        if output == "-":
            output = str(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "output.jsonl")
        errors = options.errors or errors_beside(output)
        order = Order(
            spool(sys.stdin.buffer, output) if options.input == "-" else options.input,
            endpoint=options.endpoint,
            tenant=options.tenant,
            deadline=options.deadline.timestamp() if options.deadline else None,
            rows_per_chunk=options.rows_per_chunk,
            max_jobs=options.max_jobs,
            max_tokens=options.max_tokens,
        )
        summary = _work(options, order, output, errors)
        if options.output == "-":
            _print_files(output, "" if options.errors else errors)
    _tell(options, summary)
    return 0 if not summary.failed else 1


def _work(options: argparse.Namespace, order: Order, output: str, errors: str) -> Summary:
    with ExitStack() as stack:
        voice = stack.enter_context(observed("pagemill-batches"))
        client = stack.enter_context(
            BulkClient(options.redis_url, queue=options.queue, object_store=options.object_store)
        )
        tell_of_no_worker(client, voice.warn)
        display = stack.enter_context(voice.display())
        display.show(Moment(0, 0, "reading the input", unit="lines", kv_usage=None))
        return run_file(order, output, errors, client, started=heed_signals, on_turn=_shower(display))


def _serve(options: argparse.Namespace) -> int:
    configure_logging(LogSettings.load(strict=False))
    with (
        exported(ClientSettings.load(strict=False).tracing, "pagemill-batches"),
        BulkClient(options.redis_url, queue=options.queue, object_store=options.object_store) as client,
    ):
        place = ClientSettings.load(strict=False, queue=options.queue, object_store=options.object_store)
        if place.object_store is None:
            raise SettingsError("batches are kept in an object store: set PAGEMILL_OBJECT_STORE or --object-store")
        capacity = Capacity(
            batches=options.batches,
            jobs=options.max_jobs,
            tokens=options.max_tokens,
            max_lines=options.max_lines,
            max_bytes=options.max_mb * 1024 * 1024,
            ttl_s=options.ttl_s,
        )
        bind(queue=place.queue)
        server = BatchServer(folder_of(place.object_store, place.queue), client, capacity)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: server.stop())
        server.run()
    return 0


def _shower(display: Display) -> Callable[[Progress], None]:
    meter = Meter()

    def show(progress: Progress) -> None:
        stage = "waiting for a full queue" if progress.busy else "running"
        done = progress.completed + progress.failed
        rate = meter.read(progress.completion_tokens)
        display.show(Moment(done, progress.total, stage, tokens_per_s=rate, unit="lines", kv_usage=None))

    return show


def _print_files(*paths: str) -> None:
    for path in paths:
        if path and Path(path).exists():
            with open(path, "rb") as file:
                shutil.copyfileobj(file, sys.stdout.buffer)
    sys.stdout.buffer.flush()


def _tell(options: argparse.Namespace, summary: Summary) -> None:
    # what is printed is the output itself
    out = sys.stderr if options.output == "-" else sys.stdout
    if options.json:
        print(summary.model_dump_json(exclude={"source_fingerprint"}), file=out)
        return
    where = ", ".join(filter(None, (summary.output, summary.errors))) if options.output != "-" else "standard output"
    print(
        f"{summary.status}: {summary.total:,} lines, {summary.completed:,} with a response, "
        f"{summary.failed:,} without; {where}",
        file=out,
    )


def command_line() -> argparse.ArgumentParser:
    """What may be written behind `pagemill batch`."""
    parser = argparse.ArgumentParser(prog="pagemill batch", description="Run OpenAI batch files.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run one file", description="Run one file, or what is left of it.")
    run.set_defaults(command=_run)
    run.add_argument(
        "input", help="JSON lines of requests: a path, file:// or s3:// URL, .gz and .zst too; - for stdin"
    )
    run.add_argument("-o", "--output", required=True, help="the file of responses: a path or URL; - for stdout")
    run.add_argument("--errors", help="the file of errors; OUTPUT with .errors.jsonl for .jsonl where not given")
    run.add_argument("--endpoint", choices=ENDPOINTS, help="that all lines must name; else the first line's")
    run.add_argument("--tenant", default="default", help="who pays")
    run.add_argument(
        "--deadline", type=_instant, help="what has no answer by then gets none, as 2026-12-01T06:00:00+01:00"
    )
    run.add_argument(
        "--rows-per-chunk", type=_positive, default=ROWS_PER_CHUNK, help="lines that are kept together (256)"
    )
    run.add_argument("--max-jobs", type=_positive, default=2048, help="most jobs in the queue at a time (2048)")
    run.add_argument(
        "--max-tokens", type=_positive, default=4_000_000, help="most estimated tokens of them (4,000,000)"
    )
    run.add_argument("--json", action="store_true", help="print the summary as JSON")
    serve = _add_serve(commands)
    for one in (run, serve):
        one.add_argument("--redis-url", help="the server, as redis://host:port/0")
        one.add_argument("--queue", help="name of the queue")
        one.add_argument("--object-store", help="where large payloads and results are")
    return parser


def _add_serve(commands: Any) -> argparse.ArgumentParser:
    serve: argparse.ArgumentParser = commands.add_parser(
        "serve", help="run the batches of gateways", description="Run the batches that gateways take, until SIGTERM."
    )
    serve.set_defaults(command=_serve)
    serve.add_argument("--batches", type=_positive, default=8, help="batches at a time (8)")
    serve.add_argument(
        "--max-jobs", type=_positive, default=4096, help="most jobs of all in the queue at a time (4096)"
    )
    serve.add_argument(
        "--max-tokens", type=_positive, default=8_000_000, help="most estimated tokens of them (8,000,000)"
    )
    serve.add_argument("--max-lines", type=_positive, default=50_000, help="of an input file; more fails (50,000)")
    serve.add_argument("--max-mb", type=_positive, default=200, help="of an input file, in MiB; more fails (200)")
    serve.add_argument("--ttl-s", type=_positive, help="seconds that outputs and batches are kept; else for ever")
    return serve


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is too small: want 1 or more")
    return number


def _instant(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: want one as 2026-12-01T06:00:00+01:00") from None
    return moment if moment.tzinfo is not None else moment.astimezone()


if __name__ == "__main__":
    sys.exit(main())
