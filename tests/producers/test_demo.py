import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from producers.child import Child
from producers.demo import DOCUMENTS, read_documents
from producers.local_redis import local_redis
from producers.progress import Bar, Lines, Meter, Moment
from tests.support.processes import is_alive
from tests.support.servers import wait_for

DEMO = [sys.executable, "-m", "producers.demo"]
FAKE = [*DEMO, "--engine", "fake"]
SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]


def started_by(pid: int) -> list[int]:
    """The processes below this one: a server, a supervisor, its worker, and the engine of that."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [process for child in children for process in started_by(child)]


@pytest.fixture
def few_documents(tmp_path: Path) -> Path:
    folder = tmp_path / "documents"
    folder.mkdir()
    for name in ("b", "a", "c"):
        (folder / f"{name}.txt").write_text(f"the text of {name}, é")
    return folder


@pytest.fixture
def heeded_ctrl_c() -> Iterator[None]:
    """Children heed SIGINT; those of a shell's background job would inherit that it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def slow_demo(few_documents: Path, tmp_path: Path, heeded_ctrl_c: None) -> Iterator[subprocess.Popen[str]]:  # noqa: ARG001
    """A demo whose jobs take minutes, once its server and worker run."""
    command = [*FAKE, "--documents", str(few_documents), "--max-tokens", "4000", "--", "--fake-tokens-per-s", "50"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        while "summarising" not in demo.stdout.readline():
            assert demo.poll() is None, "the demo ended"
        yield demo
        demo.kill()


def test_documents_are_of_the_promised_size() -> None:
    """
    24 texts of about a hundred words, no two alike.
    """
    documents = read_documents(DOCUMENTS)

    assert 24 == len({document.text for document in documents})
    assert [] == [document.name for document in documents if not 80 <= len(document.text.split()) <= 120]


def test_demo_writes_a_line_for_each_document(few_documents: Path, tmp_path: Path) -> None:
    """
    From nothing to results: in order of the documents, with text and usage, and a line of throughput.
    """
    command = [*FAKE, "--documents", str(few_documents), "--max-tokens", "5", "--output", "out.jsonl"]

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)

    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert ["a", "b", "c"] == [row["document"] for row in rows]
    assert [5, 5, 5] == [row["usage"]["completion_tokens"] for row in rows]
    assert [{"id", "document", "text", "usage"}] * 3 == [set(row) for row in rows]
    assert all(row["text"] in done.stdout for row in rows)
    assert "3 of 3 summaries" in done.stdout
    assert "15 tokens out" in done.stdout


def test_demo_takes_a_server_that_runs(few_documents: Path, tmp_path: Path) -> None:
    """
    With a URL no server is started, and the given one goes on running.
    """
    with local_redis() as url:
        command = [*FAKE, "--documents", str(few_documents), "--redis-url", url]
        subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
        # the second run finds the queue of the first
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)

    assert "3 of 3 summaries" in done.stdout


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for children in /proc")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130)])
def test_interrupted_demo_stops_what_it_started(
    slow_demo: "subprocess.Popen[str]", number: signal.Signals, code: int
) -> None:
    """
    Ctrl-C and SIGTERM end the server and the worker, in order, before the demo itself.
    """
    processes = started_by(slow_demo.pid)
    assert 4 == len(processes)

    slow_demo.send_signal(number)

    _, errors = slow_demo.communicate(timeout=30)
    assert code == slow_demo.returncode
    assert "stopped" in errors
    assert [] == [pid for pid in processes if is_alive(pid)]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the Linux kernel")
def test_killed_demo_leaves_nothing_behind(slow_demo: "subprocess.Popen[str]") -> None:
    """
    Even after SIGKILL, which nobody can handle, server and worker end.
    """
    processes = started_by(slow_demo.pid)

    slow_demo.kill()
    slow_demo.wait()

    wait_for(lambda: not any(is_alive(pid) for pid in processes), 30)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--engine", "fake", "--", "--no-such-flag"], "unknown setting --no-such-flag"),
        (["--engine", "fake", "--documents", "/no/such/folder"], "no .txt files in /no/such/folder"),
        (["--model", "no-such-model"], "no model is called 'no-such-model'"),
        (["--engine", "fake", "--redis-url", "nonsense"], "redis://"),
    ],
)
def test_demo_that_cannot_run_says_why(tmp_path: Path, arguments: list[str], told: str) -> None:
    """
    The worker's own words come through; there is no traceback and nothing is written.
    """
    done = subprocess.run([*DEMO, *arguments], cwd=tmp_path, capture_output=True, text=True)

    assert 1 == done.returncode
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert [] == list(tmp_path.iterdir())


def test_child_is_stopped_and_its_words_are_kept(tmp_path: Path) -> None:
    """
    Leaving the block ends the program; its log can still be read.
    """
    with Child(SLEEPER, log=tmp_path / "log") as child:
        wait_for(lambda: "up" in child.last_lines(), 30)
        assert child.exit_code() is None

    assert -signal.SIGTERM == child.exit_code()
    assert "up" == child.last_lines()


def test_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    """
    After the grace time nothing is left, however stubborn.
    """
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    with Child([sys.executable, "-c", code], log=tmp_path / "log", grace_s=0.1) as child:
        wait_for(lambda: "up" in child.last_lines(), 30)

    assert -signal.SIGKILL == child.exit_code()


def test_meter_forgets_what_is_long_ago() -> None:
    """
    A pause after a burst shows as a rate that falls to zero.
    """
    now = [0.0]
    meter = Meter(clock=lambda: now[0])

    rates = []
    for second, count in enumerate([0, 100, 200, 200, 200, 200, 200, 200]):
        now[0] = float(second)
        rates.append(meter.read(count))

    assert [0.0, 100.0, 100.0] == rates[:3]
    assert 0.0 == rates[-1]


def test_lines_are_few(capsys: pytest.CaptureFixture[str]) -> None:
    """
    Off a terminal a line comes when the stage changes, every few seconds, and at the end.
    """
    now = [0.0]
    display = Lines(lambda moment: Console().print(str(moment), soft_wrap=True), clock=lambda: now[0])

    for tick in range(41):
        now[0] = tick * 0.5
        display.show(Moment(tick, 40, "working", tokens_per_s=10.0, kv_usage=0.25))

    printed = capsys.readouterr().out.splitlines()
    assert "working: 0/40 jobs, 10 tokens/s, KV 25.0% used" == printed[0]
    assert "working: 40/40 jobs, 10 tokens/s, KV 25.0% used" == printed[-1]
    assert 5 == len(printed)


def test_bar_shows_jobs_rate_and_kv_use() -> None:
    """
    On a terminal one line is redrawn that holds all three figures.
    """
    console = Console(force_terminal=True, width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file, Bar(console) as display:
        display.show(Moment(3, 24, "summarising", tokens_per_s=97.0, kv_usage=0.125))

    shown = console.export_text()
    assert "summarising" in shown
    assert "3/24 jobs" in shown
    assert "97 tokens/s" in shown
    assert "KV 12.5%" in shown


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_real_demo_summarises_all_documents(tmp_path: Path) -> None:
    """
    The whole thing with the real model: 24 summaries of words, each within its 40 tokens.
    """
    done = subprocess.run(DEMO, cwd=tmp_path, capture_output=True, text=True, check=True)

    rows = [json.loads(line) for line in (tmp_path / "demo-results.jsonl").read_text().splitlines()]
    assert 24 == len(rows)
    assert all(len(row["text"].split()) >= 5 and row["usage"]["completion_tokens"] <= 40 for row in rows)
    assert "24 of 24 summaries" in done.stdout
