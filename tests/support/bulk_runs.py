"""Bulk jobs for tests: documents, runs as processes that are killed, and what they must have written."""

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pagemill.client import Client
from pagemill.object_store import open_store
from producers.bulk.decoders import read_rows
from producers.bulk.manifest import read_manifest, verify_manifest
from producers.bulk.planner import read_plan
from producers.bulk.rows import OutputRow
from producers.bulk.shards import list_shards, shard_name
from tests.support.services import CHECKOUT


def write_documents(path: Path, num_documents: int, **fields: Any) -> Path:
    """A JSONL file of short texts, no two alike."""
    lines = (
        json.dumps(
            {"custom_id": f"doc-{number}", "text": f"Document {number} tells of {number * 7919 % 1009}.", **fields}
        )
        for number in range(num_documents)
    )
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def output_rows(output: str) -> list[OutputRow]:
    """All rows of an output, in the order of its shards."""
    store = open_store(output)
    plan = read_plan(store)
    assert plan is not None
    form = plan.spec.output_format
    names = [shard_name(index, form) for index in sorted(index for index, _ in list_shards(store, form))]
    return [row for name in names for row in read_rows(store, store.url(name), form)]


def bulk_command(command: str, *flags: str) -> list[str]:
    return [sys.executable, "-P", "-m", "producers.bulk", command, *flags]


def bulk(command: str, *flags: str) -> "subprocess.CompletedProcess[str]":
    """`pagemill bulk` to its end."""
    return subprocess.run(bulk_command(command, *flags), cwd=CHECKOUT, capture_output=True, text=True, timeout=600)


def run_killed(
    folder: Path, flags: Sequence[str], output: str, *, kills: int, num_chunks: int, draw: random.Random
) -> "subprocess.CompletedProcess[str]":
    """
    Run a job, kill it several times at random within the first half of its chunks, and run it to its end.

    Each time it is killed with SIGKILL, a little after so many chunks as were drawn have been written.
    """
    store = open_store(output)
    command = bulk_command("run", *flags, "--output", output)
    targets = sorted(draw.sample(range(num_chunks // 2), kills))
    for number, target in enumerate(targets):
        with (folder / f"run-{number}.log").open("wb") as log:
            process = subprocess.Popen(command, cwd=CHECKOUT, stdout=log, stderr=log)
        while sum(1 for _ in list_shards(store)) < target + 1 and process.poll() is None:
            time.sleep(0.002)
        time.sleep(draw.uniform(0.0, 0.03))
        process.send_signal(signal.SIGKILL)
        assert process.wait(30) == -signal.SIGKILL, (folder / f"run-{number}.log").read_text()
        assert read_manifest(store) is None
    return bulk("run", *flags, "--output", output)


def check_complete(output: str, num_documents: int, client: Client) -> dict[str, int]:
    """
    That there is one row for each document, in order, under a manifest that was written last; and that
    no job was run twice. Gives the counts.
    """
    store = open_store(output)
    manifest, plan = read_manifest(store), read_plan(store)
    assert manifest is not None
    assert plan is not None
    rows = output_rows(output)
    assert [f"doc-{number}" for number in range(num_documents)] == [row.custom_id for row in rows]
    assert list(range(num_documents)) == [row.row for row in rows]
    assert {"done"} == {row.status for row in rows}
    assert [] == list(verify_manifest(store, manifest))
    folder = Path(output.removeprefix("file://"))
    last = max(path.stat().st_mtime_ns for path in folder.glob("part-*"))
    assert (folder / "manifest.json").stat().st_mtime_ns >= last
    batch = client.batch_status(f"{plan.batch_base}-0")
    assert ("ended", num_documents, num_documents) == (batch.state, batch.total, batch.done)
    return {"rows": len(rows), "shards": len(manifest.shards), "jobs": batch.total}
