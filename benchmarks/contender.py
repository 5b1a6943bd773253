"""
One engine in a process of its own, and the few JSON lines that a comparison speaks with it.

Every engine gets a fresh interpreter (another one where its pins differ), the same number of
threads and the same cases; none warms up or slows down another. The parent writes a `Case` a
line, the child answers with `Answer`; the requests themselves are built on both sides and the
digests compared.
"""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, Self

from benchmarks import workloads
from benchmarks.workloads import Request

ROOT = Path(__file__).parents[1]
_TAIL_LINES = 40


@dataclass(frozen=True, slots=True)
class Case:
    """Which requests to run; `run` numbers the repeats, for engines that want ids of their own in each."""

    workload: str
    n: int | None
    seed: int | None
    vocab: int
    scale: float
    run: int

    def requests(self) -> list[Request]:
        return workloads.build(self.workload, n=self.n, seed=self.seed, vocab=self.vocab, scale=self.scale)


@dataclass(frozen=True, slots=True)
class Answer:
    """
    What one run of a case took.

    Args:
        digest: Of the requests that were run.
        wall_s: From the first request handed over to the last token.
        cpu_s: Processor seconds of the whole process meanwhile.
        lengths: Output tokens of each request, in order.
        outputs: A short hash of each request's tokens, in order.
        stats: Whatever else the engine can say of the run.
    """

    digest: str
    wall_s: float
    cpu_s: float
    lengths: list[int]
    outputs: list[str]
    stats: dict[str, Any] = field(default_factory=dict)


class Engine(Protocol):
    """What each contender gives: a name, and tokens for requests."""

    name: str

    def reset(self) -> None:
        """Forget cached prefixes; called before the clock starts."""
        ...

    def generate(self, requests: Sequence[Request], run: int) -> list[list[int]]:
        """Answer all requests greedily, each with exactly its own number of tokens, ends ignored."""
        ...

    def stats(self) -> dict[str, Any]:
        """Figures of the run just made."""
        ...

    def close(self) -> None:
        """Stop what runs in the background."""
        ...


class ContenderError(Exception):
    """Raised when an engine cannot run here; the message is its own last word."""


class Contender:
    """
    The parent's end of one engine process.

    Args:
        label: Its name in the summary, like "transformers static".
        module: What `python -m` runs.
        arguments: Its command line.
        python: The interpreter; another one where the engine's pins differ from ours.
        grace_s: How long it may take to end once it has nothing more to do.
    """

    def __init__(
        self,
        label: str,
        module: str,
        arguments: Sequence[str],
        *,
        python: str = sys.executable,
        environment: Mapping[str, str],
        grace_s: float = 10.0,
    ) -> None:
        self.label = label
        self.name = label
        self.start_up_s = 0.0
        # what it printed last, once it has failed
        self.log_tail = ""
        self._command = [python, "-m", module, *arguments]
        self._environment = dict(environment)
        self._grace_s = grace_s
        self._process: subprocess.Popen[str] | None = None
        self._log: IO[str] | None = None

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile("w+", errors="replace")
        begin = time.perf_counter()
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
            env=self._environment,
            # engines have processes of their own, which must not outlive it with the memory of a GPU
            process_group=0,
        )
        try:
            hello = self._read()
        except ContenderError:
            self.__exit__(None, None, None)
            raise
        self.name = hello["engine"]
        self.start_up_s = round(time.perf_counter() - begin, 2)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        assert process is not None
        assert self._log is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.close()
            process.wait(self._grace_s)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            process.kill()
            process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        self._log.close()

    def run(self, case: Case) -> Answer:
        """
        Have the engine run a case.

        Raises:
            ContenderError: when it fails, or ran other requests, or gave other lengths.
        """
        assert self._process is not None
        assert self._process.stdin is not None
        # one that has ended is found out by reading
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(asdict(case)) + "\n")
            self._process.stdin.flush()
        answer = Answer(**self._read())
        requests = case.requests()
        if answer.digest != workloads.digest(requests):
            raise ContenderError(f"{self.label} ran requests {answer.digest}, not {workloads.digest(requests)}")
        wanted = [request.max_tokens for request in requests]
        if answer.lengths != wanted:
            wrong = sum(got != want for got, want in zip(answer.lengths, wanted, strict=True))
            raise ContenderError(f"{self.label} gave {wrong} of {len(wanted)} answers another length than asked for")
        return answer

    def _read(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        message: dict[str, Any] = json.loads(line) if line else {}
        if line and "error" not in message:
            return message
        lines = self._log_lines()
        self.log_tail = "\n".join(lines[-_TAIL_LINES:])
        if line:
            raise ContenderError(f"{self.label}: {message['error']}")
        last = lines[-1].strip() if lines else "it wrote nothing"
        raise ContenderError(f"{self.label} ended with code {self._process.wait()}: {last}")

    def _log_lines(self) -> list[str]:
        assert self._log is not None
        self._log.seek(0)
        return [line for line in self._log.read().splitlines() if line.strip()]


def serve(load: Callable[[], Engine]) -> int:
    """Be the child: load the engine, then answer cases from standard input until it closes."""
    # libraries print to standard output too: keep the pipe for us and send them to standard error
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(message: dict[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    try:
        engine = load()
        reply({"engine": engine.name})
        for line in sys.stdin:
            reply(asdict(answer(engine, Case(**json.loads(line)))))
        engine.close()
    except Exception as error:
        traceback.print_exc()
        reply({"error": f"{type(error).__name__}: {error}"[:600]})
        return 1
    return 0


def answer(engine: Engine, case: Case) -> Answer:
    """Run one case and measure it."""
    requests = case.requests()
    engine.reset()
    wall, cpu = time.perf_counter(), time.process_time()
    if case.workload in workloads.SEQUENTIAL:
        outputs = [engine.generate([request], case.run)[0] for request in requests]
    else:
        outputs = engine.generate(requests, case.run)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Answer(
        digest=workloads.digest(requests),
        wall_s=wall,
        cpu_s=cpu,
        lengths=[len(tokens) for tokens in outputs],
        outputs=[hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:8] for tokens in outputs],
        stats=engine.stats(),
    )
