"""Runs and servers that are killed at any moment, as processes against a real server and worker."""

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pagemill.bulk_client import BulkClient
from producers.batch_file.service import open_service
from tests.support.batch_files import (
    batch_command,
    chat_line,
    environment,
    ids_of,
    plain_line,
    read_lines,
    write_lines,
)
from tests.support.servers import is_routed, wait_for
from tests.support.services import CHECKOUT, RunningService
from worker.fake_engine import FakeEngine


@pytest.fixture
def ready_url(served_url: str) -> str:
    """The server, once its worker serves."""
    wait_for(lambda: is_routed(served_url), 60)
    return served_url


def num_parts(folder: Path) -> int:
    return sum(1 for path in folder.rglob("parts/*") if not path.name.startswith("."))


# counts are told once a second: so many take some seconds
NUM_LINES = 4000


def test_a_killed_run_loses_and_doubles_nothing(
    server_url: str, queue: str, client: BulkClient, tmp_path: Path
) -> None:
    """
    Killed twice at random: each line once, in order, and no job was run twice.
    """
    draw = random.Random(11)
    lines = [chat_line(number) if number % 50 else b"{broken" for number in range(800)]
    source = write_lines(tmp_path / "in.jsonl", lines)
    output = tmp_path / "out.jsonl"
    command = batch_command("run", str(source), "-o", str(output), "--redis-url", server_url, "--queue", queue)
    command += ["--rows-per-chunk", "8", "--max-jobs", "16"]
    # thirty parts a second, so that no run comes to its end before it is killed
    with RunningService(server_url, queue, engine=FakeEngine(tokens_per_s=1000)):
        wait_for(lambda: is_routed(server_url))
        for target in sorted(draw.sample(range(40), 2)):
            with subprocess.Popen(command, cwd=CHECKOUT, env=environment(), stderr=subprocess.DEVNULL) as process:
                wait_for(lambda: num_parts(tmp_path) > target or process.poll() is not None, 60)  # noqa: B023
                time.sleep(draw.uniform(0.0, 0.03))
                process.kill()
            assert -signal.SIGKILL == process.returncode
            assert not output.exists()

        done = subprocess.run(command, cwd=CHECKOUT, env=environment(), capture_output=True, check=False)

    assert 1 == done.returncode, done.stderr
    assert [f"line-{number}" for number in range(800) if number % 50] == ids_of(read_lines(output))
    assert 16 == len(read_lines(tmp_path / "out.errors.jsonl"))
    assert 784 == client.stats().totals["accepted"]


@contextmanager
def server(served_url: str, store: str, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that runs batches; killed at the end."""
    command = batch_command("serve", "--redis-url", served_url, "--object-store", store, "--batches", "1")
    with (
        log.open("ab") as file,
        subprocess.Popen([*command, "--max-jobs", "16"], cwd=CHECKOUT, env=environment(), stderr=file) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def test_another_server_goes_on_with_the_batch_of_a_killed_one(ready_url: str, tmp_path: Path) -> None:
    """
    kill -9 in the middle: the next server takes the batch over at once and completes it.
    """
    store = (tmp_path / "store").as_uri()
    files, batches = open_service(store, "default")
    source = write_lines(tmp_path / "in.jsonl", (plain_line(number) for number in range(NUM_LINES)))
    file = files.create("acme", filename="in.jsonl", purpose="batch", data=[source.read_bytes()])
    batch = batches.create("acme", input_file_id=file.id, endpoint="/v1/completions")
    with BulkClient(ready_url) as client:
        accepted = client.stats().totals.get("accepted", 0)
        with server(ready_url, store, tmp_path / "log"):
            wait_for(lambda: batches.get("acme", batch.id).request_counts.completed > 100, 60)
        assert "in_progress" == batches.get("acme", batch.id).status
        with server(ready_url, store, tmp_path / "log"):
            wait_for(lambda: batches.get("acme", batch.id).completed_at, 60)

        record = batches.get("acme", batch.id)
        assert (NUM_LINES, NUM_LINES, 0) == tuple(record.request_counts.model_dump().values())
        lines = b"".join(files.read("acme", record.output_file_id or "")).splitlines()
        assert [f"line-{number}" for number in range(NUM_LINES)] == [json.loads(line)["custom_id"] for line in lines]
        assert NUM_LINES == client.stats().totals["accepted"] - accepted


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_large_file_takes_little_memory(ready_url: str, tmp_path: Path) -> None:
    """
    100,000 lines of 4 kB, 400 MB in all, in less than 300 MB: what is held is what is in flight.
    """
    filler = "x" * 3800

    def lines() -> Iterator[dict[str, object]]:
        for number in range(100_000):
            line = chat_line(number, max_tokens=16)
            line["body"]["messages"].insert(0, {"role": "system", "content": filler})
            yield line

    source = write_lines(tmp_path / "in.jsonl", lines())
    # not getrusage: what that says begins with the memory of the process that started it
    program = (
        "import sys; from producers.batch_file.__main__ import main; code = main(sys.argv[1:]);"
        "print(open('/proc/self/status').read().partition('VmHWM:')[2].split()[0]); sys.exit(code)"
    )
    command = [sys.executable, "-c", program, "run", str(source), "-o", str(tmp_path / "out.jsonl")]

    done = subprocess.run(
        [*command, "--redis-url", ready_url], cwd=CHECKOUT, env=environment(), capture_output=True, check=False
    )

    assert 0 == done.returncode, done.stderr
    peak_kb = int(done.stdout.splitlines()[-1])
    print(f"peak of memory: {peak_kb / 1024:.0f} MiB")
    assert peak_kb < 300 * 1024
    with (tmp_path / "out.jsonl").open("rb") as file:
        for number, line in enumerate(file):
            assert f"line-{number}" == json.loads(line)["custom_id"]
    assert 99_999 == number
