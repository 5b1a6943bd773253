"""
Memory and speed of a bulk job's input: a large file of JSON lines is planned, and every chunk of it read again.

    python -m benchmarks.bulk_memory [--rows 10000000] [--line-bytes 200] [--rows-per-chunk 1000]

The file is made in a temporary folder and deleted. A process of its own plans and reads, and says its peak of resident
memory. One JSON line on standard output.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from producers.bulk.rows import Document
from producers.bulk.sources import open_source

_READER = "--reader"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--line-bytes", type=int, default=200)
    parser.add_argument("--rows-per-chunk", type=int, default=1000)
    parser.add_argument(_READER, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.reader is not None:
        print(json.dumps(read(arguments.reader, arguments.rows_per_chunk)))
        return
    with tempfile.TemporaryDirectory(prefix="bulk-memory-") as folder:
        path = Path(folder) / "documents.jsonl"
        make(path, arguments.rows, arguments.line_bytes)
        size = path.stat().st_size
        command = [sys.executable, "-m", "benchmarks.bulk_memory", _READER, str(path)]
        command += ["--rows-per-chunk", str(arguments.rows_per_chunk)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures = json.loads(done.stdout)
    if figures["rows_read"] != arguments.rows:
        raise SystemExit(f"{figures['rows_read']:,} documents were read of {arguments.rows:,}")
    print(json.dumps({"bulk_memory": "jsonl", "input_bytes": size, "rows": arguments.rows, **figures}))


def make(path: Path, num_rows: int, line_bytes: int) -> None:
    """Write rows with ids, each of about so many bytes."""
    empty = len(json.dumps({"custom_id": f"doc-{0:010d}", "text": "", "lang": "en"})) + 1
    text = ("seventy words of a document that has to be summarised before the morning " * 100)[: line_bytes - empty]
    with path.open("w", encoding="utf-8") as file:
        for row in range(num_rows):
            file.write(f'{{"custom_id": "doc-{row:010d}", "text": "{text}", "lang": "en"}}\n')


def read(path: Path, rows_per_chunk: int) -> dict[str, float]:
    """Plan all chunks, then read each, and say what it took."""
    source = open_source(path.as_uri())
    started = time.perf_counter()
    chunks = list(source.chunks(rows_per_chunk))
    planned = time.perf_counter()
    planned_rss = _peak_mib()
    num_rows = sum(1 for chunk in chunks for item in source.read(chunk) if isinstance(item, Document))
    ended = time.perf_counter()
    return {
        "rows_per_chunk": rows_per_chunk,
        "chunks": len(chunks),
        "rows_read": num_rows,
        "planned_rows_s": round(num_rows / (planned - started)),
        "read_rows_s": round(num_rows / (ended - planned)),
        "planned_peak_mib": planned_rss,
        "peak_mib": _peak_mib(),
    }


def _peak_mib() -> float:
    # in KiB on Linux
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


if __name__ == "__main__":
    main()
