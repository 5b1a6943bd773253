"""
Submit every text of a folder and print the answers in the order in which they come.

    python examples/submit_many.py examples/documents

Run it again at once and nothing is computed twice: each job has its file's name as the
idempotency key, so that the queue knows it and gives the result that it has.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from pagemill.client import Client
from pagemill.schema import Job, Message, Options

QUESTION = "Give this text a title of at most five words."


def jobs(folder: Path) -> Iterator[Job]:
    for path in sorted(folder.glob("*.txt")):
        yield Job(
            messages=(
                Message(role="system", content=QUESTION),
                Message(role="user", content=path.read_text(encoding="utf-8")),
            ),
            options=Options(max_tokens=16, stop=("\n",)),
            lane="bulk",
            idempotency_key=f"title-of-{path.name}",
            metadata={"document": path.name},
        )


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "documents"
    with Client() as client:
        # read, sent and acknowledged in batches: a folder of a million files would do
        accepted = client.submit_many(jobs(folder), wait_s=60)
        for result in client.finished([job.job_id for job in accepted], wait_s=300):
            said = result.text.strip() if result.failure is None else f"failed: {result.failure.message}"
            print(f"{result.metadata['document']}: {said}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
