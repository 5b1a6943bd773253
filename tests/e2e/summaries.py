"""
Summaries of real documents by a real model, read from and written to a real S3-compatible server.

    python -m tests.e2e.summaries
"""

import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from pagemill.bulk_client import BulkClient
from pagemill.object_store import open_store
from producers.bulk.manifest import read_manifest, verify_manifest
from producers.bulk.rows import OutputRow
from producers.child import Child
from producers.demo import DOCUMENTS, WORKER_ENVIRON
from producers.local_redis import local_redis
from tests.support.bulk_runs import bulk_command, output_rows
from tests.support.models import real_model
from tests.support.seaweed import ACCESS_KEY, BUCKET, SECRET_KEY, Seaweed
from tests.support.servers import wait_for
from tests.support.services import CHECKOUT

_CREDENTIALS = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}


def run(workdir: Path, *, documents: int | None = None, max_tokens: int = 40) -> dict[str, int]:
    """
    Put documents of `examples/documents` into a bucket, summarise them, and check the bucket's output.

    Args:
        documents: So many of them, in order of their names; None is all, and one long document
            of all their texts, which is summarised part by part.

    Returns:
        Counts: rows, shards, jobs, and tokens of prompts and answers.
    """
    os.environ.update(_CREDENTIALS)
    model = str(real_model())
    with ExitStack() as stack:
        server = stack.enter_context(Seaweed(workdir / "s3"))
        names = _upload(server, documents)
        url = stack.enter_context(local_redis())
        worker = [sys.executable, "-m", "worker", "--redis-url", url, "--model", model, "--max-model-len", "1024"]
        environ = {**os.environ, **WORKER_ENVIRON}
        stack.enter_context(Child(worker, log=workdir / "worker.log", environ=environ, grace_s=30))
        output = server.url("summaries")
        flags = [
            "--input",
            server.url("documents/"),
            "--output",
            output,
            "--redis-url",
            url,
            "--model",
            Path(model).name,
        ]
        flags += ["--option", f"max_tokens={max_tokens}", "--rows-per-chunk", "8"]
        _await_worker(url)
        command = bulk_command("run", *flags, "--json")
        done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
        summary = json.loads(done.stdout)
        return {**_check(output, names, max_tokens), "jobs": _num_jobs(url)} | {
            name: summary["usage"][name] for name in ("prompt_tokens", "completion_tokens")
        }


def _upload(server: Seaweed, documents: int | None) -> list[str]:
    """Gives the names of the objects, in their order."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(DOCUMENTS.glob("*.txt"))[:documents]}
    if documents is None:
        texts["99-everything.txt"] = "\n\n".join(texts.values())
    for name, text in texts.items():
        server.client().put_object(Bucket=BUCKET, Key=f"documents/{name}", Body=text.encode())
    return list(texts)


def _await_worker(url: str) -> None:
    """Until it serves: the plan then has the model's own tokenizer and context."""
    with BulkClient(url) as client:
        wait_for(client.tokenizer_json, 120)


def _check(output: str, names: list[str], max_tokens: int) -> dict[str, int]:
    store = open_store(output)
    manifest = read_manifest(store)
    assert manifest is not None
    assert [] == list(verify_manifest(store, manifest))
    rows = output_rows(output)
    assert names == [row.custom_id for row in rows]
    assert ["done"] * len(names) == [row.status for row in rows]
    assert [] == [(row.custom_id, row.text) for row in rows if not _reads_like_a_summary(row, max_tokens)]
    return {"rows": len(rows), "shards": len(manifest.shards)}


def _reads_like_a_summary(row: OutputRow, max_tokens: int) -> bool:
    """Words, mostly; what they say is the model's affair."""
    text = row.text or ""
    letters = sum(character.isalpha() or character.isspace() for character in text)
    return 3 <= len(text.split()) <= max_tokens and letters > 0.6 * len(text)


def _num_jobs(url: str) -> int:
    with BulkClient(url) as client:
        return sum(batch.total for batch in client.list_batches())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="pagemill-e2e-") as folder:
        print(json.dumps(run(Path(folder))))
