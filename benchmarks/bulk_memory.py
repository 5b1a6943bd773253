"""
Memory and speed of a bulk job's input: a large file is planned, and every chunk of it read again.

    python -m benchmarks.bulk_memory [--format jsonl] [--rows 10000000] [--line-bytes 200] [--rows-per-chunk 1000]

The file is made in a temporary folder and deleted. A process of its own plans and reads, and says its peak of resident
memory. One JSON line on standard output.
"""

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from producers.bulk.rows import Document
from producers.bulk.sources import open_source

_READER = "--reader"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=["jsonl", "jsonl.gz", "jsonl.zst", "parquet"], default="jsonl")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--line-bytes", type=int, default=200)
    parser.add_argument("--rows-per-chunk", type=int, default=1000)
    parser.add_argument(_READER, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.reader is not None:
        print(json.dumps(read(arguments.reader, arguments.rows_per_chunk)))
        return
    with tempfile.TemporaryDirectory(prefix="bulk-memory-") as folder:
        path = Path(folder) / f"documents.{arguments.format}"
        make(path, arguments.format, arguments.rows, arguments.line_bytes)
        size = path.stat().st_size
        command = [sys.executable, "-m", "benchmarks.bulk_memory", _READER, str(path)]
        command += ["--rows-per-chunk", str(arguments.rows_per_chunk)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures = json.loads(done.stdout)
    if figures["rows_read"] != arguments.rows:
        raise SystemExit(f"{figures['rows_read']:,} documents were read of {arguments.rows:,}")
    print(json.dumps({"bulk_memory": arguments.format, "input_bytes": size, "rows": arguments.rows, **figures}))


def make(path: Path, format: str, num_rows: int, line_bytes: int) -> None:  # noqa: A002
    """Write rows with ids, each of so many bytes as a line."""
    empty = len(json.dumps({"custom_id": f"doc-{0:010d}", "text": "", "lang": "en"})) + 1
    words = "seventy words of a document that has to be summarised before the morning "
    text = (words * (line_bytes // len(words) + 1))[: line_bytes - empty]
    if format == "parquet":
        _make_table(path, num_rows, text)
        return
    lines = (f'{{"custom_id": "doc-{row:010d}", "text": "{text}", "lang": "en"}}\n'.encode() for row in range(num_rows))
    _make_lines(path, format, lines)


def _make_lines(path: Path, format: str, lines: Iterator[bytes]) -> None:  # noqa: A002
    if format == "jsonl.gz":
        with gzip.open(path, "wb", compresslevel=1) as file:
            file.writelines(lines)
    elif format == "jsonl.zst":
        import zstandard

        with path.open("wb") as file, zstandard.ZstdCompressor().stream_writer(file) as packed:
            for line in lines:
                packed.write(line)
    else:
        with path.open("wb") as file:
            file.writelines(lines)


def _make_table(path: Path, num_rows: int, text: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetWriter(path, pa.schema([("custom_id", pa.string()), ("text", pa.string())])) as table:
        for first in range(0, num_rows, 100_000):
            rows = range(first, min(first + 100_000, num_rows))
            # a text of its own for each row, else the column would be one entry of a dictionary
            columns = {"custom_id": [f"doc-{row:010d}" for row in rows], "text": [f"{row}{text}" for row in rows]}
            table.write_table(pa.table(columns))


def read(path: Path, rows_per_chunk: int) -> dict[str, float]:
    """Plan all chunks, then read each, and say what it took."""
    source = open_source(path.as_uri())
    started, cpu_started = time.perf_counter(), time.process_time()
    chunks = list(source.chunks(rows_per_chunk))
    planned, cpu_planned = time.perf_counter(), time.process_time()
    planned_peak = _peak_mib()
    num_rows = sum(1 for chunk in chunks for item in source.read(chunk) if isinstance(item, Document))
    ended, cpu_ended = time.perf_counter(), time.process_time()
    return {
        "rows_per_chunk": rows_per_chunk,
        "chunks": len(chunks),
        "rows_read": num_rows,
        "planned_rows_s": round(num_rows / (planned - started)),
        "read_rows_s": round(num_rows / (ended - planned)),
        # by processor time: what else runs on the machine does not count
        "planned_rows_cpu_s": round(num_rows / (cpu_planned - cpu_started)),
        "read_rows_cpu_s": round(num_rows / (cpu_ended - cpu_planned)),
        "planned_peak_mib": planned_peak,
        "peak_mib": _peak_mib(),
    }


def _peak_mib() -> float:
    # of this program alone: what getrusage says begins with the memory of the process that started it
    status = Path("/proc/self/status").read_text()
    (kib,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    return round(int(kib) / 1024, 1)


if __name__ == "__main__":
    main()
