"""`pagemill bulk` as a program."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pagemill.bulk_client import BulkClient
from producers.bulk.__main__ import main
from tests.support.bulk_runs import bulk, bulk_command, output_rows, write_documents
from tests.support.redis_process import RedisProcess
from tests.support.servers import wait_for
from tests.support.services import CHECKOUT


@pytest.fixture
def flags(served_url: str, tmp_path: Path) -> list[str]:
    """Those of a job over 30 documents."""
    source = write_documents(tmp_path / "documents.jsonl", 30)
    return ["--redis-url", served_url, "--input", str(source), "--output", str(tmp_path / "out"), "-o", "max_tokens=4"]


def test_a_job_from_plan_to_report(
    flags: list[str], served_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    Planned, looked at, run, and told of again: all say the same, with exit code 0.
    """
    out = str(tmp_path / "out")

    def said(*arguments: str) -> str:
        assert 0 == main(arguments)
        return capsys.readouterr().out

    assert "rows      30 in 1 chunks" in said("plan", *flags)
    before = json.loads(said("status", out, "--redis-url", served_url, "--json"))
    assert ("stopped", 30, 0) == (before["state"], before["num_rows"], before["chunks_done"])

    ran = bulk("run", *flags, "--prompt-price", "3")

    assert 0 == ran.returncode, ran.stderr
    assert "rows      30: done 30, without an answer 0" in ran.stdout
    assert "cost      0." in ran.stdout
    # off a terminal progress is told in events
    *_, last = (event for event in map(json.loads, ran.stderr.splitlines()) if event["event"] == "run.progress")
    assert ("running", 30, 30, "rows") == (last["stage"], last["done"], last["total"], last["unit"])
    assert "state     done" in said("status", out, "--redis-url", served_url)
    assert 30 == json.loads(said("report", out, "--json"))["num_done"]


def test_named_jobs_take_flags_over_their_section(served_url: str, tmp_path: Path) -> None:
    """
    The section of pagemill.toml, the day, and what the command line says beside them.
    """
    write_documents(tmp_path / "2026-12-01.jsonl", 5)
    (tmp_path / "pagemill.toml").write_text(
        f'redis_url = "{served_url}"\n[bulk.nightly]\ninput = "{{date}}.jsonl"\noutput = "out-{{date}}"\n'
        'template = "classify"\nstructured = false\nparams = { labels = ["a", "b"] }\n'
        "[bulk.nightly.options]\nmax_tokens = 3\n"
    )
    command = bulk_command("run", "nightly", "--date", "2026-12-01", "--limit", "4", "--output-format", "jsonl")
    environment = {"PYTHONPATH": str(CHECKOUT), "PATH": ""}

    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    # letters are no labels: the rows have an error, and their answers
    assert 1 == done.returncode, done.stderr
    assert "4 invalid_answer" in done.stdout
    rows = output_rows((tmp_path / "out-2026-12-01").as_uri())
    assert [("failed", 3)] * 4 == [(row.status, len(row.text or "")) for row in rows]


def test_the_command_is_part_of_pagemill(served_url: str, tmp_path: Path) -> None:
    """
    `pagemill bulk` is the same program, and options before the command count.
    """
    source = write_documents(tmp_path / "documents.jsonl", 3)
    pagemill = [sys.executable, "-c", "from pagemill.cli import main; main()"]
    command = [*pagemill, "--redis-url", served_url, "bulk", "run", "--input", str(source)]

    done = subprocess.run([*command, "--output", str(tmp_path / "out")], cwd=CHECKOUT, capture_output=True, text=True)

    assert 0 == done.returncode, done.stderr
    assert "rows      3: done 3" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["run", "--output", "/tmp/x"], 2, "input: Field required\n"),
        (["run", "--input", "/tmp/x", "--output", "/tmp/y", "--template", "none"], 2, "there is no template 'none'"),
        (["run", "nightly"], 2, "there is no pagemill.toml here"),
        (["run", "--output", "/tmp/x", "--date", "2026-13-01"], 2, "'2026-13-01' is no day: want one as 2026-12-01"),
        (
            ["plan", "--input", "/no/such", "--output", "out"],
            1,
            "no object is called /no/such or lies below it",
        ),
        (["run", "--no-such-flag"], 2, "unrecognized arguments"),
        (["report", "/no/such/folder"], 1, "has no manifest"),
        (["resume", "/no/such/folder"], 1, "there is nothing to resume"),
        (["status", "/no/such/folder"], 1, "no job was planned there"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(
    served_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    told: str,
) -> None:
    """
    One line says what is wrong; 2 is a wrong command, 1 what came to nothing.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PAGEMILL_REDIS_URL", served_url)

    try:
        ended = main(arguments)
    except SystemExit as usage:
        ended = usage.code  # type: ignore[assignment]

    assert code == ended
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(("format_", "module"), [("jsonl.zst", "zstandard"), ("parquet", "pyarrow")])
def test_what_is_not_installed_is_told_before_any_work(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], format_: str, module: str
) -> None:
    """
    The extra that brings it is named, and nothing is planned.
    """
    monkeypatch.setattr("producers.extras.find_spec", lambda name: None if name == module else name)

    assert 2 == main(["run", *flags, "--output-format", format_])

    said = capsys.readouterr().err
    assert f"bulk: {module} is not installed" in said
    assert "'.[bulk]'" in said
    assert "planning" not in said


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_stops_in_order(served_url: str, tmp_path: Path, number: signal.Signals) -> None:
    """
    What is complete is written, the message says how to go on, and going on completes it.
    """
    source = write_documents(tmp_path / "documents.jsonl", 400)
    out, queue = str(tmp_path / "out"), f"idle-{number}"
    # a queue that nobody serves: the run waits
    flags = ["--redis-url", served_url, "--input", str(source), "--output", out, "-o", "max_tokens=4", "--queue", queue]
    with (
        BulkClient(served_url, queue=queue) as client,
        subprocess.Popen(bulk_command("run", *flags), cwd=CHECKOUT, stderr=subprocess.PIPE, text=True) as process,
    ):
        wait_for(lambda: sum(client.stats().queued.values()) == 400, 30)
        process.send_signal(number)
        _, told = process.communicate(timeout=30)

    assert 1 == process.returncode
    assert f"go on with: pagemill bulk resume '{out}'" in told
    done = bulk("resume", out, "--redis-url", served_url)
    assert 0 == done.returncode, done.stderr
    assert "rows      400: done 400" in done.stdout


def test_a_second_signal_waits_for_no_server(tmp_path: Path) -> None:
    """
    One that is silent would keep each call for a minute; the output's lease is then a dead process's.
    """
    source = write_documents(tmp_path / "documents.jsonl", 400)
    with RedisProcess(tmp_path / "server") as server, BulkClient(server.url) as client:
        flags = ["--redis-url", server.url, "--input", str(source), "--output", str(tmp_path / "out")]
        with subprocess.Popen(bulk_command("run", *flags), cwd=CHECKOUT, stderr=subprocess.PIPE, text=True) as process:
            wait_for(lambda: sum(client.stats().queued.values()) == 400, 30)
            server.pause()
            for _ in range(2):
                process.send_signal(signal.SIGTERM)
                time.sleep(0.5)
            _, told = process.communicate(timeout=10)
        server.resume()

    assert (130, "bulk: interrupted") == (process.returncode, told.splitlines()[-1])
