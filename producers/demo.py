"""
Summarise a folder of documents through a queue, on a machine that has nothing set up.

    python -m producers.demo

Fetches the model, starts a server and one worker, submits a job for each document, shows how
far they are, prints the summaries, and stops all that it started, on Ctrl-C too.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console

from pagemill.client import Client
from pagemill.errors import PagemillError, WaitTimeout
from pagemill.schema import Job, Message, Options, Result
from producers.child import Child
from producers.local_redis import local_redis
from producers.progress import Display, Meter, Moment, display_for

DOCUMENTS = Path(__file__).resolve().parent.parent / "examples" / "documents"
QUEUE = "demo"
SYSTEM = "Provide a concise, objective summary of the input text in one sentence, focusing on the key facts."

DEFAULT_MODEL = "smollm2"

# defaults of the demo's own worker: a cache that its 24 jobs half fill is made in no time, and
# OpenMP threads that spin while they wait would take the two cores from everyone else
WORKER_ENVIRON = {
    "PAGEMILL_DEVICE": "cpu",
    "PAGEMILL_KV_CACHE_BYTES": "512MiB",
    "PAGEMILL_SWAP_SPACE_BYTES": "64MiB",
    "OMP_WAIT_POLICY": "PASSIVE",
}

# how often the display moves
TICK_S = 0.25


class DemoError(Exception):
    """Raised when the demo cannot go on; the message is for its user."""


@dataclass(frozen=True, slots=True)
class Document:
    """One text to be summarised."""

    name: str
    text: str

    def job(self, max_tokens: int) -> Job:
        messages = (Message(role="system", content=SYSTEM), Message(role="user", content=self.text))
        return Job(messages=messages, options=Options(max_tokens=max_tokens), metadata={"document": self.name})


@dataclass(frozen=True, slots=True)
class Outcome:
    """All results, in the order of the documents; the time is from the first job's start to the last one's end."""

    results: list[Result]
    elapsed_s: float

    @property
    def num_tokens(self) -> int:
        return sum(result.usage.completion_tokens for result in self.results)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    console = Console()
    # a plain SIGTERM would leave without stopping the worker
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        documents = read_documents(options.documents)
        outcome = run(documents, options, console)
        write_results(options.output, documents, outcome.results)
        report(console, documents, outcome, options.output)
    except (DemoError, PagemillError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted; all that it started has been stopped", file=sys.stderr)
        return 130
    return 0 if all(result.status == "done" for result in outcome.results) else 1


def run(documents: Sequence[Document], options: argparse.Namespace, console: Console) -> Outcome:
    """
    Start a server and a worker, have all documents summarised, and stop both.

    Raises:
        DemoError: the model cannot be fetched, or the worker ended.
        SettingsError: the server's URL is none.
    """
    with ExitStack() as stack:
        url = stack.enter_context(local_redis(url=options.redis_url))
        if options.engine == "paged":
            pull_model(options.model)
        # a model of somebody's own may need more room: the worker then chooses
        environ = {**WORKER_ENVIRON, **os.environ} if options.model == DEFAULT_MODEL else None
        # the last entered stops first: the worker, while the server still takes its results
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pagemill-demo-")))
        worker = stack.enter_context(Child(worker_command(url, options), log=folder / "worker.log", environ=environ))
        client = stack.enter_context(Client(url, queue=QUEUE))
        jobs = [document.job(options.max_tokens) for document in documents]
        job_ids = [accepted.job_id for accepted in client.submit_many(jobs)]
        display = stack.enter_context(display_for(console))
        results = follow(client, job_ids, worker, display)
        # by the server's clock, so that loading the model does not count
        times = [client.status(job_id) for job_id in job_ids]
        first, last = min(job.started_ms for job in times), max(job.ended_ms for job in times)
        return Outcome(results, elapsed_s=max(last - first, 1) / 1000)


def pull_model(name: str) -> None:
    """
    Fetch a model by name, once; folders and files are taken as they are.

    Raises:
        DemoError: it cannot be fetched.
    """
    if Path(name).exists():
        return
    # a process of its own: producers import nothing of the worker
    command = [sys.executable, "-P", "-m", "worker.models", "pull", name]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise DemoError(f"the model {name} could not be fetched; the reason stands above")


def worker_command(url: str, options: argparse.Namespace) -> list[str]:
    # -P: a folder called worker where the user stands is not meant
    command = [sys.executable, "-P", "-m", "worker", "--redis-url", url, "--queue", QUEUE, "--engine", options.engine]
    if options.engine == "paged":
        command += ["--model", options.model]
    # all jobs have ended when the worker is stopped, or nobody waits for them any more
    return [*command, "--drain-s", "0", *options.worker_arguments]


def follow(client: Client, job_ids: Sequence[str], worker: Child, display: Display) -> list[Result]:
    """
    Show how far the jobs are until all have ended; the results are in the order of the ids.

    Raises:
        DemoError: the worker ended first.
    """
    results: dict[str, Result] = {}
    meter = Meter()
    display.show(Moment(0, len(job_ids), "loading the model"))
    while len(results) < len(job_ids):
        if worker.exit_code() is not None:
            raise DemoError(f"the worker ended with code {worker.exit_code()}:\n{worker.last_lines()}")
        for result in _ended(client, [job_id for job_id in job_ids if job_id not in results]):
            results[result.job_id] = result
        fields = next(iter(client.workers().values()), {})
        if results or "kv_usage" in fields:
            rate = meter.read(int(fields.get("generated_tokens", 0)))
            usage = float(fields.get("kv_usage", 0))
            display.show(Moment(len(results), len(job_ids), "summarising", tokens_per_s=rate, kv_usage=usage))
    return [results[job_id] for job_id in job_ids]


def _ended(client: Client, job_ids: Sequence[str]) -> Iterator[Result]:
    """The jobs that end within a tick."""
    try:
        yield from client.finished(job_ids, wait_s=TICK_S)
    except WaitTimeout:
        return


def read_documents(folder: Path) -> list[Document]:
    """
    The texts of a folder, by name.

    Raises:
        DemoError: there are none.
    """
    documents = [Document(path.stem, path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.txt"))]
    if not documents:
        raise DemoError(f"there are no .txt files in {folder}: name another folder with --documents")
    return documents


def write_results(path: Path, documents: Sequence[Document], results: Sequence[Result]) -> None:
    """One JSON line a document: id, document, text, usage, and the failure where there was one."""
    with path.open("w", encoding="utf-8") as file:
        for document, result in zip(documents, results, strict=True):
            row = {
                "id": result.job_id,
                "document": document.name,
                "text": result.text.strip(),
                "usage": result.usage.model_dump(),
            }
            if result.failure is not None:
                row["failure"] = result.failure.model_dump()
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def report(console: Console, documents: Sequence[Document], outcome: Outcome, output: Path) -> None:
    """Print the summaries and the throughput."""
    for document, result in zip(documents, outcome.results, strict=True):
        text = " ".join(result.text.split()) if result.failure is None else f"failed: {result.failure.message}"
        console.print(f"{document.name}: ", style="bold", end="", soft_wrap=True)
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    num_done = sum(result.status == "done" for result in outcome.results)
    prompt_tokens = sum(result.usage.prompt_tokens for result in outcome.results)
    console.print(
        f"\n{num_done} of {len(documents)} summaries in {outcome.elapsed_s:.1f} s: "
        f"{outcome.num_tokens:,} tokens out ({outcome.num_tokens / outcome.elapsed_s:.0f} a second), "
        f"{prompt_tokens:,} tokens in. Written to {output}",
        highlight=False,
        soft_wrap=True,
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="pagemill demo",
        description="Summarise documents through a queue: starts a server and a worker, and stops them.",
        epilog="What follows -- goes to the worker, as in: pagemill demo -- --max-num-seqs 8",
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"name, hub id, folder or .gguf file ({DEFAULT_MODEL})")
    parser.add_argument("--documents", type=Path, default=DOCUMENTS, help="folder of .txt files")
    parser.add_argument("--max-tokens", type=int, default=40, help="most tokens of a summary (40)")
    parser.add_argument("--output", type=Path, default=Path("demo-results.jsonl"), help="where results are written")
    parser.add_argument("--redis-url", help="a server that runs; without it one is started")
    parser.add_argument("--engine", choices=("paged", "fake"), default="paged", help="fake makes up letters")
    parser.add_argument("worker_arguments", nargs="*", metavar="WORKER_ARGUMENT", help="flags of `pagemill worker`")
    return parser.parse_args(arguments)


def _interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  a signal handler takes both
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
