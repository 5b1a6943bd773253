"""`pagemill batch run`, as a user runs it."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

from producers.batch_file.__main__ import main
from tests.support.batch_files import (
    batch_command,
    chat_line,
    environment,
    ids_of,
    plain_line,
    read_lines,
    run_command,
    write_lines,
)
from tests.support.servers import is_routed, wait_for
from tests.support.services import CHECKOUT, RunningService
from worker.fake_engine import FakeEngine


@pytest.fixture
def flags(served_url: str) -> list[str]:
    wait_for(lambda: is_routed(served_url), 60)
    return ["--redis-url", served_url]


def test_a_file_is_run_and_told_of_in_a_line(flags: list[str], tmp_path: Path) -> None:
    """
    Exit code 0 where all lines have a response; progress goes to stderr, the summary to stdout.
    """
    source = write_lines(tmp_path / "in.jsonl", (chat_line(number) for number in range(20)))
    output = tmp_path / "out.jsonl"

    done = run_command(str(source), "-o", str(output), *flags)

    assert 0 == done.returncode, done.stderr
    assert f"completed: 20 lines, 20 with a response, 0 without; {output}\n" == done.stdout.decode()
    assert 20 == len(read_lines(output))
    assert b"running" in done.stderr


def test_lines_without_a_response_make_it_exit_code_1(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    The error file lies beside the output, or where it is said to; the same command again gives the same code.
    """
    source = write_lines(tmp_path / "in.jsonl", [plain_line(0), b"{", plain_line(2)])
    errors = tmp_path / "elsewhere" / "bad.jsonl"
    command = (str(source), "-o", str(tmp_path / "out.jsonl"), "--errors", str(errors), "--json", *flags)

    codes = [main(["run", *command]) for _ in range(2)]

    assert [1, 1] == codes
    first, again = capsys.readouterr().out.splitlines()
    assert first == again
    told = json.loads(first)
    assert (3, 2, 1, str(errors)) == (told["total"], told["completed"], told["failed"], told["errors"])
    assert [""] == ids_of(read_lines(errors))


def test_what_cannot_start_is_exit_code_2(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """
    No input, one without a line that could run, and an output that is there: one sentence, and nothing is written.
    """
    empty = write_lines(tmp_path / "empty.jsonl", [])
    good = write_lines(tmp_path / "good.jsonl", [chat_line(0)])
    there = write_lines(tmp_path / "there.jsonl", [])
    output = str(tmp_path / "out.jsonl")

    for source, target, why in (
        (tmp_path / "none.jsonl", output, "no object"),
        (empty, output, "the file is empty"),
        (good, str(there), "is there already"),
        (good, f"{tmp_path}/", "is a folder"),
        (good, "ftp://host/out.jsonl", "ftp://"),
    ):
        code = main(["run", str(source), "-o", target, *flags])
        assert 2 == code
        assert why in capsys.readouterr().err
    assert not Path(output).exists()


def test_a_deadline_that_is_none_is_told_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    """
    The message shows how one is written.
    """
    with pytest.raises(SystemExit):
        main(["run", "in.jsonl", "-o", "out.jsonl", "--deadline", "tomorrow"])

    assert "'tomorrow' is no time: want one as 2026-12-01T06:00:00+01:00" in capsys.readouterr().err


def test_it_stands_in_a_pipe(flags: list[str], tmp_path: Path) -> None:
    """
    With - for both, lines come from stdin, and responses and errors go to stdout.
    """
    lines = [chat_line(0), chat_line(1, model="gpt-9"), chat_line(2)]
    text = b"".join(json.dumps(line).encode() + b"\n" for line in lines)

    done = run_command("-", "-o", "-", *flags, stdin=text)

    assert 1 == done.returncode
    assert ["line-0", "line-2", "line-1"] == ids_of(json.loads(line) for line in done.stdout.splitlines())
    assert [] == list(tmp_path.iterdir())


def test_sigterm_stops_it_in_order(server_url: str, queue: str, tmp_path: Path) -> None:
    """
    Exit code 1 and one sentence; the same command goes on.
    """
    flags = ("--redis-url", server_url, "--queue", queue)
    source = write_lines(tmp_path / "in.jsonl", (chat_line(number) for number in range(160)))
    output = tmp_path / "out.jsonl"
    command = batch_command("run", str(source), "-o", str(output), "--max-jobs", "8", "--rows-per-chunk", "8", *flags)
    # ten parts a second, so that the signal comes before the last one
    with RunningService(server_url, queue, engine=FakeEngine(tokens_per_s=320)):
        wait_for(lambda: is_routed(server_url))
        with subprocess.Popen(command, cwd=CHECKOUT, env=environment(), stderr=subprocess.PIPE) as process:
            parts = tmp_path / "out.jsonl.batch" / "parts"
            wait_for(lambda: parts.is_dir() and any(parts.iterdir()), 30)
            process.send_signal(signal.SIGTERM)
            assert process.stderr is not None
            said = process.stderr.read()

        assert 1 == process.returncode
        assert said.endswith(b"batch: stopped; the same command goes on with it\n")
        assert not output.exists()
        again = subprocess.run(command, cwd=CHECKOUT, env=environment(), capture_output=True, check=False)
        assert 0 == again.returncode
    assert [f"line-{number}" for number in range(160)] == ids_of(read_lines(output))


@pytest.mark.parametrize("flags", [["run", "i", "-o", "o", "--max-jobs", "0"], ["serve", "--batches", "-1"]])
def test_a_limit_that_lets_nothing_through_is_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """
    With it a command would wait for ever.
    """
    with pytest.raises(SystemExit) as ended:
        main(flags)

    assert 2 == ended.value.code
    assert "want 1 or more" in capsys.readouterr().err


def test_the_help_is_the_programs_own() -> None:
    """
    What follows `batch run` is for the program that it starts.
    """
    done = run_command("--help")

    assert 0 == done.returncode
    assert b"--deadline" in done.stdout


def test_a_signal_before_the_work_leaves_no_files(flags: list[str], tmp_path: Path) -> None:
    """
    SIGTERM ends a command that still reads its input as Ctrl-C does: what it keeps for a while is deleted.
    """
    environ = environment() | {"TMPDIR": str(tmp_path)}
    command = batch_command("run", "-", "-o", "-", *flags)
    with subprocess.Popen(command, cwd=CHECKOUT, env=environ, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        wait_for(lambda: any(tmp_path.iterdir()), 20)
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        told = process.stderr.read()

    assert (130, b"batch: interrupted\n", []) == (process.returncode, told, list(tmp_path.iterdir()))
